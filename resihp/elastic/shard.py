"""What one rank holds of the model: modules, parameters and their optimizer state, by range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from resihp.contracts import Stage
from resihp.layout import Param, Range

from .comm import Group
from .models import Model

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Optimizer state with the shape of its parameter; it moves along with it."""


@dataclass
class Shard:
    """The parts of one stage that a rank holds.

    parts       modules by part name, in the order in which they are run
    ranges      range of each parameter held here
    tensors     the parameter tensors themselves
    optimizer   updates exactly these tensors
    """

    parts: dict[str, nn.Module]
    ranges: dict[Param, Range]
    tensors: dict[Param, nn.Parameter]
    optimizer: torch.optim.Optimizer

    @property
    def layers(self) -> int:
        """Decoder layers held here."""
        return sum(name.startswith("layers.") for name in self.parts)

    def state(self, param: Param) -> tuple[torch.Tensor, ...]:
        """The parameter and its moments, made if the optimizer has not stepped yet."""
        tensor = self.tensors[param]
        held = self.optimizer.state[tensor]
        if not held:
            held["step"] = torch.tensor(0.0)
            held.update({name: torch.zeros_like(tensor) for name in MOMENTS})
        return (tensor.data, *(held[name] for name in MOMENTS))

    def set_updates(self, count: int) -> None:
        """Tell the optimizer how many updates the state has behind it (bias correction)."""
        for param, tensor in self.tensors.items():
            self.state(param)
            self.optimizer.state[tensor]["step"].fill_(float(count))


@dataclass(frozen=True)
class AdamW:
    """Hyper-parameters of AdamW (Loshchilov & Hutter, arXiv 1711.05101), clipping and warm-up.

    The learning rate is a function of the step alone, so that no change of layout disturbs it.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    max_norm: float = 1.0
    warmup_steps: int = 0

    def build(self, tensors: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The optimizer of one rank's tensors."""
        return torch.optim.AdamW(
            tensors,
            lr=self.lr,
            betas=self.betas,
            eps=self.eps,
            weight_decay=self.weight_decay,
            foreach=True,
        )

    def rate(self, step: int) -> float:
        """Learning rate of a step: a linear rise over the warm-up, then constant."""
        return self.lr * min(1.0, (step + 1) / (self.warmup_steps + 1))


def build_shard(
    model: Model, settings: AdamW, stage: Stage, index: int, group: Group, *, fill: bool
) -> Shard:
    """The shard of tensor-parallel rank `index` of `stage`; initial values only with `fill`."""
    ranges = {p: p.ranges(stage.shares)[index] for p in model.parameters.of_stage(stage)}
    parts = {part: _part(model, part, ranges, group) for part in part_names(model, stage)}
    by_key = {p.key: p for p in ranges}
    tensors = {
        by_key[f"{part}.{name}"]: tensor
        for part, module in parts.items()
        for name, tensor in module.named_parameters()
    }
    assert tensors.keys() == ranges.keys(), "a part's parameters differ from its description"
    if fill:
        for param, tensor in tensors.items():
            tensor.data.copy_(rows(model.initial(param.key, param.shape), param, ranges[param]))
    return Shard(parts, ranges, tensors, settings.build(tensors.values()))


def part_names(model: Model, stage: Stage) -> list[str]:
    """The parts of a stage in the order in which they are run."""
    start, stop = stage.layers
    first = ["first"] if start == 0 else []
    last = ["last"] if stop == len(model.parameters.layers) else []
    return first + [f"layers.{index}" for index in range(start, stop)] + last


def part_ranges(part: str, ranges: dict[Param, Range]) -> dict[str, Range]:
    """The ranges of one part's parameters, by parameter name."""
    return {
        param.key.removeprefix(f"{part}."): span
        for param, span in ranges.items()
        if param.key.startswith(f"{part}.")
    }


def rows(tensor: torch.Tensor, param: Param, span: Range, origin: int = 0) -> torch.Tensor:
    """The view of `tensor` on rows `span` of `param`, where the tensor begins at row `origin`."""
    return tensor.narrow(param.dim or 0, span[0] - origin, span[1] - span[0])


def _part(model: Model, part: str, ranges: dict[Param, Range], group: Group) -> nn.Module:
    return model.build(part, part_ranges(part, ranges), group)
