"""What crosses between host and device in a step: only what must, and the host does not wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from resihp.contracts import Layout, Plan, Replica, Stage
from resihp.elastic.microbatches.assignment import full_assignments
from resihp.elastic.models import Packed
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.step.step_microbatches import StepMicrobatches
from tests.elastic.engine_job import small_setup
from tests.elastic.threads import on_ranks

CUDA = torch.device("cuda", 0)


class Operators(TorchDispatchMode):
    """Collects operators with their arguments; pinned memory is taken for granted."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Any, Mapping[str, Any]]] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        self.seen.append((func, kwargs))
        return args[0] if func is torch.ops.aten._pin_memory.default else func(*args, **kwargs)


def test_a_microbatch_crosses_from_pinned_memory() -> None:
    """On tensors that have a device and no values."""
    with FakeTensorMode():
        tokens, targets = torch.zeros(2, 3, dtype=torch.long).unbind()
        with Operators() as operators:
            packed = Packed(tokens, targets, (3,)).to(CUDA)
        assert packed.tokens.device.type == packed.targets.device.type == "cuda"
        copies = [kwargs for func, kwargs in operators.seen if "_to_copy" in str(func)]
        pinned = [func for func, _ in operators.seen if "_pin_memory" in str(func)]
        assert [copy["non_blocking"] for copy in copies] == [True, True]
        assert len(pinned) == 2
        with Operators() as operators:
            assert packed.to(packed.tokens.device) is packed
        assert not operators.seen


def test_a_rank_that_is_alone_in_its_stage_agrees_without_its_device() -> None:
    """On stopping after a failure elsewhere; ranks of a group must ask each other."""
    stages = (Stage(ranks, (0, 4)) for ranks in ((0,), (1, 2), (3, 4)))
    layout = Layout(tuple(Replica((stage,)) for stage in stages))
    plan, setup = Plan(version=0, layout=layout, quotas=(2, 2, 2)), small_setup()

    def operators_of(factory: ProcessGroupFactory) -> int:
        groups = build_layout_groups(factory, layout, setup.model.parameters, name="generation")
        mine = StepMicrobatches(setup, groups, plan, full_assignments(plan))
        mine.begin(0, None)
        assert not mine.advance(lambda: True)
        with Operators() as operators:
            mine.check(lambda: factory.rank != 2)
        assert mine.is_stopped
        return len(operators.seen)

    found = on_ranks(layout.ranks, operators_of)
    assert found[0] == 0 < found[1]
