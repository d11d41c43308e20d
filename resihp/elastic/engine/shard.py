"""What one rank holds of the model: modules, parameters and their optimizer state, by range."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from resihp.contracts import Stage
from resihp.layout import Param, Range

from ..models import Model
from ..worlds.world import World

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
            held.update({name: torch.empty_like(tensor).zero_() for name in MOMENTS})
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


def initial_shard(model: Model, settings: AdamW, world: World) -> Shard:
    """This rank's shard of a world, with the model's initial values."""
    shard = build_shard(model, settings, world)
    for param, tensor in shard.tensors.items():
        initial = model.initial(param.key, param.shape)
        tensor.data.copy_(rows(initial, param, shard.ranges[param]))
    return shard


def build_shard(
    model: Model, settings: AdamW, world: World, *, present: Shard | None = None
) -> Shard:
    """This rank's shard of a world, its memory in place but its values still to come.

    What `present` holds in the very same range is shared with it, not copied: neither changes
    before one of the two is let go.
    """
    stage, index = world.stage, world.place.tp
    ranges = {p: p.ranges(stage.shares)[index] for p in model.parameters.of_stage(stage)}
    names = part_names(model, stage)
    parts = {part: model.build(part, part_ranges(part, ranges), world.tp) for part in names}
    tensors: dict[Param, nn.Parameter] = {}
    for param, span in ranges.items():
        part = next(part for part in names if param.key.startswith(f"{part}."))
        owner, name = _owner(parts[part], param.key.removeprefix(f"{part}."))
        if present is not None and present.ranges.get(param) == span:
            owner.register_parameter(name, present.tensors[param])
        tensors[param] = owner.get_parameter(name)
    shard = Shard(parts, ranges, tensors, settings.build(tensors.values()))
    for param, tensor in tensors.items():
        if present is not None and present.tensors.get(param) is tensor:
            shard.optimizer.state[tensor] = present.optimizer.state[tensor]
        else:
            tensor.data.zero_()  # touch the memory now, not in the pause
            shard.state(param)
    return shard


def _owner(module: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The submodule that owns the parameter at `path`, and its name there."""
    parent, _, name = path.rpartition(".")
    return module.get_submodule(parent), name


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
