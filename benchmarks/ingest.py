"""What a sidecar spends on what hooks send: `python -m benchmarks.ingest [--cases a,b,c,d]`.

    python -m benchmarks.ingest [--seconds 30] [--cases a,b,c,d] [--json PATH]

`resihp serve` with its own embedded Redis gets the messages of many hosts as the hooks of ordinary
loops send them: records of the passes of eight or sixteen microbatches at given times, less often
while it asks for that, heartbeats of each rank with sensors, keys of repetition. They are sent by a
process whose own processor time is shown.

    a   64 ranks of one host, with a message every 0.5 s; on 8 hosts, and each rank by itself, as
        without a shared sender, every 1 s: the defaults of the hooks
    b   1,024 ranks on 128 hosts, a message every 1 s
    c   16,384 ranks on 2,048 hosts, 105,000 records/s, a message for each step of 5 s
    d   1,000 jobs of 64 ranks on a host each, 102,000 records/s, steps of 10 s, a message every
        0.5 s; three workers

After a third of the steps some ranks take 1.3 times as long, in d in eight of the jobs. Shown are
the delay from when the first slow record of a rank was to be sent until its verdict arrives in the
event stream, and the number of its slow steps that the verdict is based on. Applied records are
those read by a worker, over the time from the first message until the lag is zero; not saved are
those that no saved state has half a minute later, negative where a message that was not answered
with 202 is in one all the same. The lag is what the API says once a second: its longest, and that
at the end. Shares of a core are by the kernel's accounts of each process and its descendants;
needed is what all would take at the rate offered, where a busy machine let them do less. Memory is
the peak of the processes. The answers' times count from when a message was due. The peer is a
FastAPI app in the usual style, with one model per record: it is sent the same records as JSON,
checks them and stores nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from resihp.client import Client
from service import Sidecar

from ._ingest_load import Load, send_load
from ._ingest_peer import peer_records_per_core_s
from ._ingest_watch import VerdictWatch, memory_mb, parts_of_service, spent_s
from ._report import machine, print_table, write_json

_DRAIN_S, _VERDICT_S, _SAVE_S = 60.0, 20.0, 30.0  # longest waits at the end of a case
_ACQUIRE_S = 0.01  # for a worker to acquire a job
_PEER_S, _PEER_MESSAGES = 3.0, 64
_HOST = Load(ranks=64, together=64, step_s=1.0, interval_s=0.5, microbatches=8)
_CASES = {
    "a": {
        "64 ranks, 1 host": _HOST,
        "64 ranks, 8 hosts": replace(_HOST, together=8, interval_s=1.0),
        "64 ranks, each by itself": replace(_HOST, together=1, interval_s=1.0),
    },
    "b": {
        "1,024 ranks, 128 hosts": Load(
            ranks=1_024, together=8, step_s=2.0, interval_s=1.0, microbatches=8, slow=4
        ),
    },
    "c": {
        "16,384 ranks, 2,048 hosts": Load(
            ranks=16_384, together=8, step_s=5.0, interval_s=5.0, microbatches=16, slow=8
        ),
    },
    "d": {
        "1,000 jobs of 64 ranks": Load(
            ranks=64, together=64, step_s=10.0, interval_s=0.5, microbatches=8,
            jobs=1_000, slow_jobs=8, workers=3,
        ),
    },
}  # fmt: skip


def measure(load: Load, seconds: float) -> dict[str, Any]:
    """Figures of one load: counts, rates per second, shares of a core, megabytes and seconds."""
    ours, theirs = multiprocessing.Pipe()
    os.environ["RESIHP_MAX_JOBS"] = str(max(256, load.jobs))
    with (
        tempfile.TemporaryDirectory() as folder,
        Sidecar(Path(folder)) as sidecar,
        _more_workers(load.workers - 1, folder) as workers,
    ):
        assert sidecar.pid is not None
        process = multiprocessing.get_context("spawn").Process(
            target=send_load, args=(theirs, load, sidecar.url, seconds)
        )
        process.start()
        theirs.close()
        try:
            client = Client(sidecar.url, timeout=60)
            for job in load.descriptions:
                client.register(job)
            ours.recv()  # it has made its messages
            slow = [job.name for job in load.descriptions[: load.slow_jobs]]
            watches = [VerdictWatch(sidecar.url, name) for name in slow]
            time.sleep(2.0 + _ACQUIRE_S * load.jobs)
            parts = parts_of_service(sidecar.pid)
            parts["worker"] += workers
            before = {part: sum(map(spent_s, pids)) for part, pids in parts.items()}
            begun_s = time.monotonic()
            ours.send(None)
            lags_s, memories_mb = [0.0], []
            while not ours.poll(1.0):
                lags_s.append(_lag_s(sidecar.url))
                memories_mb.append({part: sum(map(memory_mb, parts[part])) for part in parts})
            sent, lag_s = ours.recv(), _lag_s(sidecar.url)
            drained = _wait(lambda: _lag_s(sidecar.url) == 0.0, _DRAIN_S)
            took_s = time.monotonic() - begun_s
            after = {part: sum(map(spent_s, pids)) for part, pids in parts.items()}
            slow_ranks = set(load.slow_ranks)
            _wait(lambda: all({n.rank for n in w.named} >= slow_ranks for w in watches), _VERDICT_S)
            _wait(lambda: _applied(sidecar.url) == sent["accepted"], _SAVE_S)
            figures = {
                **_verdicts(load, watches, sent),
                **sent,
                "offered_per_s": load.records_per_s,
                "accepted_per_s": sent["accepted_in_time"] / sent["seconds"],
                "applied_per_s": sent["accepted"] / took_s if drained else None,
                "lost": sent["accepted"] - _applied(sidecar.url),
                "lag_s": lag_s,
                "lags_s": lags_s,
                "cores": {part: (after[part] - before[part]) / took_s for part in parts},
                "peak_mb": {p: sum(memory_mb(i, "VmHWM") for i in ids) for p, ids in parts.items()},
                "memory_mb": {part: _quarters([m[part] for m in memories_mb]) for part in parts},
                "records_per_core_s": sent["accepted"]
                / (sum(after.values()) - sum(before.values())),
                "other_jobs_named": _named_in_others(sidecar.url, slow),
            }
        finally:
            process.kill()
            process.join()
    sample = [batch for parts in next(load.batches()) for batch in parts]
    figures["peer_records_per_core_s"] = peer_records_per_core_s(sample[:_PEER_MESSAGES], _PEER_S)
    return figures


@contextlib.contextmanager
def _more_workers(number: int, folder: str) -> Iterator[list[int]]:
    """Process ids of so many `resihp worker` beside that of the sidecar in `folder`."""
    command = [sys.executable, "-m", "resihp.cli", "worker", "--data", folder]
    processes = [subprocess.Popen(command, stderr=subprocess.DEVNULL) for _ in range(number)]
    try:
        yield [process.pid for process in processes]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(_DRAIN_S)


def _named_in_others(url: str, slow: list[str]) -> int:
    """Jobs without a slow rank of which a rank was found slow or stopped."""
    jobs = urllib3.request("GET", f"{url}/v1/jobs", timeout=60.0).json()["jobs"]
    bad = {"fail_slow", "fail_stop"}
    return sum(bool(bad & job["devices"].keys()) for job in jobs if job["name"] not in slow)


def _quarters(values: list[float]) -> list[float]:
    """Means over the quarters of a time."""
    return [float(np.mean(part)) for part in np.array_split(values, 4) if len(part)]


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.25)
    return True


def _lag_s(url: str) -> float:
    """Lag of the job, of which the API has a new value once a second."""
    return float(urllib3.request("GET", f"{url}/v1/healthz", timeout=60.0).json()["lag_s"])


def _applied(url: str) -> int:
    """Records in saved states."""
    text = urllib3.request("GET", f"{url}/metrics", timeout=60.0).data.decode()
    lines = [line for line in text.splitlines() if line.startswith("resihp_applied_records_total{")]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


def _verdicts(load: Load, watches: list[VerdictWatch], sent: dict[str, Any]) -> dict[str, Any]:
    """Delays of the verdicts on the slow ranks in seconds and steps, and wrong verdicts."""
    first_slow_s = sent.pop("first_slow_s")
    named = [(job, each) for job, watch in enumerate(watches) for each in watch.named]
    right = [(job, n) for job, n in named if n.rank in load.slow_ranks and n.status == "fail_slow"]
    delays_s = [n.seen_s - first_slow_s[job, n.rank // load.together] for job, n in right]
    steps = [n.step - sent["first_slow_step"] + 1 for _, n in right if n.step is not None]
    wrong = [[job, n.rank, n.status, n.step] for job, n in named if (job, n) not in right]
    return {
        "slow_ranks": load.slow * load.slow_jobs,
        "named": len(right),
        "named_wrongly": wrong,
        "verdict_p50_s": float(np.percentile(delays_s, 50)) if right else None,
        "verdict_p99_s": float(np.percentile(delays_s, 99)) if right else None,
        "verdict_steps": max(steps, default=None),
    }


def main() -> None:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="of sending, for each row")
    parser.add_argument("--cases", default="a,b,c,d", help="of a, b, c and d")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    chosen = given.cases.split(",")
    loads = list(itertools.chain.from_iterable(_CASES[case].items() for case in chosen))
    results = {}
    for name, load in loads:
        results[name] = measure(load, given.seconds)
        print(f"measured: {name}", file=sys.stderr)
    print(machine())
    _print(results)
    if given.json is not None:
        write_json(given.json, {"seconds": given.seconds, "cases": results})


def _print(results: dict[str, dict[str, Any]]) -> None:
    print_table(
        "Records and verdicts",
        ("", "messages", "records/s offered", "accepted", "applied", "not 202", "answer p50, p99",
         "lag, at end", "verdict p50, p99", "slow steps", "named", "wrongly", "not saved"),
        [
            (
                name, f"{r['telemetry']:,}", f"{r['offered_per_s']:,.0f}",
                f"{r['accepted_per_s']:,.0f}", _number(r["applied_per_s"], ",.0f"), _refused(r),
                f"{1e3 * r['answer_p50_s']:.0f}, {1e3 * r['answer_p99_s']:.0f} ms",
                f"{max(r['lags_s']):.1f}, {r['lag_s']:.1f} s",
                f"{_number(r['verdict_p50_s'], '.1f')}, {_number(r['verdict_p99_s'], '.1f')} s",
                _number(r["verdict_steps"], "d"), f"{r['named']} of {r['slow_ranks']}",
                len(r["named_wrongly"]) + r["other_jobs_named"], f"{r['lost']:,}",
            )
            for name, r in results.items()
        ],
    )  # fmt: skip
    print_table(
        "Shares of a core, and records per second of processor time",
        ("", "API", "worker", "Redis", "all", "needed", "records/core-s", "peer", "ratio",
         "generator"),
        [
            (
                name, *(f"{r['cores'][part]:.1%}" for part in r["cores"]),
                f"{sum(r['cores'].values()):.1%}",
                f"{r['offered_per_s'] / r['records_per_core_s']:.1%}",
                f"{r['records_per_core_s']:,.0f}", f"{r['peer_records_per_core_s']:,.0f}",
                f"{r['records_per_core_s'] / r['peer_records_per_core_s']:.2f}x",
                f"{r['generator']:.1%}",
            )
            for name, r in results.items()
        ],
    )  # fmt: skip
    print_table(
        "Memory in MB: means of the quarters of the time, and the peak",
        ("", "API", "peak", "worker", "peak", "Redis", "peak"),
        [
            (name, *itertools.chain.from_iterable(
                ("  ".join(f"{mb:,.0f}" for mb in r["memory_mb"][part]),
                 f"{r['peak_mb'][part]:,.0f}")
                for part in r["cores"]
            ))
            for name, r in results.items()
        ],
    )  # fmt: skip


def _refused(result: dict[str, Any]) -> str:
    return f"{sum(n for status, n in result['statuses'].items() if status not in ('200', '202')):,}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    main()
