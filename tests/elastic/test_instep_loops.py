"""A loop of the user's own survives losses: the same training, each microbatch once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.elastic.loops import MICROBATCHES, Blow, Loop, Trace, play

STEPS = 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The undisturbed run of one process."""
    return play(Loop(1), tmp_path_factory.mktemp("alone"))


def assert_same_training(trace: Trace, alone: Trace, dead: set[int]) -> None:
    assert {rank for rank, code in trace.exit_codes.items() if code} == dead, trace.logs
    assert trace.losses == pytest.approx(alone.losses, rel=1e-5), trace.logs
    for model in trace.models.values():
        for key, tensor in model.items():
            torch.testing.assert_close(tensor, alone.models[0][key], rtol=1e-3, atol=1e-5)


CASES = {
    "undisturbed": (),
    "behind its first microbatch": (Blow(1, 1),),
    "when it begins to sum": (Blow(1, 1, at="sum"),),
    "when it votes": (Blow(1, 1, at="vote"),),
    "when it commits": (Blow(1, 1, at="commit"),),
    "two at once": (Blow(0, 1, 2), Blow(1, 1, 2)),
    "one during the recovery of another": (Blow(1, 1), Blow(2, 1, at="recovery")),
    "one in each of two steps": (Blow(0, 1), Blow(2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_a_replica(case: str, alone: Trace, tmp_path: Path) -> None:
    blows = CASES[case]
    trace = play(Loop(3, blows=blows), tmp_path)
    dead = {blow.rank for blow in blows}
    assert_same_training(trace, alone, dead)
    for step in range(STEPS):
        taken = [trace.taken.get((rank, step), []) for rank in {0, 1, 2} - dead]
        by_survivors = [index for indices in taken for index in indices]
        assert len(by_survivors) == len(set(by_survivors)), "no survivor computes anything again"
        if step > max((blow.step for blow in blows), default=-1):
            assert sorted(by_survivors) == list(range(MICROBATCHES))


@pytest.mark.parametrize("inner", ["fsdp2", "ddp"])
def test_several_processes_a_replica(inner: str, alone: Trace, tmp_path: Path) -> None:
    """The loss of one process ends its replica; the other replica goes on."""
    trace = play(Loop(2, members=2, inner=inner, blows=(Blow(3, 1, 2),)), tmp_path)
    assert_same_training(trace, alone, {2, 3})


@pytest.mark.parametrize("at", ["microbatch", "vote"])
def test_a_fixed_order_makes_a_loss_change_no_bit(at: str, tmp_path: Path) -> None:
    alone = play(Loop(1, deterministic=True), tmp_path / "alone")
    trace = play(Loop(3, deterministic=True, blows=(Blow(1, 1, at=at),)), tmp_path)
    assert_same_training(trace, alone, {1})
    assert trace.losses == alone.losses
    for model in trace.models.values():
        assert all(torch.equal(model[key], alone.models[0][key]) for key in model)
