"""Prometheus metrics: requests of this process, and counters of the jobs from Redis."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client import Counter as PrometheusCounter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from ..store.http_store import HttpStore
from ..worker.reactions import latest_seconds
from .lag import JobLags

_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})
"""Each other method, of which a client can make up any number, is counted as "other"."""
_COUNTERS = {
    "messages": "messages accepted",
    "records": "microbatch records accepted",
    "bytes": "bytes of messages accepted",
    "duplicates": "repeated messages, not applied again",
    "refused": "messages refused because the backlog was full",
    "dropped": "records that senders reported as dropped",
    "applied_messages": "messages contained in a saved state of the detector",
    "applied_records": "records contained in a saved state of the detector",
    "verdicts": "changed verdicts",
    "plans": "plans published",
    "errors": "messages skipped after an error",
}
_GAUGES = {
    "backlog": "messages not yet contained in a saved state",
    "lag_seconds": "age of the oldest message that no worker has read, and the API's delay",
    "load": "share of a core that the job costs its worker",
    "last_step": "newest step reported by any rank",
    "plan_version": "plan that the ranks work under",
}

_DOCUMENTS = ("devices", "link_counts", "last_step", "rollout", "reactions")
_BY_STATUS = {
    "devices": "devices by verdict",
    "links": "links between ranks and groups of collectives by verdict",
}


class HttpMetrics:
    """Count and duration of the requests to this process, whose name is a label, and connections
    cut."""

    def __init__(self) -> None:
        self._process = multiprocessing.current_process().name
        self.registry = CollectorRegistry()
        self._requests = PrometheusCounter(
            "resihp_http_requests", "requests", ("process", "method", "route", "status"),
            registry=self.registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "resihp_http_request_seconds", "duration of requests", ("process", "method", "route"),
            registry=self.registry, buckets=_BUCKETS,
        )  # fmt: skip

        self._cut = PrometheusCounter(
            "resihp_http_cut", "connections closed because a request stopped arriving",
            ("process", "part"), registry=self.registry,
        )  # fmt: skip

    def observe(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one request."""
        method = method if method in _METHODS else "other"
        self._requests.labels(self._process, method, route, str(status)).inc()
        self._seconds.labels(self._process, method, route).observe(seconds)

    def count_cut(self, part: str) -> None:
        """Count a connection that is cut while it waits for the head or the body of a request."""
        self._cut.labels(self._process, part).inc()


async def exposition(store: HttpStore, lags: JobLags, http: HttpMetrics) -> bytes:
    """All metrics in the text format of Prometheus."""
    names, loads = await store.names(), await store.loads()
    columns = (
        await lags.of(*names),
        await store.counts(*names),
        await store.statuses(names, *_DOCUMENTS),
    )
    jobs = {
        name: {
            "lag_seconds": lag_s,
            "load": loads.get(name, 0.0),
            "counts": counts or {},
            "backlog": (counts or {}).get("backlog", 0),
            "devices": json.loads(status["devices"] or "{}"),
            "links": json.loads(status["link_counts"] or "{}"),
            "last_step": json.loads(status["last_step"] or "-1"),
            "reaction": latest_seconds(json.loads(status["reactions"] or "[]")),
            "plan_version": json.loads(status["rollout"] or "{}").get("active", 0),
        }
        for name, lag_s, counts, status in zip(names, *columns, strict=True)
    }
    return generate_latest(http.registry) + generate_latest(_Jobs(jobs, await lags.delay_s()))


class _Jobs(Collector):
    def __init__(self, jobs: dict[str, dict[str, Any]], delay_s: float) -> None:
        self._jobs, self._delay_s = jobs, delay_s

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(f"resihp_{name}", text, labels=["job"])
            for job, values in self._jobs.items():
                counter.add_metric([job], values["counts"].get(name, 0))
            yield counter
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(f"resihp_{name}", text, labels=["job"])
            for job, values in self._jobs.items():
                gauge.add_metric([job], values[name])
            yield gauge
        for name, text in _BY_STATUS.items():
            gauge = GaugeMetricFamily(f"resihp_{name}", text, labels=["job", "status"])
            for job, values in self._jobs.items():
                for status, count in values[name].items():
                    gauge.add_metric([job, status], count)
            yield gauge
        text = "seconds from the onset of the last fault to its verdict, plan and application"
        gauge = GaugeMetricFamily("resihp_reaction_seconds", text, labels=["job", "part"])
        for job, values in self._jobs.items():
            for part, seconds in values["reaction"].items():
                gauge.add_metric([job, part], seconds)
        yield gauge
        text = "age of the oldest request that the slowest API process may not have stored"
        yield GaugeMetricFamily("resihp_api_delay_seconds", text, value=self._delay_s)
