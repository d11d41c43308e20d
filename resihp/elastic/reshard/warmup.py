"""Warm-up of a joiner: everything that is slow the first time."""

from __future__ import annotations

import torch
from torch import nn

from ..models import Packed
from ..process_groups.abortable import WaitClock
from ..rendezvous.membership import Rendezvous
from ..step import Setup
from ..step.shard import part_ranges

_TOKENS = 16


def warm_up(setup: Setup, rendezvous: Rendezvous) -> None:
    """Run one pass of one whole layer, and one update, on dummy data; without other ranks."""
    layer = setup.model.parameters.layers[0]
    whole = {param: (0, param.size) for param in layer}
    with rendezvous.group_factory(WaitClock(), device=setup.device) as factory:
        alone = factory.group("warm-up", [factory.rank])
    with setup.device:  # factory functions in the model allocate there
        module = setup.model.build("layers.0", part_ranges(layer, whole), alone)
    for parameter in module.parameters():
        nn.init.zeros_(parameter)
    hidden = torch.zeros(_TOKENS, setup.model.width, device=setup.device, requires_grad=True)
    ids = torch.zeros(_TOKENS, dtype=torch.long, device=setup.device)
    module(hidden, Packed(ids, ids, (_TOKENS,))).sum().backward()
    tensors = {param: nn.Parameter(torch.zeros(1, device=setup.device)) for param in layer}
    optimizer = setup.optimizer.build(setup.model.parameters, tensors)
    for tensor in tensors.values():
        tensor.grad = torch.zeros_like(tensor)
    optimizer.step()
