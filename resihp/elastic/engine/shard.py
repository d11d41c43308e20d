"""What one rank holds of the model: modules, parameters and their optimizer state, by range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from resihp.contracts import Stage
from resihp.layout import Param, Range

from ..models import Model
from ..optim import Optimizer
from ..worlds.world import World


@dataclass
class Shard:
    """The parts of one stage that a rank holds.

    parts       modules by part name, in the order in which they are run
    ranges      range of each parameter held here
    tensors     the parameter tensors themselves
    optimizer   updates exactly these tensors, one group for each of `settings.groups`
    """

    parts: dict[str, nn.Module]
    ranges: dict[Param, Range]
    tensors: dict[Param, nn.Parameter]
    optimizer: torch.optim.Optimizer
    settings: Optimizer

    @property
    def layers(self) -> int:
        """Decoder layers held here."""
        return sum(name.startswith("layers.") for name in self.parts)

    def state(self, param: Param) -> tuple[torch.Tensor, ...]:
        """The parameter and its moments; zeros where the optimizer has made none yet."""
        tensor = self.tensors[param]
        held = self.optimizer.state.get(tensor, {})
        moments = (held.get(name) for name in self.settings.form.moments)
        return (tensor.data, *(torch.zeros_like(tensor) if m is None else m for m in moments))

    def reserve(self, param: Param) -> None:
        """Make room for the state of a parameter, to be filled from another rank."""
        tensor, defaults = self.tensors[param], self.optimizer.defaults
        held = self.optimizer.state[tensor]
        if not held:
            on_device = defaults.get("fused") or defaults.get("capturable")
            device = tensor.device if on_device else torch.device("cpu")
            self.settings.form.fill(held, tensor, device)

    def scalars(self) -> torch.Tensor:
        """The optimizer's scalars [groups, names], -inf where nothing is held that would tell."""
        names = self.settings.form.scalars
        table = _no_scalars(len(self.optimizer.param_groups), len(names))
        for row, group in zip(table, self.optimizer.param_groups, strict=True):
            held = next((self.optimizer.state.get(t) for t in group["params"]), None)
            if held:
                row.copy_(torch.tensor([float(held[name]) for name in names], dtype=row.dtype))
        return table

    def set_scalars(self, table: torch.Tensor, completed: int) -> None:
        """Take on the optimizer's scalars as they are after `completed` updates."""
        if completed == 0 and not self.settings.form.eager:
            self.optimizer.state.clear()
            return
        for row, group in zip(table.tolist(), self.optimizer.param_groups, strict=True):
            for tensor in group["params"]:
                held = self.optimizer.state[tensor]
                for name, value in zip(self.settings.form.scalars, row, strict=True):
                    if isinstance(held[name], torch.Tensor):
                        held[name].fill_(value)
                    else:
                        held[name] = type(held[name])(value)


def scalar_table(model: Model, settings: Optimizer) -> torch.Tensor:
    """As `Shard.scalars`, of a rank that holds nothing."""
    return _no_scalars(len(settings.groups(model.parameters)), len(settings.form.scalars))


def _no_scalars(groups: int, names: int) -> torch.Tensor:
    return torch.full((groups, names), -torch.inf, dtype=torch.float64)


def initial_shard(model: Model, settings: Optimizer, world: World) -> Shard:
    """This rank's shard of a world, with the model's initial values."""
    shard = build_shard(model, settings, world)
    for param, tensor in shard.tensors.items():
        initial = model.initial(param.key, param.shape)
        tensor.data.copy_(rows(initial, param, shard.ranges[param]))
    return shard


def build_shard(
    model: Model, settings: Optimizer, world: World, *, present: Shard | None = None
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
    optimizer = settings.build(model.parameters, tensors)
    shard = Shard(parts, ranges, tensors, optimizer, settings)
    for param, tensor in tensors.items():
        if present is not None and present.tensors.get(param) is tensor:
            shard.optimizer.state[tensor] = present.optimizer.state[tensor]
        else:
            tensor.data.zero_()  # touch the memory now, not in the pause
            shard.reserve(param)
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
