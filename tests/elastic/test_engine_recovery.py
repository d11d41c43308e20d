"""A loss in mid-step costs the lost replica's share, and changes nothing else."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from resihp.contracts import Layout
from tests.elastic.engine_faults import EngineFault, Job, Record, play
from tests.elastic.engine_job import ALONE, MICROBATCHES

STEPS, AT = 3, 1
THREE = Layout.grid(dp=3, pp=2, tp=1, layers=4, units=4)  # replica d: ranks d and d + 3
GROUPS = Layout.grid(dp=2, pp=1, tp=2, layers=4, units=4)  # replicas (0, 1) and (2, 3)
SHARES = {0: {0, 1}, 1: {2, 3}, 2: {4, 5}}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The undisturbed run."""
    return play(Job(ALONE), tmp_path_factory.mktemp("alone"))


def assert_same_training(record: Record, alone: Record, dead: set[int]) -> None:
    """Survivors finish, every sample counts once in each step, and the training is the same."""
    assert record.dead == dead, record.logs
    for step in range(STEPS):
        assert record.counted(step) == list(range(MICROBATCHES)), record.logs
        assert record.losses[step] == pytest.approx(alone.losses[step], abs=2e-5), record.logs
    for key, tensors in record.state.items():
        for tensor, expected in zip(tensors, alone.state[key], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=2e-2, atol=2e-4)


FIRST, LAST = 1, 4  # stages of replica 1
POINTS = {
    "before the first pass": EngineFault(FIRST, "data", AT),
    "between two forward passes": EngineFault(FIRST, "forward", AT),
    "in mid-pipeline": EngineFault(LAST, "backward", AT),
    "behind its last pass": EngineFault(FIRST, "backward", AT, 2),
    "in the first bucket": EngineFault(FIRST, "bucket", AT),
    "in a middle bucket": EngineFault(LAST, "bucket", AT, 4),
    "in the last bucket": EngineFault(FIRST, "bucket", AT, 10),
    "in the account": EngineFault(LAST, "account", AT),
    "in the vote": EngineFault(FIRST, "vote", AT),
}


@pytest.mark.parametrize("point", POINTS)
def test_only_the_lost_share_is_redone(point: str, alone: Record, tmp_path: Path) -> None:
    fault = POINTS[point]
    record = play(Job(THREE, faults=(fault,)), tmp_path)
    assert_same_training(record, alone, {fault.rank})
    assert record.redone(AT) <= SHARES[1], record.logs
    assert not any(record.redone(step) for step in range(STEPS) if step != AT), record.logs


@pytest.mark.parametrize("at", ["clip", "optimizer", "after"])
def test_a_step_that_is_whole_is_completed(at: str, alone: Record, tmp_path: Path) -> None:
    record = play(Job(THREE, faults=(EngineFault(1, at, AT),)), tmp_path)
    assert_same_training(record, alone, {1})
    assert not any(record.redone(step) for step in range(AT + 1)), record.logs
    assert record.redone(AT + 1) <= SHARES[1], record.logs


@pytest.mark.parametrize("lost", [(), (1,)])
def test_who_has_finished_the_job_tells_a_rank_that_was_cut_off(
    lost: tuple[int, ...], alone: Record, tmp_path: Path
) -> None:
    """Without the others it would have no replica to go on with; they know the step's norm."""
    faults = tuple(EngineFault(rank, "clip", STEPS - 1) for rank in lost)
    record = play(Job(THREE, faults=faults, cut=(2,)), tmp_path)
    assert_same_training(record, alone, set(lost))
    assert not any(record.redone(step) for step in range(STEPS)), record.logs


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The undisturbed run of one process, summed in the fixed order."""
    return play(Job(ALONE, deterministic=True), tmp_path_factory.mktemp("exact"))


def assert_bit_equal(record: Record, exact: Record) -> None:
    assert record.losses == exact.losses, record.logs
    for key, tensors in record.state.items():
        assert all(map(torch.equal, tensors, exact.state[key])), f"{key} differs\n{record.logs}"


EXACT = {
    "undisturbed": (),
    "in mid-pipeline": (EngineFault(4, "backward", AT),),
    "in the reduction": (EngineFault(2, "reduction", AT),),
    "in the vote": (EngineFault(0, "vote", AT),),
    "down to the last replica": (EngineFault(4, "backward", AT), EngineFault(2, "vote", AT)),
}


@pytest.mark.parametrize("case", EXACT)
def test_a_fixed_order_makes_a_loss_change_no_bit(case: str, exact: Record, tmp_path: Path) -> None:
    faults = EXACT[case]
    record = play(Job(THREE, faults=faults, deterministic=True, quotas=(1, 3, 2)), tmp_path)
    assert_same_training(record, exact, {fault.rank for fault in faults})
    assert_bit_equal(record, exact)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_replica_lives_on_with_a_smaller_group(
    deterministic: bool, alone: Record, tmp_path: Path
) -> None:
    """Its shares are cut anew, so its own sum is lost; the other one's is not."""
    faults = (EngineFault(1, "backward", AT, 2),)
    job = Job(GROUPS, faults=faults, shrink=True, deterministic=deterministic)
    record = play(job, tmp_path)
    assert_same_training(record, alone, {1})
    assert record.redone(AT) == {0, 1}, record.logs


