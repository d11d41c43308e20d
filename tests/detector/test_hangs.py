"""Hanging training threads: named where the positions tell, never where a rank pauses."""

from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
LOADING = at(Op.DATA)


class Run:
    """A detector that gets a heartbeat of each rank every second."""

    def __init__(self, job: Job = JOB) -> None:
        self.detector, self.now = Detector(job), 0.0
        self.changed: list[Verdict] = []
        self.sequence = 0
        self.asked: set[int] = set()
        self.stay(START, 3)

    def stay(
        self, positions: Mapping[int, TrainingPosition], seconds: float, every: int = 1
    ) -> None:
        """These ranks stay where they are, and send their stacks if they are asked to."""
        for second in range(0, int(seconds), every):
            self.now += every
            self.sequence += 1
            asked = self.detector.asked_stacks()
            stack = ("data.py:7 in read", "train.py:9 in main")
            beats = [
                Heartbeat(
                    ranks=(rank,), process=f"p{rank}", sequence=self.sequence,
                    position=TrainingPosition(**{**vars(position), "for_s": float(second)}),
                    stack=stack if rank in asked else (),
                    collective=f"all_reduce number {rank}" if rank in asked else "",
                )
                for rank, position in positions.items()
            ]  # fmt: skip
            self.asked.update(asked)
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
    verdict = run.changed[0]
    assert verdict.since_step == 9
    assert verdict.evidence[0].startswith(
        "its training thread has been in backward of step 9, microbatch 0 for 1"
    )
    assert verdict.evidence[0].endswith("its process is alive")
    where = {BEHIND_IT: "in backward", WAITING: "in a collective"}[others]
    assert verdict.evidence[1] == f"3 other ranks wait {where} of the same step"


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
    statuses = [v.status for v in run.changed if len(v.evidence) <= 2]  # without the stack
    assert statuses == [Status.SUSPECT, Status.HEALTHY, Status.SUSPECT]


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


def test_a_step_before_the_first_of_a_process_is_like_any_later_one() -> None:
    """The job went back to a checkpoint in place."""
    run = Run()
    run.detector = Detector(JOB)
    run.stay(dict.fromkeys(range(4), at(Op.FORWARD, 0, step=12)), 3)
    run.stay({0: WAITING, 1: HUNG, 2: WAITING, 3: WAITING}, 20)
    assert run.named() == {1: Status.SUSPECT}


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


def test_the_stack_is_asked_for_and_told_with_the_collectives() -> None:
    run = Run()
    run.stay({0: WAITING, 1: HUNG, 2: WAITING, 3: WAITING}, 20)
    assert run.asked == {1, 0}  # the one that hangs, and one that waits for it
    assert run.detector.asked_stacks() == ()
    assert run.changed[-1].evidence[2:] == (
        "its stack, the innermost frame first: data.py:7 in read <- train.py:9 in main",
        "flight recorder of rank 1: all_reduce number 1",
        "flight recorder of rank 0: all_reduce number 0",
    )
    assert [verdict.rank for verdict in run.changed] == [1, 1]  # once without the stack
    run.move(range(4))
    assert run.changed[-1].evidence == ()


def test_few_ranks_are_asked_for_their_stacks() -> None:
    large = Job(name="job", layout=Layout.grid(dp=64, pp=1, tp=1, layers=4), microbatches=64)
    run = Run(large)
    run.stay(dict.fromkeys(range(64), TrainingPosition(step=0)), 3)
    run.stay(dict.fromkeys(range(64), HUNG), 15)
    assert run.asked == set(range(8))


def test_a_rank_without_stacks_is_named_all_the_same() -> None:
    detector = Detector(JOB)
    for now in range(40):
        for rank in range(4):
            position = START[rank] if now < 3 else HUNG if rank == 1 else WAITING
            detector.take_heartbeats([Heartbeat(ranks=(rank,), position=position)], float(now))
        detector.check_alive(float(now))
    assert detector.asked_stacks() == (1, 0)
    assert len(detector.verdicts()[1].evidence) == 2


@pytest.mark.parametrize("job", [JOB, STAGES], ids=["dp", "pp"])
@pytest.mark.parametrize("others", [BEHIND_IT, HUNG, WAITING])
def test_a_rank_that_hangs_in_its_data_loader_is_named(job: Job, others: TrainingPosition) -> None:
    run = Run(job)
    places = {0: LOADING, 1: others, 2: others, 3: others}
    run.stay(places, 28)
    assert run.changed == []
    run.stay(places, 10)
    assert run.named() == {0: Status.SUSPECT}
    assert "has been in data of step 9 for 3" in run.changed[0].evidence[0]


