"""Optimizer state on few replicas trains as on all of them, and outlives the loss of a rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from resihp.contracts import ContractError, Layout
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import Setup
from resihp.elastic.step.shard import Shard
from tests.elastic.engine_faults import EngineFault, Job, Record, play
from tests.elastic.engine_job import (
    ALONE,
    GRID,
    OPTIMIZER,
    SHAPE,
    UNEVEN,
    Case,
    Fault,
    Outcome,
    batch,
    plan,
    run,
)
from tests.elastic.test_engine_recovery import assert_same_training
from tests.elastic.test_engine_resizes import setup as many_kinds
from tests.elastic.test_faults import assert_survived
from tests.elastic.threads import Run, cut_small_blocks, train

STEPS, AT, LONG = 3, 1, 6
DURING = (
    Phase.ACCUMULATING,
    Phase.REDUCING,
    Phase.STREAMING,
    Phase.VOTING,
    Phase.UPDATING,
)
THREE = Layout.grid(dp=3, pp=1, tp=1, layers=4, units=4)
FOUR = Layout.grid(dp=4, pp=1, tp=1, layers=4, units=4)
LAYOUTS = {"three": THREE, "grid": GRID, "uneven": UNEVEN}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    cut_small_blocks(monkeypatch)


def setup(copies: int | None, *, tied: bool = True, deterministic: bool = False) -> Setup:
    model = Llama(replace(SHAPE, tied_embeddings=tied))
    return Setup(model, OPTIMIZER, batch, optimizer_replicas=copies, deterministic=deterministic)


def sharded_over_two() -> Setup:
    return setup(2)


def on_one() -> Setup:
    return setup(1)


def held_numel(shard: Shard) -> int:
    return sum(moment.numel() for one in shard.slices for moment in shard.state(one)[1:])


def assert_close(run: Run, expected: Run) -> None:
    assert run.losses == pytest.approx(expected.losses, abs=1e-6)
    assert run.norms == pytest.approx(expected.norms, rel=1e-5)
    for param, tensors in run.state.items():
        for tensor, whole in zip(tensors, expected.state[param], strict=True):
            torch.testing.assert_close(tensor, whole, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("copies", [1, 2])
def test_it_trains_as_unsharded(copies: int, layout: str, tied: bool, deterministic: bool) -> None:
    """All ranks end with the same parameters, and copies of the state agree to the last bit."""
    here = plan(0, LAYOUTS[layout])
    whole = train(setup(None, tied=tied, deterministic=deterministic), here, STEPS)
    found = train(setup(copies, tied=tied, deterministic=deterministic), here, STEPS)
    assert_close(found, whole)


def test_each_rank_holds_its_part_of_the_moments() -> None:
    whole = held_numel(train(setup(None), plan(0, FOUR), 1).shards[0])
    for copies in (1, 2, 3):
        shards = train(setup(copies), plan(0, FOUR), 1).shards.values()
        held = [held_numel(shard) for shard in shards]
        assert sum(held) == copies * whole
        assert max(held) < 1.1 * copies * whole / 4


@pytest.mark.parametrize("copies", [1, 3])
def test_a_training_in_a_fixed_order_does_not_depend_on_the_number_of_replicas(copies: int) -> None:
    """The parts of the gradient norm are the same ones on whichever ranks they are."""
    sharded = setup(copies, deterministic=True)
    runs = [train(sharded, plan(0, one), STEPS) for one in (THREE, FOUR)]
    assert runs[0].losses == runs[1].losses
    assert runs[0].norms == runs[1].norms
    for param, tensors in runs[0].state.items():
        assert all(map(torch.equal, tensors, runs[1].state[param])), param.key


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """The undisturbed run."""
    return play(Job(ALONE), tmp_path_factory.mktemp("alone"))


POINTS = {
    "behind its last pass": EngineFault(1, "backward", AT, 2),
    "in a bucket": EngineFault(1, "bucket", AT, 4),
    "in the account": EngineFault(1, "account", AT),
    "in the vote": EngineFault(1, "vote", AT),
}


@pytest.mark.parametrize("point", POINTS)
def test_a_loss_costs_the_lost_share_alone(point: str, alone: Record, tmp_path: Path) -> None:
    record = play(Job(THREE, faults=(POINTS[point],), copies=2), tmp_path)
    assert_same_training(record, alone, {1})
    assert record.redone(AT) <= {2, 3}, record.logs
    assert not any(record.redone(step) for step in range(STEPS) if step != AT), record.logs


@pytest.mark.parametrize("at", ["clip", "optimizer", "after"])
def test_a_step_that_is_whole_is_completed(at: str, alone: Record, tmp_path: Path) -> None:
    record = play(Job(THREE, faults=(EngineFault(1, at, AT),), copies=2), tmp_path)
    assert_same_training(record, alone, {1})
    assert not any(record.redone(step) for step in range(AT + 1)), record.logs


@pytest.mark.parametrize("completed", range(1, STEPS + 1))
def test_a_loss_while_parameters_are_gathered(
    completed: int, alone: Record, tmp_path: Path
) -> None:
    """In the last step, too: what others have updated is gathered all the same."""
    fault = EngineFault(1, "gather", completed)
    record = play(Job(THREE, faults=(fault,), copies=2), tmp_path)
    assert_same_training(record, alone, {1})
    assert not any(record.redone(step) for step in range(completed)), record.logs


def test_initial_values_are_not_gathered(alone: Record, tmp_path: Path) -> None:
    """They are whole; from a loss in that exchange no rank would have recovered."""
    record = play(Job(THREE, faults=(EngineFault(1, "gather", 0),), copies=2), tmp_path)
    assert_same_training(record, alone, set())


@pytest.mark.parametrize("deterministic", [False, True])
def test_one_rank_after_the_other(deterministic: bool, alone: Record, tmp_path: Path) -> None:
    faults = (EngineFault(1, "vote", 0), EngineFault(3, "gather", 2))
    record = play(Job(FOUR, faults=faults, copies=2, deterministic=deterministic), tmp_path)
    assert_same_training(record, alone, {1, 3})


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The undisturbed run of a job whose layout changes."""
    return run(Case(ALONE, LONG), tmp_path_factory.mktemp("long"))


