"""Shard of one rank: modules, parameters and optimizer state, by range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from resihp.contracts import ContractError
from resihp.layout import Param, Range, StateRange, StateRanges, by_param

from ..models import Model
from ..optim import Optimizer
from ..process_groups.layout_groups import LayoutGroups

STATE_DTYPE = torch.float32
"""Of parameters, moments, gradients and sums between ranks, whatever dtype operators compute in."""

Allot = Callable[[Param, torch.Tensor], torch.Tensor]
"""Gives zeros of the shape of a tensor that belongs to a parameter, in memory that was touched."""


def zeros(param: Param, like: torch.Tensor) -> torch.Tensor:
    """Zeros of the shape of `like`."""
    return torch.zeros_like(like)


@dataclass
class Shard:
    """Parts of one stage that a rank holds.

    parts       modules by part name, in the order in which they are run
    ranges      range of each parameter held here
    tensors     the parameter tensors themselves
    slices      rows of them whose optimizer state is held here: the tensors themselves, or views
    optimizer   updates exactly these slices, one group for each of `settings.groups`
    """

    parts: dict[str, nn.Module]
    ranges: dict[Param, Range]
    tensors: dict[Param, nn.Parameter]
    slices: dict[StateRange, nn.Parameter]
    optimizer: torch.optim.Optimizer
    settings: Optimizer

    @property
    def state_ranges(self) -> StateRanges:
        """Ranges of each parameter whose optimizer state is held here."""
        return by_param(self.slices)

    def state(self, held: StateRange) -> tuple[torch.Tensor, ...]:
        """Return rows of a parameter and their moments; zeros where there are none yet."""
        tensor = self.slices[held]
        state = self.optimizer.state.get(tensor, {})
        moments = (state.get(name) for name in self.settings.form.moments)
        return (tensor.data, *(torch.zeros_like(tensor) if m is None else m for m in moments))

    def reserve(self, held: StateRange, allot: Allot | None = None) -> None:
        """Allocate the optimizer state of some rows, to be received from another rank.

        `allot` gives the memory; None: existing optimizer state is used.
        """
        tensor, defaults, param = self.slices[held], self.optimizer.defaults, held[0]
        state = self.optimizer.state[tensor]
        if state:
            if allot is not None:
                state.update((name, allot(param, tensor)) for name in self.settings.form.moments)
            return
        on_device = defaults.get("fused") or defaults.get("capturable")
        device = tensor.device if on_device else torch.device("cpu")
        self.settings.form.fill(state, tensor, device, partial(allot or zeros, param))

    def scalars(self) -> torch.Tensor:
        """Return the optimizer's scalars [groups, names]; -inf where this rank has none."""
        names = self.settings.form.scalars
        table = _no_scalars(len(self.optimizer.param_groups), len(names))
        for row, group in zip(table, self.optimizer.param_groups, strict=True):
            held = next((self.optimizer.state.get(t) for t in group["params"]), None)
            if held:
                values = [float(held[name]) for name in names]
                row.copy_(torch.tensor(values, dtype=row.dtype, device="cpu"))
        return table

    def set_scalars(self, table: torch.Tensor, completed: int) -> None:
        """Set the optimizer's scalars as they are after `completed` updates."""
        if completed == 0:
            if not self.settings.form.eager:  # the optimizer creates it at its first update
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
    """Return the table of `Shard.scalars` for a rank without a shard."""
    return _no_scalars(len(settings.groups(model.parameters)), len(settings.form.scalars))


def _no_scalars(groups: int, names: int) -> torch.Tensor:
    return torch.full((groups, names), -torch.inf, dtype=torch.float64, device="cpu")


def initial_shard(model: Model, settings: Optimizer, groups: LayoutGroups) -> Shard:
    """Build this rank's shard with the model's initial values."""
    shard = build_shard(model, settings, groups, allot=None)
    for param, tensor in shard.tensors.items():
        tensor.data.copy_(model.initial(param, shard.ranges[param]))
    return shard


