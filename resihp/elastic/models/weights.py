"""Helpers of all models: shard widths, and initial values that are equal on every rank."""

from __future__ import annotations

import zlib

import torch
from torch import nn

from resihp.layout import Range


def empty(*shape: int) -> nn.Parameter:
    """Create a parameter with values unset."""
    return nn.Parameter(torch.empty(shape))


def width(span: Range) -> int:
    """Return the number of rows or columns in a range."""
    return span[1] - span[0]


def normal(key: str, shape: tuple[int, ...], *, seed: int, scale: float) -> torch.Tensor:
    """Return normal values with deviation `scale`: a function of seed and key."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(shape, generator=generator) * scale


def positions(seq_lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the position [T] of each token in its document."""
    return torch.cat([torch.arange(length, device=device) for length in seq_lens])