WIDE = Layout.grid(dp=4, pp=1, tp=2, layers=4, units=4)
DEEP = Layout.grid(dp=4, pp=2, tp=1, layers=4, units=4)


@pytest.mark.parametrize(
    ("phase", "rank"),
    [
        (Phase.UPDATING, 2),
        (Phase.STREAMING, 0),
        (Phase.VOTING, 5),
        *(pytest.param(p, r, marks=pytest.mark.soak) for p in DURING for r in range(8)),
    ],
)
def test_killed_in_a_switch(phase: Phase, rank: int, long: Outcome, tmp_path: Path) -> None:
    plans = (plan(1, DEEP, from_step=2),)
    faults = tuple(Fault(rank, phase, completed) for completed in range(1, LONG))
    outcome = run(Case(WIDE, LONG, plans, faults, setup=sharded_over_two), tmp_path)
    assert_survived(outcome, long, {rank})


def on_three() -> Setup:
    return setup(3)


def test_killed_during_the_recovery_of_another(long: Outcome, tmp_path: Path) -> None:
    """Of three copies two may be lost at once."""
    faults = (Fault(2, Phase.REDUCING, 2), Fault(3, Phase.RECOVERING, 2))
    assert_survived(run(Case(FOUR, LONG, faults=faults, setup=on_three), tmp_path), long, {2, 3})


def on_two_nodes() -> Setup:
    return replace(setup(2), ranks_per_node=2)


def test_a_node_may_be_lost(long: Outcome, tmp_path: Path) -> None:
    """Copies of the same state are on two of them."""
    faults = tuple(Fault(rank, Phase.ACCUMULATING, 3) for rank in (2, 3))
    assert_survived(
        run(Case(FOUR, LONG, faults=faults, setup=on_two_nodes), tmp_path), long, {2, 3}
    )


def test_state_that_one_rank_held_alone_comes_from_the_checkpoint(
    long: Outcome, tmp_path: Path
) -> None:
    folder, fault = tmp_path / "kept", Fault(1, Phase.ACCUMULATING, 3)
    folder.mkdir()
    case = Case(THREE, LONG, faults=(fault,), setup=on_one, checkpoints=folder)
    outcome = run(case, tmp_path)
    assert any(switch["rewound"] for switch in outcome.switches), outcome.logs
    assert_survived(outcome, long, {1})


def test_without_a_checkpoint_its_loss_ends_the_job_with_what_is_missing(tmp_path: Path) -> None:
    faults = (Fault(1, Phase.ACCUMULATING, 2),)
    outcome = run(Case(THREE, LONG, faults=faults, setup=on_one), tmp_path)
    assert all(outcome.exit_codes.values()), outcome.logs
    assert "no surviving rank holds" in outcome.logs


def test_a_rank_that_cannot_gather_the_last_update_does_not_end_well(tmp_path: Path) -> None:
    """All steps are made, but what the lost rank has updated is nowhere else."""
    record = play(Job(THREE, faults=(EngineFault(1, "gather", STEPS),), copies=1), tmp_path)
    assert record.dead == {0, 1, 2}, record.logs
    assert "no surviving rank holds" in record.logs


def many_kinds_sharded() -> Setup:
    return replace(many_kinds(), optimizer_replicas=2)


def test_a_chain_of_layouts_moves_every_bit(tmp_path: Path) -> None:
    """Ranks go idle and come back; the optimizer has groups, and scalars that they learn."""
    plans = (
        plan(1, UNEVEN, quotas=(5, 1), from_step=1),
        plan(2, Layout.grid(dp=4, pp=1, tp=2, layers=4, units=4), from_step=3),
        plan(3, GRID, from_step=5),
    )
    outcome = run(Case(GRID, 8, plans, ranks=tuple(range(8)), setup=many_kinds_sharded), tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert {s["version"] for s in outcome.switches} == {1, 2, 3}, outcome.logs
    for generation in range(len(plans)):
        before = outcome.full_state(f"before{generation}")
        after = outcome.full_state(f"after{generation + 1}")
        for key, tensors in before.items():
            assert all(map(torch.equal, tensors, after[key])), f"{key} changed in {generation + 1}"


def test_a_number_of_replicas_below_one_is_refused() -> None:
    with pytest.raises(ContractError, match="optimizer_replicas"):
        setup(0)


def test_fused_kernels_are_refused() -> None:
    """Those of CUDA devices raise in the first update of some columns of a tensor."""
    fused = Optimizer(torch.optim.AdamW, lr=1e-2, fused=True)
    Setup(Llama(SHAPE), fused, batch)
    with pytest.raises(ContractError, match=r"fused.*optimizer_replicas"):
        Setup(Llama(SHAPE), fused, batch, optimizer_replicas=2)


def test_an_optimizer_without_moments_has_nothing_to_shard() -> None:
    plain = Setup(Llama(SHAPE), Optimizer(torch.optim.SGD, lr=0.1), batch)
    whole = train(plain, plan(0, THREE), STEPS)
    assert_close(train(replace(plain, optimizer_replicas=1), plan(0, THREE), STEPS), whole)
