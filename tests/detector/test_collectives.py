"""A slow link inside a group is told from a slow device, by the transfer and by the waiting."""

from collections.abc import Iterator

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Layout, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, SlowGroup, collectives, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
JOB = Job(
    name="job",
    layout=Layout.grid(dp=4, pp=2, tp=2, layers=16),
    microbatches=16,
    tokens_per_microbatch=8192,
)


def stream(
    *, slow: SlowGroup | None = None, faults: tuple[Fault, ...] = ()
) -> Iterator[TelemetryBatch]:
    for batch in steps_of(JOB, LENGTHS, steps=24, seed=1, faults=faults, coupled=True):
        yield TelemetryBatch.concat([batch, collectives(JOB, batch, seed=1, slow=slow)])


def judged(**given: object) -> Detector:
    detector = Detector(JOB)
    for batch in stream(**given):  # type: ignore[arg-type]
        detector.update(batch)
    return detector


@pytest.mark.parametrize("place", [(2, 1), (0, 0)])
def test_a_slow_link_in_a_tensor_parallel_group_names_the_group(place: tuple[int, int]) -> None:
    group = JOB.layout.replicas[place[0]].stages[place[1]].ranks
    detector = judged(slow=SlowGroup(ranks=group, factor=2.0, from_step=10))
    (link,) = detector.links()
    assert link.group == group
    assert link.slowdown == pytest.approx(2.0, rel=0.15)
    assert link.since_step == pytest.approx(10, abs=3)
    assert {v.status for v in detector.verdicts()} == {Status.HEALTHY}
    words = {v.rank: " ".join(v.evidence) for v in detector.verdicts()}
    assert {rank for rank, said in words.items() if "collectives within" in said} == set(group)


def test_a_slow_link_among_replicas_names_those_that_reduce_together() -> None:
    group = tuple(sorted(r.stages[1].ranks[0] for r in JOB.layout.replicas))
    detector = judged(slow=SlowGroup(ranks=group, factor=2.0, from_step=10, within_step=True))
    assert [link.group for link in detector.links()] == [group]


def test_a_slow_device_in_a_group_is_no_slow_link() -> None:
    detector = judged(faults=(Fault(rank=6, factor=1.3, from_step=10),))
    assert detector.links() == []
    named = {v.rank for v in detector.verdicts() if v.status is Status.FAIL_SLOW}
    assert named == {6}


def test_a_healthy_job_has_no_slow_links() -> None:
    assert judged().links() == []
    assert {v.status for v in judged().verdicts()} == {Status.HEALTHY}
