"""Warm-up of a rank that comes into a job: everything that is slow the first time."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from resihp.layout import Param, Range

from ..models import Packed
from ..process_groups.abortable import AbortableProcessGroup, WaitClock
from ..process_groups.layout_groups import LayoutGroups
from ..rendezvous.membership import Rendezvous
from ..step import Setup
from ..step.memory import entry_of, part_forward
from ..step.shard import Shard, part_ranges

_log = logging.getLogger("resihp.elastic")
_TOKENS = 16
Parts = Mapping[str, tuple[Param, ...]]


def warm_up(setup: Setup, rendezvous: Rendezvous) -> None:
    """Run one pass of one whole layer, and one update, on dummy data; without other ranks.

    Before the layout is known.
    """
    layer = setup.model.parameters.layers[0]
    whole = {param: (0, param.size) for param in layer}
    with rendezvous.group_factory(WaitClock(), device=setup.device) as factory:
        alone = factory.alone()
    ids = torch.zeros(_TOKENS, dtype=torch.long, device="cpu")
    _run(setup, alone, {"layers.0": layer}, whole, Packed(ids, ids, (_TOKENS,)))
    tensors = {param: nn.Parameter(torch.zeros(1, device=setup.device)) for param in layer}
    optimizer = setup.optimizer.build(setup.model.parameters, tensors.items())
    for tensor in tensors.values():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()


def warm_up_stage(
    setup: Setup, alone: AbortableProcessGroup, groups: LayoutGroups, shard: Shard
) -> None:
    """Run one pass of each kind of part that a stage holds, in its shapes; without other ranks.

    The microbatch is as long as the first one of the job. What a pass raises is logged: the state
    has nothing to do with it.
    """
    replica = groups.layout.replicas[groups.place.dp]
    parts = setup.model.parameters.parts(replica, groups.place.pp)
    kinds = {part.partition(".")[0]: part for part in reversed([*parts])}
    try:
        chosen = {part: parts[part] for part in kinds.values()}
        _run(setup, alone, chosen, shard.ranges, setup.data(0, 0))
    except Exception:  # noqa: BLE001 - a cold first step is no fault
        _log.warning("the first step in the new layout is not warmed up", exc_info=True)


def _run(
    setup: Setup,
    alone: AbortableProcessGroup,
    parts: Parts,
    ranges: Mapping[Param, Range],
    packed: Packed,
) -> None:
    ids = torch.zeros_like(packed.tokens, device=setup.device)
    # Without targets: a head with a share of the vocabulary would look for them in all of it.
    blank = replace(packed, tokens=ids, targets=torch.full_like(ids, -100))
    for part, params in parts.items():
        with setup.device:  # factory functions in the model allocate there
            module = setup.model.build(part, part_ranges(params, ranges), alone)
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        part_forward(setup, blank, part, module, entry_of(setup, blank)).sum().backward()
