"""Memory of a step's tensors: counted while it runs, and measured on single parts of a model."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from resihp.contracts import Memory, RankAmount
from resihp.layout import Param

from ..models import Packed
from ..models.recomputation import recomputed, recomputing_attention
from ..process_groups.abortable import AbortableProcessGroup
from .setup import Setup
from .shard import name_in_part, part_ranges
from .split_backward import SplitBackward


class LiveTensors(TorchDispatchMode):
    """Counts the bytes of the tensors that operators have made inside it and that are alive.

    live_bytes  now; memory that several tensors share counts once
    peak_bytes  most since the beginning, or since `reset_peak`

    What an operator needs while it runs, and gives back before it ends, is not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes, self.peak_bytes = 0, 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def reset_peak(self) -> None:
        """Measure the peak from now on."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operator and count what it has made."""
        made = func(*args, **(kwargs or {}))
        for tensor in (made,) if isinstance(made, torch.Tensor) else tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive:
            return

        def forget(_: object) -> None:
            del self._alive[key]
            self.live_bytes -= size

        self._alive[key] = weakref.ref(storage, forget)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)


@dataclass(frozen=True)
class _PartBytes:
    """Bytes that a forward pass leaves behind, and most that passes and updates need besides.

    casts       of parameters, which all passes of a step share
    split       what is there between the halves of a split backward pass
    split_pass  most that this pass needs besides
    update_of_two  of twice as many parameters as `update`
    """

    kept: int
    working: int
    casts: int = 0
    split: int = 0
    split_pass: int = 0
    update: int = 0
    update_of_two: int = 0


def measure_memory(setup: Setup, packed: Packed, *, budget_bytes: int | None = None) -> Memory:
    """Return what training takes of a device, for a `Job`, by running one layer and the head.

    packed        a microbatch of the usual size
    budget_bytes  of a device; None: unlimited

    Forward and backward passes of the whole and of half of each are measured: what halves is split
    by tensor parallelism, the rest is held by every rank of a stage. Parameters take 8 bytes with
    their gradients, what passes share of them in 16 bits, and what the optimizer keeps of them.
    """
    parameters, tokens = setup.model.parameters, len(packed.tokens)
    first, layer, last = (
        [_measure(setup, packed, part, params, half=half) for half in (False, True)]
        for part, params in (
            ("first", parameters.first),
            ("layers.0", parameters.layers[0]),
            ("last", parameters.last),
        )
    )
    layer_params = _params(parameters.layers[0])
    copied = layer[0].update_of_two - layer[0].update
    return Memory(
        budget_bytes=budget_bytes,
        bytes_per_param=8.0 + layer[0].casts / layer_params.of_share(1.0),
        optimizer_bytes_per_param=4.0 * (setup.optimizer.copies - 1),
        sharded_optimizer=setup.optimizer_replicas is not None,
        optimizer_copies=setup.optimizer_replicas or 1,
        reduce_bytes_per_param=4.0,
        layer_params=layer_params,
        first_params=_params(parameters.first),
        last_params=_params(parameters.last),
        layer_activations=_split(layer[0].kept, layer[1].kept),
        first_activations=_split(first[0].kept, first[1].kept),
        layer_pass=_split(layer[0].working, layer[1].working),
        head_pass=_split(last[0].working, last[1].working),
        layer_split=_split(layer[0].split, layer[1].split),
        head_split=_split(last[0].split, last[1].split),
        layer_split_pass=_split(layer[0].split_pass, layer[1].split_pass),
        head_split_pass=_split(last[0].split_pass, last[1].split_pass),
        update_bytes_per_param=copied / layer_params.of_share(1.0),
        update=max(
            (_update_besides(whole, half) for whole, half in (first, layer, last)),
            key=lambda amount: amount.of_share(1.0),
        ),
        boundary_bytes=4 * tokens * setup.model.width,
    )


def _params(params: tuple[Param, ...]) -> RankAmount:
    """Return the elements of parameters that are split, and of those that every rank holds."""
    sizes = {True: 0, False: 0}
    for param in params:
        sizes[param.dim is not None] += param.size * param.row_numel
    return RankAmount(split=sizes[True], whole=sizes[False])


def _split(whole: int, half: int) -> RankAmount:
    """Return the bytes that halve with the share, and those that do not."""
    split = max(0, min(whole, 2 * (whole - half)))
    return RankAmount(split=split, whole=whole - split)


