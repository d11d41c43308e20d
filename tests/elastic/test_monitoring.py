"""What a monitor is told of a job that changes its layout, and what it is asked to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from resihp.contracts import ContractError, Plan
from resihp.elastic.models import Llama, Packed
from resihp.elastic.monitoring import attach_monitor
from resihp.elastic.optim import Optimizer
from resihp.elastic.state.events import Callbacks, LayoutChange
from resihp.elastic.step import ReducedStep, Setup
from tests.elastic.engine_job import GRID, SHAPE, batch


class MicrobatchReport:
    """A monitor that notes what it is told."""

    def __init__(self) -> None:
        self.plan_version = 0
        self.calls: list[str] = []

    def record(self, **fields: Any) -> None:
        self.calls.append(f"record under {self.plan_version}")

    def between_steps(self) -> None:
        self.calls.append("between steps")

    def while_idle(self) -> None:
        self.calls.append("idle")


def setup_of(**more: Any) -> Setup:
    return Setup(Llama(SHAPE), Optimizer(torch.optim.SGD, lr=0.1), batch, **more)


def test_a_monitor_and_hooks_are_both_called() -> None:
    told, seen = MicrobatchReport(), []
    given = Callbacks(
        on_step=lambda reduced, ms, plan: seen.append("step"),
        on_layout_change=lambda switch: seen.append("switch"),
        on_idle=lambda: seen.append("idle"),
    )
    setup, hooks = attach_monitor(told, setup_of(), given)
    plan = Plan(version=3, layout=GRID, quotas=(6,) * GRID.dp)
    hooks.on_step(ReducedStep(step=0, loss=1.0, norm=1.0, ready=(0, 0)), 5.0, plan)
    hooks.on_layout_change(LayoutChange(plan=plan, step=1, pause_ms=1.0))
    setup.record(op=0, step=1, microbatch=0, compute_ms=1.0, wait_ms=0.0)
    hooks.on_idle()
    assert told.calls == ["between steps", "record under 3", "idle"]
    assert seen == ["step", "switch", "idle"]


def test_records_go_to_one_place() -> None:
    for name in ("record", "record_transfer"):
        setup = setup_of(**{name: MicrobatchReport().record})
        with pytest.raises(ContractError, match=rf"Setup\.{name} is set"):
            attach_monitor(MicrobatchReport(), setup, Callbacks())


def test_a_setup_takes_the_name_of_a_device_and_refuses_buckets_without_a_size() -> None:
    assert setup_of(device="cpu").device == torch.device("cpu")
    with pytest.raises(ContractError, match="bucket_bytes: must be 1 or more, not -1"):
        setup_of(bucket_bytes=-1)


@pytest.mark.parametrize(
    ("tokens", "targets", "lengths", "named"),
    [
        (torch.zeros(2, 4), torch.zeros(2, 4), (8,), "tokens"),
        (torch.zeros(4), torch.zeros(5), (4,), "tokens"),
        (torch.zeros(4), torch.zeros(4), (3,), "seq_lens"),
        (torch.zeros(4), torch.zeros(4), (4, 0), "seq_lens"),
        (torch.zeros(4), torch.zeros(4), (), "seq_lens"),
        (torch.zeros(0), torch.zeros(0), (), "tokens"),
    ],
)
def test_a_microbatch_that_does_not_fit_together_is_named(
    tokens: torch.Tensor, targets: torch.Tensor, lengths: tuple[int, ...], named: str
) -> None:
    with pytest.raises(ContractError, match=named):
        Packed(tokens, targets, lengths)