@pytest.mark.parametrize("deterministic", [False, True])
def test_whole_replicas_do_not_let_the_rest_of_a_hurt_one_wait(
    deterministic: bool, alone: Record, tmp_path: Path
) -> None:
    """They leave off between two microbatches, and all ranks alive share what is left."""
    faults = (EngineFault(1, "backward", AT),)
    job = Job(GROUPS, faults=faults, shrink=True, deterministic=deterministic, wary=(2, 3))
    record = play(job, tmp_path)
    assert_same_training(record, alone, {1})
    _, last = record.generations(AT)
    assert record.kept[AT, last] == {3}, "what the whole replica had finished when it heard"
    ran = {rank: {m for m, by in record.passes[AT, last].items() if rank in by} for rank in (0, 2)}
    assert (len(ran[0]), len(ran[2])) == (3, 2)
    assert record.redone(AT) == {0}


PAIR = Layout.grid(dp=2, pp=1, tp=1, layers=4, units=4)


def test_what_a_lost_thief_took_is_redone(tmp_path: Path) -> None:
    """Replica 0 takes the last microbatch of replica 1, which waits before its first one."""
    fault = EngineFault(1, "forward", AT, 3)
    job = Job(GROUPS, faults=(fault,), deterministic=True, quotas=(2, 4), robbed=(2, 3))
    record = play(job, tmp_path)
    undisturbed = play(Job(GROUPS, deterministic=True), tmp_path / "undisturbed")
    assert_same_training(record, undisturbed, {fault.rank})
    assert_bit_equal(record, undisturbed)
    for ran in record.passes.values():
        assert all(by <= {0, 1} or by <= {2, 3} for by in ran.values()), "computed twice"
    assert record.kept[AT, record.generations(AT)[-1]] <= {2, 3, 4}, record.logs


def test_what_was_taken_from_a_lost_replica_is_kept(exact: Record, tmp_path: Path) -> None:
    """The other one takes all that the lost replica has not begun, also after the loss."""
    fault = EngineFault(1, "robbed", AT)
    job = Job(PAIR, faults=(fault,), deterministic=True, quotas=(2, 4), robbed=(1,))
    record = play(job, tmp_path)
    assert_same_training(record, exact, {fault.rank})
    assert_bit_equal(record, exact)
    assert record.kept[AT, record.generations(AT)[-1]] == {0, 1, 3, 4, 5}, record.logs


def test_two_at_once(alone: Record, tmp_path: Path) -> None:
    record = play(
        Job(THREE, faults=(EngineFault(3, "bucket", AT), EngineFault(1, "bucket", AT))), tmp_path
    )
    assert_same_training(record, alone, {1, 3})
    assert record.redone(AT) <= SHARES[0] | SHARES[1]


RECOVERY = {
    "while agreeing": "recovering",
    "while state moves": "streaming",
    "while sums move": "inheritance",
    "in the vote for the new generation": "voting",
}


@pytest.mark.parametrize("point", RECOVERY)
def test_another_is_lost_during_the_recovery(point: str, alone: Record, tmp_path: Path) -> None:
    faults = (EngineFault(4, "backward", AT, 2), EngineFault(2, RECOVERY[point], AT))
    record = play(Job(THREE, faults=faults), tmp_path)
    assert_same_training(record, alone, {2, 4})


def test_another_is_lost_while_the_share_is_redone(alone: Record, tmp_path: Path) -> None:
    """Its own share, what it took over, and what it has redone: all of it is done again."""
    faults = (EngineFault(4, "backward", AT, 2), EngineFault(2, "backward", AT, 3))
    record = play(Job(THREE, faults=faults), tmp_path)
    assert_same_training(record, alone, {2, 4})
    assert record.redone(AT) <= SHARES[1] | SHARES[2], record.logs


def test_a_spare_takes_the_place_of_the_lost_one(alone: Record, tmp_path: Path) -> None:
    """It comes in within the step, and so does its share of what is to be redone."""
    faults = (EngineFault(4, "backward", AT, 2), EngineFault(6, "bucket", AT + 1))
    record = play(Job(THREE, faults=faults, spares=(6, 7)), tmp_path)
    assert_same_training(record, alone, {4, 6})
    assert record.redone(AT) <= SHARES[1]
    assert record.redone(AT + 1) <= SHARES[1]


def test_a_joiner_gets_a_quota_and_goes_on_alone(tmp_path: Path) -> None:
    """One of two is lost, a third joins the other one, which is then lost in its turn."""
    steps, two = 12, Layout.grid(dp=2, pp=1, tp=1, layers=4, units=4)
    faults = (EngineFault(1, "backward", 1, 2), EngineFault(0, "beside a joiner", 0, 2))
    job = Job(two, steps, faults, deterministic=True, joiners=(2,))
    record = play(job, tmp_path)
    assert record.exit_codes == {0: -signal.SIGKILL, 1: -signal.SIGKILL, 2: 0}, record.logs
    alone = play(Job(ALONE, steps, deterministic=True), tmp_path / "alone")
    assert record.losses == alone.losses, record.logs
    for step in range(steps):
        assert record.counted(step) == list(range(MICROBATCHES)), record.logs
    assert_bit_equal(record, alone)
