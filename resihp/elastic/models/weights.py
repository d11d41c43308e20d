"""Small helpers of all models: widths of shards, and initial values that every rank agrees on."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from resihp.layout import Range


def empty(*shape: int) -> nn.Parameter:
    """A parameter whose values are still to come."""
    return nn.Parameter(torch.empty(shape))


def width(span: Range) -> int:
    """Rows or columns in a range."""
    return span[1] - span[0]


def normal(key: str, shape: tuple[int, ...], *, seed: int, scale: float) -> torch.Tensor:
    """Normal values with deviation `scale`; a function of seed and key alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(shape, generator=generator) * scale


def positions(seq_lens: tuple[int, ...]) -> torch.Tensor:
    """[T] position of each token in its document."""
    return torch.cat([torch.arange(length) for length in seq_lens])
