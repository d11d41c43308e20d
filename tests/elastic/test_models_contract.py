"""A model that does not keep the contract is refused with the name of what is wrong."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from resihp.contracts import ContractError, Layout
from resihp.elastic.models import Llama, Part
from resihp.elastic.optim import Optimizer
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from resihp.elastic.process_groups.layout_groups import LayoutGroups
from resihp.elastic.step.shard import initial_shard
from resihp.layout import Param, Parameters, Range
from tests.elastic.test_models import SHAPE

OPTIMIZER = Optimizer(torch.optim.SGD, lr=0.1)


class Odd(Llama):
    """A Llama whose last part is changed by `spoil`."""

    def __init__(self, spoil: str) -> None:
        super().__init__(SHAPE)
        self.spoil = spoil

    def build(
        self, part: Part, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        module = super().build(part, ranges, group)
        if part == "last":
            getattr(self, self.spoil)(module)
        return module

    def missing(self, module: nn.Module) -> None:
        del module.norm

    def wrong_shape(self, module: nn.Module) -> None:
        module.norm = nn.Parameter(torch.ones(3))

    def low_precision(self, module: nn.Module) -> None:
        module.norm = nn.Parameter(module.norm.detach().bfloat16())

    def extra(self, module: nn.Module) -> None:
        module.scale = nn.Parameter(torch.ones(1))

    def buffer(self, module: nn.Module) -> None:
        module.register_buffer("average", torch.ones(1))

    def unsaved_buffer(self, module: nn.Module) -> None:
        module.register_buffer("average", torch.ones(1), persistent=False)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("missing", "last: has no parameter 'norm'"),
        ("wrong_shape", r"last.norm: must be built as float32 \[32\], not torch.float32 \[3\]"),
        ("low_precision", r"last.norm: must be built as float32"),
        ("extra", "last: holds 'scale', which the model does not name"),
        ("buffer", "last: holds 'average', which the model does not name"),
        ("unsaved_buffer", "last: holds 'average', which the model does not name"),
    ],
)
def test_a_part_that_is_not_as_the_model_says(spoil: str, message: str) -> None:
    layout = Layout.grid(dp=1, pp=1, tp=1, layers=4)
    place = layout.place_of(0)
    assert place is not None
    group = AbortableProcessGroup(SimpleNamespace(device=torch.device("cpu")), (0,), None)
    groups = LayoutGroups(layout, place, group, group, None, None)
    with pytest.raises(ContractError, match=message):
        initial_shard(Odd(spoil), OPTIMIZER, groups)


def test_only_the_two_ends_may_be_tied_and_only_by_what_is_cut() -> None:
    table, norm = Param("first.table", (8, 2), 0), Param("first.norm", (8,))
    assert Parameters(((),), (table,), (table,)).all == (table,)
    with pytest.raises(ContractError, match="only first and last"):
        Parameters(((table,),), (table,), ())
    with pytest.raises(ContractError, match="needs a dimension"):
        Parameters(((),), (norm,), (norm,))
