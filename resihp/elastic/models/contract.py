"""What a model must tell the runtime: its parts, and how each parameter may be cut.

A model is a first part (embedding), a list of layers, and a last part (norm, head and loss). The
runtime builds the parts of a stage with the ranges of the parameters that the rank holds. A part is
an `nn.Module` whose parameter `name` belongs to the `Param` with key `"{part}.{name}"`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from resihp.layout import Parameters, Range

from ..worlds.comm import Group

Part = str
"""`"first"`, `"layers.N"` or `"last"`."""


@dataclass(frozen=True)
class Packed:
    """One microbatch: documents packed into T tokens, none attending to another.

    tokens   [T] ids
    targets  [T] ids of the next token; -100 where there is none (end of a document)
    seq_lens lengths of the documents, in order; they sum to T
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    seq_lens: tuple[int, ...]

    @property
    def sum_sq_len(self) -> int:
        """Sum of the squared lengths: what attention costs."""
        return sum(length * length for length in self.seq_lens)


class Model(Protocol):
    """A model that the runtime can lay out over ranks."""

    @property
    def parameters(self) -> Parameters:
        """Every parameter of the unsharded model."""
        ...

    @property
    def width(self) -> int:
        """Width of the activation [T, width] that crosses a stage boundary."""
        ...

    def build(self, part: Part, ranges: Mapping[str, Range], group: Group) -> nn.Module:
        """The module of one part with the given ranges (by parameter name), values unset.

        First part: `forward(packed) -> [T, width]`. Layers: `forward(hidden, packed) -> hidden`.
        Last part: `forward(hidden, packed) -> scalar sum of the token losses`.
        """
        ...

    def initial(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The initial value of an unsharded parameter; the same on every rank."""
        ...

    def flops(self, part: Part, ranges: Mapping[str, Range], packed: Packed) -> float:
        """Floating-point operations of one forward pass through such a part."""
        ...