def _update_besides(whole: _PartBytes, half: _PartBytes) -> RankAmount:
    """Return what an update needs, whatever the number of parameters."""
    most, of_half = (max(0, 2 * each.update - each.update_of_two) for each in (whole, half))
    return _split(most, of_half)


def _measure(
    setup: Setup, packed: Packed, part: str, params: tuple[Param, ...], *, half: bool
) -> _PartBytes:
    """Run a part twice, and measure the second pass, in which gradients exist."""
    shares = (1, 1) if half else (1,)
    ranges = {param: param.ranges(shares)[0] for param in params}
    group = AbortableProcessGroup(SimpleNamespace(device=setup.device, rank=0), (0,), None)  # type: ignore[arg-type]
    zeros = torch.zeros_like(packed.tokens, device=setup.device)  # every rank has this row
    packed = replace(packed, tokens=zeros, targets=zeros)
    with LiveTensors() as tensors, setup.attention_kernels(), setup.casting_once():
        with setup.device:
            module = setup.model.build(part, part_ranges(params, ranges), group)
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        before = tensors.live_bytes
        _run(setup, packed, part, module, tensors)
        gradients = sum(p.grad.nbytes for p in module.parameters() if p.grad is not None)
        casts = tensors.live_bytes - before - gradients if setup.compute_dtype else 0
        found = replace(_run(setup, packed, part, module, tensors), casts=casts)
        if part != "first":
            split, split_pass = _run_halves(setup, packed, part, module, tensors)
            found = replace(found, split=split, split_pass=split_pass)
        own = {param: module.get_parameter(name_in_part(param)) for param in params}
        update, of_two = (_update(setup, own, tensors, times) for times in (1, 2))
        return replace(found, update=update, update_of_two=of_two)


def _update(setup: Setup, own: dict[Param, nn.Parameter], tensors: LiveTensors, times: int) -> int:
    """Return the most that the second update of so many times these parameters needs.

    Some optimizers copy all parameters of a group at once (`foreach`), others one at a time.
    """
    optimizer = setup.optimizer.build(setup.model.parameters, own.items())
    for group in optimizer.param_groups:
        group["params"] = [*group["params"], *_like(group["params"] * (times - 1))]
    optimizer.step()
    before = tensors.live_bytes
    tensors.reset_peak()
    optimizer.step()
    return tensors.peak_bytes - before


def _like(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return zeros with gradients of zeros."""
    made = [nn.Parameter(torch.zeros_like(parameter)) for parameter in parameters]
    for parameter in made:
        parameter.grad = torch.zeros_like(parameter)
    return made


def _run(
    setup: Setup, packed: Packed, part: str, module: nn.Module, tensors: LiveTensors
) -> _PartBytes:
    before = tensors.live_bytes
    tensors.reset_peak()
    output = part_forward(setup, packed, part, module, entry_of(setup, packed))
    kept = tensors.live_bytes - before - output.nbytes
    output.backward(torch.ones_like(output))
    peak = tensors.peak_bytes - before
    return _PartBytes(kept, peak - (kept if part != "last" else 0))


def _run_halves(
    setup: Setup, packed: Packed, part: str, module: nn.Module, tensors: LiveTensors
) -> tuple[int, int]:
    """Bytes held between the halves of a backward pass, and most besides, without output and
    input's gradient."""
    before, entry = tensors.live_bytes, entry_of(setup, packed)
    output = part_forward(setup, packed, part, module, entry)
    halves = SplitBackward(entry, output)
    tensors.reset_peak()
    halves.run_input(torch.ones_like(output))
    assert entry.grad is not None
    boundaries = output.nbytes + entry.grad.nbytes
    held = tensors.live_bytes - before - boundaries
    halves.run_weights()
    return held, tensors.peak_bytes - before - boundaries - held


def entry_of(setup: Setup, packed: Packed) -> torch.Tensor:
    """Zeros as the input of a part, [T, D]."""
    entry = torch.zeros(len(packed.tokens), setup.model.width, device=setup.device)
    return entry.requires_grad_()


def part_forward(
    setup: Setup, packed: Packed, part: str, module: nn.Module, entry: torch.Tensor
) -> torch.Tensor:
    """Output of a part; the embedding takes no `entry`."""
    dtype = setup.compute_dtype
    with (
        torch.autocast(setup.device.type, dtype, enabled=dtype is not None),
        recomputing_attention(setup.recompute == "attention"),
    ):
        if part == "first":
            output: torch.Tensor = module(packed)
        elif part.startswith("layers.") and setup.recompute == "layers":
            output = recomputed(module, entry, packed)
        else:
            output = module(entry, packed)
    return output
