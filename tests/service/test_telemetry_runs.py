"""Telemetry applied in runs has the effects that it has message by message."""

from __future__ import annotations

import msgpack
import numpy as np
import pytest
from fakes import fake_adapters
from hypothesis import given, settings
from hypothesis import strategies as st

from detector import Detector
from resihp.contracts import Job, Layout, Plan, TelemetryBatch
from resihp.contracts.codec import encode
from resihp.testing.scenarios import Fault, steps_of
from scheduler import ReplanDecision
from service.store.documents import JobMessage, MessageKind
from service.worker.adapters import Adapters
from service.worker.planning import Planner
from service.worker.session import JobSession
from service.worker.telemetry_runs import TelemetryPart, joined, runs
from tests.service.conftest import batch_of, job_of

JOB = Job(name="j", layout=Layout.grid(dp=4, pp=2, tp=2, layers=8), microbatches=16)
FAULTS = (Fault(rank=5, factor=1.4, from_step=5),)


def message(number: int, body: bytes) -> JobMessage:
    return JobMessage(f"{number}-0", MessageKind.TELEMETRY, body)


def session_of(job: Job, adapters: Adapters | None = None) -> JobSession:
    adapters = adapters or fake_adapters()
    plan = Plan(version=0, layout=job.layout, quotas=job.quotas)
    planner = Planner(adapters, time_limit_s=5.0)
    return JobSession(job, plan, adapters, planner, unix_s=lambda: 1_000.0)


def real_session() -> JobSession:
    """A session that keeps its plan: a new one would begin after the newest step that is known."""

    def keep(*_: object, **__: object) -> ReplanDecision:
        return ReplanDecision(plan=None)

    return session_of(JOB, Adapters(lambda job, _: Detector(job), Detector.restore, keep))


@settings(max_examples=5, deadline=None)
@given(data=st.data())
def test_applied_together_is_applied_one_by_one(data: st.DataObject) -> None:
    """However ranks share messages, and whichever messages are read at once.

    Only the newest step at a verdict or a plan is that of the moment at which a run was applied.
    """
    nodes = data.draw(st.lists(st.integers(0, 3), min_size=16, max_size=16), label="node of rank")
    messages: list[JobMessage] = []
    for step in steps_of(JOB, (300, 700, 2000), steps=9, seed=1, faults=FAULTS):
        node = np.array(nodes)[step.rank]
        shards = [step.select(node == each) for each in sorted(set(nodes))]
        messages += [message(len(messages) + n, encode(s)) for n, s in enumerate(shards)]
    single, together = real_session(), real_session()
    for each in messages:
        single.apply(each)
    left = list(messages)
    while left:
        count = data.draw(st.integers(1, 12), label="read at once")
        together.apply(*left[:count])
        left = left[count:]
    assert together.changes == single.changes
    assert together.changes.applied == [each.id for each in messages]
    assert together.planning.speeds.keys() == {5}
    assert without_moments(together.status()) == without_moments(single.status())
    assert contents(together.save()) == contents(single.save())


def contents(saved: dict[str, bytes]) -> dict[str, object]:
    """The saved state; the order of the keys in that of the session means nothing."""
    session = msgpack.unpackb(saved["session"], strict_map_key=False)
    return {**saved, "session": without_moments(session)}


def without_moments(document: dict[str, object]) -> dict[str, object]:
    """The reactions in a document without when each verdict, plan and application came."""
    return {**document, "reactions": _timeless(document["reactions"])}


def _timeless(value: object) -> object:
    if isinstance(value, list):
        return [_timeless(one) for one in value]
    if not isinstance(value, dict):
        return value
    moments = ("verdict", "plan", "applied", "seconds")
    return {name: _timeless(one) for name, one in value.items() if name not in moments}


def node(step: int, ranks: list[int], **more: int) -> TelemetryBatch:
    batch = batch_of(step, **more)
    return batch.select(np.isin(batch.rank, ranks))


def test_a_message_with_an_error_takes_no_other_with_it() -> None:
    poison = node(0, [2, 3])
    poison = TelemetryBatch(**{**poison.columns(), "microbatch": np.full(len(poison), 666)})
    bodies = [encode(node(0, [0, 1])), encode(poison), b"\xc1", encode(node(0, [4, 5, 6, 7]))]
    session = session_of(job_of())
    session.apply(*(message(n, body) for n, body in enumerate(bodies)))
    assert [document["detail"] for kind, document in session.changes.events if kind == "error"] == [
        "ContractError: must be an object",
        "RuntimeError: a poisonous record",
    ]
    assert session.changes.applied == ["0-0", "1-0", "2-0", "3-0"]
    assert session._detector.records == 24
    assert session._detector.checksum == 2400


def test_a_hosts_message_counts_without_its_ranks_outside_the_layout() -> None:
    session = session_of(job_of())
    host = node(0, [0, 1, 2])
    host = TelemetryBatch(**{**host.columns(), "rank": np.repeat([0, 99, 2], 4)})
    session.apply(message(0, encode(host)))
    assert sorted(session._detector.known) == [0, 2]
    assert session._detector.records == 8


def test_a_message_of_outsiders_neither_counts_nor_hinders() -> None:
    session = session_of(job_of())
    outside = node(0, [0])
    outside = TelemetryBatch(**{**outside.columns(), "rank": np.full(len(outside), 99)})
    session.apply(*(message(n, encode(b)) for n, b in enumerate([outside, node(0, [1])])))
    assert session._detector.records == 4


def part(*ranks: int, version: int = 0) -> TelemetryPart:
    return TelemetryPart.of(encode(node(0, list(ranks), plan_version=version)))


def test_a_rank_and_a_plan_begin_a_new_run() -> None:
    parts = [part(0, 1), part(2), part(1, 3), part(4, version=1), part(5, version=1)]
    lengths = [[sorted(each.ranks) for each in run] for run in runs(parts)]
    assert lengths == [[[0, 1], [2]], [[1, 3]], [[4], [5]]]


@pytest.mark.parametrize("plain", [True, False])
def test_columns_as_bytes_and_as_lists_join(plain: bool) -> None:
    one, other = node(0, [0]), node(0, [1])
    lists = {name: column.tolist() for name, column in other.columns().items() if name != "wait_ms"}
    body = encode(other) if plain else msgpack.packb({"version": 1, "columns": lists})
    assert joined([TelemetryPart.of(encode(one)), TelemetryPart.of(body)]) == TelemetryBatch.concat(
        [one, other]
    )
