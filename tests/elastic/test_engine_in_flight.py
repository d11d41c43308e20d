"""Replicas with their own numbers of microbatches in flight train to the same bit."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch

from resihp.contracts import ContractError, Layout, Op, Plan, Schedule
from resihp.elastic.step import Setup
from resihp.elastic.step.schedule import check_schedule
from tests.elastic.test_models import MODELS, OPTIMIZER, batch
from tests.elastic.threads import train

STEPS, MICROBATCHES = 2, 8
PIPELINE = Layout.grid(dp=1, pp=3, tp=1, layers=4)


def in_flight(layout: Layout, counts: tuple[int, ...]) -> Layout:
    """The layout, each replica with these numbers."""
    return Layout(tuple(replace(replica, in_flight=counts) for replica in layout.replicas))


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_in_flight_changes_no_bit(deterministic: bool) -> None:
    """Each stage holds as many as the plan says, and adds up the same gradients in order."""
    ops: dict[int, list[Op]] = defaultdict(list)  # of each rank, which is a thread

    def record(*, op: Op, **fields: Any) -> None:
        if op in (Op.FORWARD, Op.BACKWARD):
            ops[threading.get_ident()].append(op)

    setup = Setup(MODELS["llama"], OPTIMIZER, batch, deterministic=deterministic)
    usual = train(setup, Plan(version=0, layout=PIPELINE, quotas=(MICROBATCHES,)), STEPS)
    plan = Plan(
        version=0,
        layout=in_flight(PIPELINE, (7, 3, 1)),
        quotas=(MICROBATCHES,),
        schedule=Schedule.EAGER_1F1B,
    )
    found = train(replace(setup, record=record), plan, STEPS)
    assert found.losses == usual.losses
    expected = usual.state
    for param, tensors in found.state.items():
        assert all(map(torch.equal, tensors, expected[param])), param.key
    assert sorted(most_held(rank) for rank in ops.values()) == [1, 3, 7]


def most_held(ops: list[Op]) -> int:
    """Most forwards without their backward."""
    held = most = 0
    for op in ops:
        held += 1 if op is Op.FORWARD else -1
        most = max(most, held)
    return most


def test_a_split_backward_takes_no_numbers_in_flight() -> None:
    layout = in_flight(PIPELINE, (7, 3, 1))
    plan = Plan(version=0, layout=layout, quotas=(8,), schedule=Schedule.ZERO_BUBBLE)
    with pytest.raises(ContractError, match="in_flight"):
        check_schedule(plan)
