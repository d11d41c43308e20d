"""Interface of models: parts, and how each parameter may be sharded.

A model is a first part (embedding), a list of layers, and a last part (norm, head and loss). The
runtime builds the parts of a stage with the ranges of the parameters that the rank holds. A part is
an `nn.Module`; the `Param` with key `"{part}.{name}"` is its parameter `name`. A tied
parameter belongs to the first and the last part: both build it under the same name, and the runtime
keeps the copies equal.

Parameters are float32; under `Setup.compute_dtype` torch's autocast gives the operators lower
precision. Other state that a module keeps between microbatches would be lost in a
change of layout: parts have no buffers. Random numbers come from `random_bits`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from resihp.contracts import ContractError
from resihp.layout import Param, Parameters, Range

from ..process_groups.abortable import AbortableProcessGroup

Part = str
"""`"first"`, `"layers.N"` or `"last"`."""


@dataclass(frozen=True)
class Packed:
    """Microbatch: documents packed into T tokens; attention stays within a document.

    tokens   [T] ids, at least one
    targets  [T] ids of the next token; -100 where there is none (end of a document)
    seq_lens lengths of the documents, in order; they sum to T
    step, index  set by the runtime

    Raises `ContractError` where these do not fit together.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    seq_lens: tuple[int, ...]
    step: int = 0
    index: int = 0

    def __post_init__(self) -> None:
        if self.tokens.dim() != 1 or self.targets.shape != self.tokens.shape:
            shapes = f"{list(self.tokens.shape)} and {list(self.targets.shape)}"
            raise ContractError("tokens", f"tokens and targets must be [T] both, not {shapes}")
        if not len(self.tokens):
            raise ContractError("tokens", "a microbatch needs at least one; its target may be -100")
        if sum(self.seq_lens) != len(self.tokens) or min(self.seq_lens, default=0) < 1:
            raise ContractError(
                "seq_lens", f"must be 1 or more each and sum to {len(self.tokens)} tokens"
            )
        object.__setattr__(self, "seq_lens", tuple(self.seq_lens))  # a key of caches

    def to(self, device: torch.device) -> Packed:
        """Return the microbatch with its tensors on `device`; itself if they are there."""
        if self.tokens.device == self.targets.device == device:
            return self
        return replace(
            self, tokens=on_device(self.tokens, device), targets=on_device(self.targets, device)
        )

    @property
    def sum_sq_len(self) -> int:
        """Sum of the squared lengths, to which the cost of attention is proportional."""
        return sum(length * length for length in self.seq_lens)


class Model(Protocol):
    """Model that the runtime can shard over ranks."""

    @property
    def parameters(self) -> Parameters:
        """All parameters of the unsharded model."""
        ...

    @property
    def width(self) -> int:
        """Width of the activation [T, width] that crosses a stage boundary."""
        ...

    def build(
        self, part: Part, ranges: Mapping[str, Range], group: AbortableProcessGroup
    ) -> nn.Module:
        """Build the module of one part with the given ranges (by parameter name), values unset.

        First part: `forward(packed) -> [T, width]`. Layers: `forward(hidden, packed) -> hidden`.
        Last part: `forward(hidden, packed) -> scalar sum of the token losses`.
        """
        ...

    def initial(self, param: Param, rows: Range) -> torch.Tensor:
        """Return rows of a parameter's initial value, along its dimension that is split.

        The value is equal on every rank. All rows of a parameter that is not split.
        """
        ...

    def flops(self, part: Part, ranges: Mapping[str, Range], packed: Packed) -> float:
        """Return the floating-point operations of one forward pass through a part."""
        ...


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on `device`; the host does not wait for its copy to CUDA."""
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
