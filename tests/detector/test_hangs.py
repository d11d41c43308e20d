"""Hanging training threads: named where the positions tell, never where a rank pauses."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from detector import Detector
from resihp.contracts import Heartbeat, Job, Layout, Op, Status, TrainingPosition, Verdict

JOB = Job(name="job", layout=Layout.grid(dp=4, pp=1, tp=1, layers=4), microbatches=8)
STAGES = Job(name="job", layout=Layout.grid(dp=2, pp=2, tp=1, layers=4), microbatches=8)
START = {rank: TrainingPosition(step=0) for rank in range(4)}


def at(op: Op | None = None, microbatch: int = -1, **rest: Any) -> TrainingPosition:
    return TrainingPosition(**{"step": 9, "op": op, "microbatch": microbatch, **rest})


HUNG = at(Op.BACKWARD, 0, passes=1)
BEHIND_IT = at(Op.BACKWARD, 1, passes=3)
WAITING = at(Op.COLLECTIVE, passes=4, waiting=True)
PAUSING = at()


class Run:
    """A detector that gets a heartbeat of each rank every second."""

    def __init__(self, job: Job = JOB) -> None:
        self.detector, self.now = Detector(job), 0.0
        self.changed: list[Verdict] = []
        self.sequence = 0
        self.stay(START, 3)

    def stay(self, positions: Mapping[int, TrainingPosition], seconds: float) -> None:
        """These ranks stay where they are."""
        for second in range(int(seconds)):
            self.now += 1.0
            self.sequence += 1
            beats = [
                Heartbeat(
                    ranks=(rank,), process=f"p{rank}", sequence=self.sequence,
                    position=TrainingPosition(**{**vars(position), "for_s": float(second)}),
                )
                for rank, position in positions.items()
            ]  # fmt: skip
            self.changed += self.detector.take_heartbeats(beats, self.now)
            self.changed += self.detector.check_alive(self.now)

    def move(self, ranks: Iterable[int]) -> None:
        """Records of these ranks arrive."""
        self.changed += self.detector.heard(ranks, self.now)
        self.changed += self.detector.check_alive(self.now)

    def named(self) -> dict[int, Status]:
        return {
            v.rank: v.status for v in self.detector.verdicts() if v.status is not Status.HEALTHY
        }


@pytest.mark.parametrize("others", [BEHIND_IT, WAITING], ids=["further on", "in a collective"])
def test_the_rank_that_the_others_wait_for_is_named(others: TrainingPosition) -> None:
    run = Run()
    run.stay({0: others, 1: HUNG, 2: others, 3: others}, 20)
    assert run.named() == {1: Status.SUSPECT}
    (verdict,) = run.changed
    assert verdict.since_step == 9
    assert verdict.evidence[0].startswith(
        "its training thread has been in backward of step 9, microbatch 0 for 1"
    )
    assert verdict.evidence[0].endswith("its process is alive")
    assert verdict.evidence[1] == "3 other ranks wait"


def test_where_all_are_at_the_same_place_nobody_is_named() -> None:
    run = Run()
    run.stay(dict.fromkeys(range(4), HUNG), 20)
    assert run.named() == dict.fromkeys(range(4), Status.INCONCLUSIVE)
    assert "cannot be told" in run.changed[0].evidence[1]


def test_a_rank_that_moves_on_is_healthy_again_and_its_stay_is_learned() -> None:
    run = Run()
    places = {0: BEHIND_IT, 1: HUNG, 2: BEHIND_IT, 3: BEHIND_IT}
    run.stay(places, 30)
    assert run.named() == {1: Status.SUSPECT}
    run.move(range(4))
    assert run.named() == {}
    later = {r: TrainingPosition(**{**vars(p), "step": 12}) for r, p in places.items()}
    run.stay(later, 50)
    assert run.named() == {}
    run.stay(later, 20)
    assert [v.status for v in run.changed] == [Status.SUSPECT, Status.HEALTHY, Status.SUSPECT]


@pytest.mark.parametrize("others", [BEHIND_IT, HUNG, WAITING])
@pytest.mark.parametrize("job", [JOB, STAGES], ids=["dp", "pp"])
def test_a_pause_is_no_hang_neither_of_the_rank_nor_of_those_that_wait(
    job: Job, others: TrainingPosition
) -> None:
    run = Run(job)
    run.stay({0: PAUSING, 1: others, 2: others, 3: others}, 120)
    assert run.changed == []


def test_a_pause_that_others_wait_for_is_told_after_ten_minutes() -> None:
    run = Run()
    run.stay({0: PAUSING, 1: WAITING, 2: WAITING, 3: WAITING}, 620)
    assert run.named() == {0: Status.SUSPECT}
    assert "outside of all timed blocks" in run.changed[0].evidence[0]


def test_a_job_that_pauses_as_a_whole_is_not_told() -> None:
    run = Run()
    run.stay(dict.fromkeys(range(4), PAUSING), 1000)
    assert run.changed == []


def test_the_first_step_of_a_process_may_take_long() -> None:
    run = Run()
    first = at(Op.FORWARD, 0, step=0)
    run.stay({0: first, 1: first, 2: at(Op.FORWARD, 1, step=0, passes=1), 3: first}, 120)
    assert run.changed == []


def test_a_stage_that_waits_for_the_hung_one_is_not_the_cause() -> None:
    """Ranks 0 and 1 are the stages of the first replica."""
    run = Run(STAGES)
    ahead, receiving = at(Op.COLLECTIVE, passes=8, waiting=True), at(Op.P2P, 2, waiting=True)
    run.stay({0: at(Op.FORWARD, 2, passes=2), 1: receiving, 2: ahead, 3: ahead}, 30)
    assert run.named() == {0: Status.SUSPECT}


def test_where_all_wait_the_rank_behind_is_named() -> None:
    """Rank 1 waits in a collective that the others never enter."""
    run = Run()
    behind = at(Op.COLLECTIVE, passes=2, waiting=True)
    run.stay({0: WAITING, 1: behind, 2: WAITING, 3: WAITING}, 30)
    assert run.named() == {1: Status.SUSPECT}


@pytest.mark.parametrize("others", [HUNG, WAITING])
def test_those_that_wait_for_a_dead_rank_do_not_hang(others: TrainingPosition) -> None:
    run = Run()
    run.stay(dict.fromkeys(range(4), HUNG), 3)
    run.stay({0: others, 1: others, 3: others}, 90)
    assert run.named() == {2: Status.FAIL_STOP}
    assert [verdict.rank for verdict in run.changed] == [2]


def test_a_rank_that_hangs_and_then_dies_has_stopped() -> None:
    run = Run()
    run.stay({0: WAITING, 1: HUNG, 2: WAITING, 3: WAITING}, 20)
    run.stay({0: WAITING, 2: WAITING, 3: WAITING}, 60)
    assert run.named() == {1: Status.FAIL_STOP}
    assert run.changed[-1].evidence == (
        "its heartbeats have stopped",
        "last seen in backward of microbatch 0 in step 9",
    )


def test_the_state_of_hangs_is_saved() -> None:
    run = Run()
    run.stay({0: WAITING, 1: HUNG, 2: WAITING, 3: WAITING}, 8)
    run.detector = Detector.restore(JOB, run.detector.save())
    run.changed.clear()
    run.stay({0: WAITING, 1: HUNG, 2: WAITING, 3: WAITING}, 20)
    assert run.named() == {1: Status.SUSPECT}
