"""Processor time of a worker by the number of a job's ranks.

    python -m benchmarks.worker_cost [--ranks 64,1024,4096] [--steps 3] [--json PATH]

One session of a worker, without Redis, takes what nodes of eight ranks send: telemetry of one step
a message, 16 records a rank, and heartbeats of all eight. Message and heartbeat are means over all
nodes and all steps but the first; the detector's work on a whole step is shared by its messages. Up
to 64 messages are applied together, as by a worker that finds so many; alone is a message applied
by itself. A tick is the check for silent and hanging ranks, at most four times a second; status is
what the API shows, and saved is the state, both of which a worker makes as often as a tenth of its
time allows. The last two columns are their sizes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from detector import Detector
from resihp.contracts import Heartbeat, Job, Layout, Plan, TelemetryBatch, to_json
from resihp.contracts.codec import encode
from resihp.testing.scenarios import steps_of
from scheduler import replan
from service.store.documents import JobMessage, MessageKind
from service.worker.adapters import Adapters
from service.worker.planning import Planner
from service.worker.session import JobSession

from ._report import machine, print_table, write_json

_NODE = 8
_TOGETHER = 64
_LENGTHS = (300, 700, 2000)
_COLUMNS = (
    "ranks", "message", "alone", "heartbeat", "tick", "status", "saved", "status_kb", "saved_kb"
)  # fmt: skip


def _job(ranks: int) -> Job:
    dp = max(1, ranks // 32)
    layout = Layout.grid(dp=dp, pp=4, tp=8, layers=32)
    return Job(name="bench", layout=layout, microbatches=8 * dp)


def _by_node(step: TelemetryBatch) -> Iterator[bytes]:
    """Messages of one step, one a node."""
    order = np.argsort(step.rank, kind="stable")
    nodes = step.rank[order] // _NODE
    for rows in np.split(order, np.flatnonzero(np.diff(nodes)) + 1):
        yield encode(step.select(rows))


def _beats(ranks: int, beat: int) -> Iterator[bytes]:
    for first in range(0, ranks, _NODE):
        members = tuple(range(first, first + _NODE))
        heartbeat = Heartbeat(ranks=members, process=f"node-{first}", sequence=beat)
        yield json.dumps({"heartbeats": [to_json(heartbeat)]}).encode()


def _spent_ms(work: Callable[[], object]) -> float:
    begun = time.thread_time()
    work()
    return (time.thread_time() - begun) * 1e3


def measure(ranks: int, steps: int) -> dict[str, float]:
    """Milliseconds of the worker's thread, and sizes in kilobytes, by `_COLUMNS`."""
    job = _job(ranks)
    adapters = Adapters(lambda job, _: Detector(job), Detector.restore, replan)
    plan = Plan(version=0, layout=job.layout, quotas=job.quotas)
    planner = Planner(adapters, time_limit_s=5.0)
    session = JobSession(job, plan, adapters, planner)

    def apply(kind: MessageKind, bodies: list[bytes], together: int = _TOGETHER) -> float:
        """Return the mean time of a message."""
        messages = [JobMessage(f"1-{number}", kind, body) for number, body in enumerate(bodies)]

        def all_of_them() -> None:
            for first in range(0, len(messages), together):
                session.apply(*messages[first : first + together])

        return _spent_ms(all_of_them) / len(messages)

    telemetry, heartbeats = [], []
    *together, alone = steps_of(job, _LENGTHS, steps=steps + 2, seed=0)
    for number, step in enumerate(together):
        telemetry.append(apply(MessageKind.TELEMETRY, list(_by_node(step))))
        heartbeats.append(apply(MessageKind.HEARTBEAT, list(_beats(ranks, number + 1))))
    alone_ms = apply(MessageKind.TELEMETRY, list(_by_node(alone)), together=1)
    errors = [document for kind, document in session.changes.events if kind == "error"]
    if errors:
        raise RuntimeError(f"the session failed: {errors[0]}")
    later = [
        _spent_ms(work) for work in (partial(session.tick, 1.0, 0.0), session.status, session.save)
    ]
    planner.close()
    message_ms, heartbeat_ms = (float(np.mean(times[1:])) for times in (telemetry, heartbeats))
    sizes = len(json.dumps(session.status())), sum(map(len, session.save().values()))
    figures = message_ms, alone_ms, heartbeat_ms, *later, *(size / 1e3 for size in sizes)
    return dict(zip(_COLUMNS, (float(ranks), *figures), strict=True))


def main() -> None:
    """Measure, print, and write JSON on request."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", default="64,1024,4096", help="sizes, multiples of 32")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results = [measure(int(ranks), given.steps) for ranks in given.ranks.split(",")]
    rows = [[f"{r['ranks']:,.0f}", *(f"{r[name]:.2f}" for name in _COLUMNS[1:])] for r in results]
    print(machine())
    print_table("Processor time of a worker, ms", _COLUMNS, rows)
    if given.json is not None:
        write_json(given.json, results)


if __name__ == "__main__":
    main()
