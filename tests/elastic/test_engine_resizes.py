"""Live changes of layout and schedule under all that a job may bring along besides matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from resihp.contracts import Layout, Replica, Schedule, Stage
from resihp.elastic.models import Gpt2, Llama
from resihp.elastic.optim import Optimizer, no_decay_on_vectors, warmup_cosine
from resihp.elastic.step import IteratorData, Setup
from tests.elastic.engine_job import (
    ALONE,
    GRID,
    MICROBATCHES,
    OPTIMIZER,
    SHAPE,
    UNEVEN,
    Case,
    batch,
    plan,
    run,
)
from tests.elastic.test_engine_data import Shuffled
from tests.elastic.threads import train

STEPS = 8
SMALL = Layout((Replica((Stage((6,), (0, 3), (4,)), Stage((0, 3), (3, 4), (1, 3)))),))


def setup() -> Setup:
    """Tied head, dropout, groups, a rate, scalars beside the count of steps, a cursor."""
    shape = replace(SHAPE, gated=False, tied_embeddings=True)
    optimizer = Optimizer(
        torch.optim.NAdam,
        lr=5e-3,
        eps=1e-6,
        weight_decay=0.1,
        rate=warmup_cosine(2, STEPS),
        options=no_decay_on_vectors,
    )
    data = IteratorData(Shuffled(), MICROBATCHES)
    return Setup(Gpt2(shape, context=24, dropout=0.1), optimizer, data)


@pytest.mark.parametrize(
    ("copy_steps", "steps", "spread"), [(None, STEPS, [1, 1, 1]), (3, STEPS + 6, [3, 3, 3])]
)
def test_a_chain_of_layouts_and_schedules_is_one_training(
    copy_steps: int | None, steps: int, spread: list[int], tmp_path: Path
) -> None:
    """Ranks go idle and come back, so that they have to learn scalars and cursor anew."""
    plans = (
        replace(plan(1, UNEVEN, quotas=(5, 1), from_step=1), schedule=Schedule.ZERO_BUBBLE),
        plan(2, SMALL, from_step=3),
        replace(plan(3, GRID, from_step=5), schedule=Schedule.EAGER_1F1B),
    )
    ranks = tuple(range(8))
    alone = train(setup(), plan(0, ALONE), steps)
    case = Case(GRID, steps, plans, ranks=ranks, setup=setup, copy_steps=copy_steps)
    outcome = run(case, tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    found = {(s["version"], s["copy_steps"]) for s in outcome.switches}
    assert sorted(found) == list(enumerate(spread, 1)), outcome.logs
    for step in range(steps):
        assert outcome.losses[step] == pytest.approx(alone.losses[step], abs=2e-5), step
    for generation in range(len(plans)):
        before = outcome.full_state(f"before{generation}")
        after = outcome.full_state(f"after{generation + 1}")
        for key, tensors in before.items():
            assert all(map(torch.equal, tensors, after[key])), f"{key} changed in {generation + 1}"
    reference = {param.key: tensors for param, tensors in alone.state.items()}
    found = outcome.full_state()
    for key, tensors in reference.items():
        for expected, tensor in zip(tensors, found[key], strict=True):
            torch.testing.assert_close(tensor, expected, rtol=2e-2, atol=2e-4)


def bf16_setup() -> Setup:
    """Operators in bf16; all that moves is float32."""
    return Setup(Llama(SHAPE), OPTIMIZER, batch, compute_dtype=torch.bfloat16)


def test_mixed_precision_changes_its_layout_without_changing_a_bit(tmp_path: Path) -> None:
    """Where no tensor-parallel sum is regrouped, the training is that of one rank."""
    pair = Layout((Replica((Stage((0,), (0, 1), (4,)), Stage((1,), (1, 4), (4,)))),))
    plans = (plan(1, Layout.grid(dp=1, pp=2, tp=1, layers=4, units=4), from_step=1),)
    plans += (plan(2, ALONE, from_step=3),)
    alone = run(Case(ALONE, STEPS, setup=bf16_setup), tmp_path / "alone")
    outcome = run(Case(pair, STEPS, plans, setup=bf16_setup), tmp_path / "job")
    assert {s["version"] for s in outcome.switches} == {1, 2}, outcome.logs
    assert outcome.losses == alone.losses, outcome.logs
    expected = alone.full_state()
    for key, tensors in outcome.full_state().items():
        assert all(map(torch.equal, tensors, expected[key])), key
