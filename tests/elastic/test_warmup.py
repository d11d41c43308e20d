"""A rank that comes into a job runs passes in the shapes of its stage, without other ranks."""

from __future__ import annotations

from collections import ChainMap
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import nn

from resihp.contracts import Layout
from resihp.elastic.models import Model, Packed
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from resihp.elastic.process_groups.layout_groups import LayoutGroups
from resihp.elastic.reshard.warmup import warm_up_stage
from resihp.elastic.step import Setup
from resihp.elastic.step.shard import Shard, part_ranges
from resihp.layout import Param, Range
from tests.elastic.test_models import LAYOUTS, MODELS, OPTIMIZER, batch


def held(model: Model, layout: Layout, rank: int) -> dict[str, dict[Param, Range]]:
    """Ranges of a rank, by part."""
    place = layout.place_of(rank)
    assert place is not None
    parts = model.parameters.parts(layout.replicas[place.dp], place.pp)
    shares = layout.stage_at(place).shares
    return {
        part: {param: param.ranges(shares)[place.tp] for param in params}
        for part, params in parts.items()
    }


def passes(setup: Setup, layout: Layout, rank: int) -> list[tuple[str, dict[str, Any], Packed]]:
    """Parts that run forward in the warm-up of a rank, with their ranges and the microbatch."""
    groups = cast(LayoutGroups, SimpleNamespace(layout=layout, place=layout.place_of(rank)))
    ranges = ChainMap(*held(setup.model, layout, rank).values())
    shard = cast(Shard, SimpleNamespace(ranges=ranges))
    alone = AbortableProcessGroup(SimpleNamespace(device=setup.device, rank=rank), (rank,), None)  # type: ignore[arg-type]
    seen, build = list[tuple[str, dict[str, Any], Packed]](), setup.model.build

    def watched(part: str, ranges: dict[str, Any], group: AbortableProcessGroup) -> nn.Module:
        assert group is alone
        module = build(part, ranges, group)
        module.register_forward_pre_hook(
            lambda module, inputs: seen.append((part, ranges, inputs[-1]))
        )
        return module

    with mock.patch.object(type(setup.model), "build", side_effect=watched):
        warm_up_stage(setup, alone, groups, shard)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_each_kind_of_part_runs_in_the_shapes_of_the_rank(model: str, layout: str) -> None:
    setup = Setup(MODELS[model], OPTIMIZER, batch)
    for rank in LAYOUTS[layout].ranks:
        own = held(setup.model, LAYOUTS[layout], rank)
        seen = passes(setup, LAYOUTS[layout], rank)
        assert {kind(part) for part, _, _ in seen} == {kind(part) for part in own}
        for part, ranges, packed in seen:
            assert ranges == part_ranges(tuple(own[part]), own[part])
            assert packed.seq_lens == batch(0, 0).seq_lens


def kind(part: str) -> str:
    return part.partition(".")[0]


@pytest.mark.parametrize("options", [{"recompute": "layers"}, {"compute_dtype": torch.bfloat16}])
def test_it_runs_as_a_step_does(options: dict[str, Any]) -> None:
    setup = replace(Setup(MODELS["llama"], OPTIMIZER, batch), **options)
    assert passes(setup, LAYOUTS["grid"], 0)


def test_a_source_of_data_that_fails_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    def broken(step: int, index: int) -> Packed:
        raise OSError("the file system is away")

    assert passes(Setup(MODELS["llama"], OPTIMIZER, broken), LAYOUTS["grid"], 3) == []
    assert "is not warmed up" in caplog.text
    assert "the file system is away" in caplog.text