def build_shard(
    model: Model,
    settings: Optimizer,
    groups: LayoutGroups,
    *,
    current: Shard | None = None,
    allot: Allot | None = zeros,
) -> Shard:
    """Build this rank's shard with memory allocated and values still to be received.

    What `current` holds in the very same range is shared with it, not copied: neither changes
    before one of the two is let go. `allot` gives the memory of all else; None: it stays where it
    was made, and the optimizer begins. Raises `ContractError` for a part that is not as the model
    says.
    """
    place, parameters = groups.place, model.parameters
    parts = parameters.parts(groups.layout.replicas[place.dp], place.pp)
    ranges = {
        param: param.ranges(groups.stage.shares)[place.tp]
        for params in parts.values()
        for param in params
    }
    modules: dict[str, nn.Module] = {}
    tensors: dict[Param, nn.Parameter] = {}
    if current is not None:
        unchanged = current.ranges.items() & ranges.items()
        tensors = {param: current.tensors[param] for param, _ in unchanged}
    for part, params in parts.items():
        spans = part_ranges(params, ranges)
        with groups.device:  # factory functions in the model allocate there
            modules[part] = model.build(part, spans, groups.tp)
        check_part(modules[part], part, params, ranges)
        for param in params:
            parent, _, name = name_in_part(param).rpartition(".")
            owner = modules[part].get_submodule(parent)
            tensors.setdefault(param, owner.get_parameter(name))
            owner.register_parameter(name, tensors[param])
    tensors = {param: tensors[param] for param in ranges}
    shared = {p for p, tensor in tensors.items() if current and current.tensors.get(p) is tensor}
    for param, tensor in tensors.items():
        if param not in shared and allot is not None:
            tensor.data = allot(param, tensor.data)
    whole = {param: (span,) for param, span in ranges.items()}
    state = whole if groups.state is None else groups.state.ranges
    kept = {} if current is None else current.slices
    slices = {
        held: kept[held] if param in shared and held in kept else _slice(tensors, ranges, held)
        for param, spans in state.items()
        for held in ((param, span) for span in spans)
    }
    optimizer = settings.build(parameters, [(param, one) for (param, _), one in slices.items()])
    shard = Shard(modules, ranges, tensors, slices, optimizer, settings)
    for held, tensor in slices.items():
        if current is not None and kept.get(held) is tensor:
            shard.optimizer.state[tensor] = current.optimizer.state[tensor]
        elif allot is not None:
            shard.reserve(held, allot)
    return shard


def _slice(
    tensors: Mapping[Param, nn.Parameter], ranges: Mapping[Param, Range], held: StateRange
) -> nn.Parameter:
    """Return the tensor of a parameter, or a view of some of its rows."""
    param, span = held
    if span == ranges[param]:
        return tensors[param]
    return nn.Parameter(rows(tensors[param].data, param, span, ranges[param][0]))


def check_part(
    module: nn.Module, part: str, params: tuple[Param, ...], ranges: Mapping[Param, Range]
) -> None:
    """Check that a model built a part as declared. Raises `ContractError`."""
    found = {**module.state_dict(), **dict(module.named_buffers())}
    for param in params:
        tensor = found.pop(name_in_part(param), None)
        if tensor is None:
            raise ContractError(part, f"has no parameter {name_in_part(param)!r}")
        start, stop = ranges[param]
        due = list(param.shape)
        due[param.dim or 0] = stop - start
        if list(tensor.shape) != due or tensor.dtype != STATE_DTYPE:
            raise ContractError(
                param.key, f"must be built as float32 {due}, not {tensor.dtype} {[*tensor.shape]}"
            )
    if found:
        raise ContractError(part, f"holds {next(iter(found))!r}, which the model does not name")


def name_in_part(param: Param) -> str:
    """Return the name of a parameter within its part: its key without the part."""
    return param.key.removeprefix(f"{home(param)}.")


def home(param: Param) -> str:
    """Return the part in a parameter's key; a tied parameter is in the last part as well."""
    if param.key.startswith("layers."):
        return ".".join(param.key.split(".", 2)[:2])
    return param.key.split(".", 1)[0]


def part_ranges(params: tuple[Param, ...], ranges: Mapping[Param, Range]) -> dict[str, Range]:
    """Return the ranges of one part's parameters, by parameter name."""
    return {name_in_part(param): ranges[param] for param in params}


def rows(tensor: torch.Tensor, param: Param, span: Range, origin: int = 0) -> torch.Tensor:
    """Return the view on rows `span` of `param`; `tensor` begins at row `origin`."""
    return tensor.narrow(param.dim or 0, span[0] - origin, span[1] - span[0])


def copy_shared_rows(
    param: Param, source: torch.Tensor, held: Range, target: torch.Tensor, due: Range
) -> None:
    """Copy the rows in both ranges of `param`: `held` in `source`, `due` in `target`."""
    span = (max(held[0], due[0]), min(held[1], due[1]))
    if span[0] < span[1]:
        rows(target, param, span, due[0]).copy_(rows(source, param, span, held[0]))
