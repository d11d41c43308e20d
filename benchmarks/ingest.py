"""What a sidecar spends on what hooks send: `python -m benchmarks.ingest [--cases a,b,c]`.

    python -m benchmarks.ingest [--seconds 30] [--cases a,b,c] [--json PATH]

`resihp serve` with its own embedded Redis gets the messages of many hosts, sent at given times
whatever it answers, as the hooks of ordinary loops send them: records of the passes of eight or
sixteen microbatches, heartbeats of each rank with sensors, keys of repetition. Messages are made
beforehand, and sent by a process whose own processor time is shown.

    a   64 ranks of one host; on 8 hosts; and each rank by itself, as without a shared sender.
        A message every 0.5 s, the default of the hooks
    b   1,024 ranks on 128 hosts, a message every 0.5 s
    c   16,384 ranks on 2,048 hosts, 105,000 records/s, a message for each step of 5 s

After a third of the steps some ranks take 1.3 times as long. Shown are the delay from when the
first slow record of a rank was to be sent until its verdict arrives in the event stream, and the
number of its slow steps that the verdict is based on. Applied records are those read by a worker,
over the time from the first message until the lag is zero; not saved are those that no saved state
has half a minute later, negative where a message that was not answered with 202 is in one all the
same. Shares of a core are by the kernel's accounts of each process and its descendants;
needed is what all would take at the rate offered, where a busy machine let them do less. Memory is
the peak of the process itself. The answers' times count from when a message was due. The peer is a
FastAPI app in the usual style, with one model per record: it is sent the same records as JSON,
checks them and stores nothing.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import urllib3

from resihp.client import Client
from service import Sidecar

from ._ingest_load import Load, send_load
from ._ingest_peer import peer_records_per_core_s
from ._ingest_watch import VerdictWatch, parts_of_service, peak_mb, spent_s
from ._report import machine, print_table, write_json

_DRAIN_S, _VERDICT_S, _SAVE_S = 60.0, 20.0, 30.0  # longest waits at the end of a case
_PEER_S, _PEER_MESSAGES = 3.0, 64
_HOST = Load(ranks=64, together=64, step_s=1.0, interval_s=0.5, microbatches=8)
_CASES = {
    "a": {
        "64 ranks, 1 host": _HOST,
        "64 ranks, 8 hosts": replace(_HOST, together=8),
        "64 ranks, each by itself": replace(_HOST, together=1),
    },
    "b": {
        "1,024 ranks, 128 hosts": Load(
            ranks=1_024, together=8, step_s=2.0, interval_s=0.5, microbatches=8, slow=4
        ),
    },
    "c": {
        "16,384 ranks, 2,048 hosts": Load(
            ranks=16_384, together=8, step_s=5.0, interval_s=5.0, microbatches=16, slow=8
        ),
    },
}  # fmt: skip


def measure(load: Load, seconds: float) -> dict[str, Any]:
    """Figures of one load: counts, rates per second, shares of a core, megabytes and seconds."""
    ours, theirs = multiprocessing.Pipe()
    with tempfile.TemporaryDirectory() as folder, Sidecar(Path(folder)) as sidecar:
        assert sidecar.pid is not None
        process = multiprocessing.get_context("spawn").Process(
            target=send_load, args=(theirs, load, sidecar.url, seconds)
        )
        process.start()
        theirs.close()
        try:
            Client(sidecar.url, timeout=60).register(load.job)
            ours.recv()  # it has made its messages
            watch = VerdictWatch(sidecar.url, load.job.name)
            time.sleep(2.0)  # until the worker has acquired the job
            parts = parts_of_service(sidecar.pid)
            before = {part: sum(map(spent_s, pids)) for part, pids in parts.items()}
            begun_s = time.monotonic()
            ours.send(None)
            sent = ours.recv()
            lag_s = _lag_s(sidecar.url)
            drained = _wait(lambda: _lag_s(sidecar.url) == 0.0, _DRAIN_S)
            took_s = time.monotonic() - begun_s
            after = {part: sum(map(spent_s, pids)) for part, pids in parts.items()}
            _wait(lambda: {n.rank for n in watch.named} >= set(load.slow_ranks), _VERDICT_S)
            _wait(lambda: _applied(sidecar.url) == sent["accepted"], _SAVE_S)
            figures = {
                **sent,
                "offered_per_s": load.records_per_s,
                "accepted_per_s": sent["accepted_in_time"] / sent["seconds"],
                "applied_per_s": sent["accepted"] / took_s if drained else None,
                "lost": sent["accepted"] - _applied(sidecar.url),
                "lag_s": lag_s,
                "cores": {part: (after[part] - before[part]) / took_s for part in parts},
                "peak_mb": {part: sum(map(peak_mb, pids)) for part, pids in parts.items()},
                "records_per_core_s": sent["accepted"]
                / (sum(after.values()) - sum(before.values())),
                **_verdicts(load, watch, sent),
            }
        finally:
            process.kill()
            process.join()
    sample = [batch for parts in next(load.batches()) for batch in parts]
    figures["peer_records_per_core_s"] = peer_records_per_core_s(sample[:_PEER_MESSAGES], _PEER_S)
    return figures


def _wait(condition: Callable[[], bool], timeout_s: float) -> bool:
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.25)
    return True


def _lag_s(url: str) -> float:
    """Lag of the job, of which the API has a new value once a second."""
    return float(urllib3.request("GET", f"{url}/v1/healthz").json()["lag_s"])


def _applied(url: str) -> int:
    """Records in saved states."""
    text = urllib3.request("GET", f"{url}/metrics").data.decode()
    lines = [line for line in text.splitlines() if line.startswith("resihp_applied_records_total{")]
    return sum(int(float(line.rsplit(" ", 1)[1])) for line in lines)


def _verdicts(load: Load, watch: VerdictWatch, sent: dict[str, Any]) -> dict[str, Any]:
    """Delays of the verdicts on the slow ranks in seconds and steps, and wrong verdicts."""
    first_slow_s = sent.pop("first_slow_s")
    right = [n for n in watch.named if n.rank in load.slow_ranks and n.status == "fail_slow"]
    delays_s = [n.seen_s - first_slow_s[n.rank // load.together] for n in right]
    steps = [n.step - sent["first_slow_step"] + 1 for n in right if n.step is not None]
    return {
        "slow_ranks": load.slow,
        "named": len(right),
        "named_wrongly": [[n.rank, n.status, n.step] for n in watch.named if n not in right],
        "verdict_p50_s": float(np.percentile(delays_s, 50)) if right else None,
        "verdict_p99_s": float(np.percentile(delays_s, 99)) if right else None,
        "verdict_steps": max(steps, default=None),
    }


def main() -> None:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seconds", type=float, default=30.0, help="of sending, for each row")
    parser.add_argument("--cases", default="a,b,c", help="of a, b and c")
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
         "lag at end", "verdict p50, p99", "slow steps", "named", "wrongly", "not saved"),
        [
            (
                name, f"{r['telemetry']:,}", f"{r['offered_per_s']:,.0f}",
                f"{r['accepted_per_s']:,.0f}", _number(r["applied_per_s"], ",.0f"), _refused(r),
                f"{1e3 * r['answer_p50_s']:.0f}, {1e3 * r['answer_p99_s']:.0f} ms",
                f"{r['lag_s']:.1f} s",
                f"{_number(r['verdict_p50_s'], '.1f')}, {_number(r['verdict_p99_s'], '.1f')} s",
                _number(r["verdict_steps"], "d"), f"{r['named']} of {r['slow_ranks']}",
                len(r["named_wrongly"]), f"{r['lost']:,}",
            )
            for name, r in results.items()
        ],
    )  # fmt: skip
    print_table(
        "Shares of a core, peak memory, and records per second of processor time",
        ("", "API", "worker", "Redis", "all", "needed", "API MB", "worker MB", "Redis MB",
         "records/core-s", "peer", "ratio", "generator"),
        [
            (
                name, *(f"{r['cores'][part]:.1%}" for part in ("api", "worker", "redis")),
                f"{sum(r['cores'].values()):.1%}",
                f"{r['offered_per_s'] / r['records_per_core_s']:.1%}",
                *(f"{r['peak_mb'][part]:,.0f}" for part in ("api", "worker", "redis")),
                f"{r['records_per_core_s']:,.0f}", f"{r['peer_records_per_core_s']:,.0f}",
                f"{r['records_per_core_s'] / r['peer_records_per_core_s']:.2f}x",
                f"{r['generator']:.1%}",
            )
            for name, r in results.items()
        ],
    )  # fmt: skip


def _refused(result: dict[str, Any]) -> str:
    return f"{sum(n for status, n in result['statuses'].items() if status not in ('200', '202')):,}"


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    main()