def test_loaders_have_a_history_of_their_own() -> None:
    run = Run()
    run.stay({0: LOADING, 1: WAITING, 2: WAITING, 3: WAITING}, 50)
    run.move(range(4))
    waiting = at(Op.COLLECTIVE, step=12, waiting=True)
    later = {0: at(Op.DATA, step=12), 1: waiting, 2: waiting, 3: waiting}
    run.stay(later, 95)
    assert run.named() == {}
    run.move(range(4))
    run.stay({0: WAITING, 1: HUNG, 2: WAITING, 3: WAITING}, 15)
    assert run.named() == {1: Status.SUSPECT}


def test_a_job_in_which_all_load_data_is_told_after_ten_minutes() -> None:
    run = Run()
    run.stay(dict.fromkeys(range(4), LOADING), 595)
    assert run.changed == []
    run.stay(dict.fromkeys(range(4), LOADING), 10)
    assert run.named() == dict.fromkeys(range(4), Status.INCONCLUSIVE)


OPS = st.sampled_from([Op.FORWARD, Op.BACKWARD, Op.OPTIMIZER, Op.COLLECTIVE])


@st.composite
def waiting_places(draw: st.DrawFn) -> TrainingPosition:
    """Where a rank may stand that waits for one at the beginning of step 9."""
    op = draw(OPS)
    is_told = op is Op.COLLECTIVE or draw(st.booleans())
    return at(op, draw(st.integers(-1, 7)), passes=draw(st.integers(0, 8)), waiting=is_told)


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(5, 2000)), min_size=1, max_size=4),
    st.sampled_from([JOB, STAGES]),
)
def test_a_job_whose_ranks_all_pause_never_hangs(pauses: list[tuple[int, int]], job: Job) -> None:
    run = Run(job)
    for step, seconds in pauses:
        run.stay(dict.fromkeys(range(4), at(step=step)), seconds, every=5)
        run.move(range(4))
    assert run.changed == []


@settings(max_examples=30, deadline=None)
@given(
    st.lists(waiting_places(), min_size=3, max_size=3),
    st.integers(5, 590),
    st.sampled_from([JOB, STAGES]),
)
def test_a_rank_that_pauses_for_minutes_makes_nobody_hang(
    others: list[TrainingPosition], seconds: int, job: Job
) -> None:
    run = Run(job)
    run.stay({0: PAUSING, **dict(enumerate(others, 1))}, seconds, every=5)
    assert run.changed == []


@settings(max_examples=30, deadline=None)
@given(
    st.lists(waiting_places(), min_size=3, max_size=3),
    st.integers(40, 250),
    st.floats(0.1, 1.5),
    st.sampled_from([JOB, STAGES]),
)
def test_a_loader_that_takes_as_long_as_before_does_not_hang(
    others: list[TrainingPosition], seconds: int, share: float, job: Job
) -> None:
    run = Run(job)
    places = {0: LOADING, **dict(enumerate(others, 1))}
    run.stay(places, seconds, every=5)
    assert run.named().keys() <= {0}
    run.move(range(4))
    run.changed.clear()
    run.stay(places, share * seconds, every=5)
    assert run.changed == []
    run.stay(places, 2.1 * seconds + 15, every=5)
    assert run.named() == {0: Status.SUSPECT}


def test_a_hang_is_kept_when_the_detector_is_saved() -> None:
    run = Run()
    run.stay({0: WAITING, 1: HUNG, 2: WAITING, 3: WAITING}, 20)
    asked, told = run.detector.asked_stacks(), run.detector.verdicts()
    run.detector = Detector.restore(JOB, run.detector.save())
    assert run.detector.verdicts() == told
    assert run.named() == {1: Status.SUSPECT}
    assert run.detector.summary().healthy.tolist() == [0, 2, 3]
    assert run.detector.asked_stacks() == asked
    run.changed.clear()
    run.stay({rank: at(step=10) for rank in range(4)}, 1)
    assert [(verdict.rank, verdict.status) for verdict in run.changed] == [(1, Status.HEALTHY)]


@pytest.mark.parametrize("are_named", [True, False])
def test_the_saved_hang_of_a_large_job_holds_each_rank_once(are_named: bool) -> None:
    size = 1_200
    layout = Layout.grid(dp=size, pp=1, tp=1, layers=4)
    run = Run(Job(name="job", layout=layout, microbatches=size))
    run.stay(dict.fromkeys(range(size), TrainingPosition(step=0)), 3)
    stuck = size // 2 if are_named else size
    places = {**dict.fromkeys(range(size), WAITING), **dict.fromkeys(range(stuck), HUNG)}
    run.stay(places, 5)
    before = len(run.detector.save())
    run.stay(places, 10, every=5)
    assert len(run.named()) == stuck
    assert len(run.detector.save()) - before < 400 * stuck
    told = run.detector.verdicts()
    assert told[0].evidence[1].startswith("one of ranks 0, 1") is are_named
    assert Detector.restore(run.detector.job, run.detector.save()).verdicts() == told
