"""Random numbers independent of the layout: a function of a key, without state.

A rank computes its window of the mask of the unsharded tensor. Nothing is stored or moved when the
layout changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from resihp.layout import Range

from .base import Packed

_LOW = 0xFFFFFFFF


def stream_key(*what_for: int | str) -> int:
    """Return a key for `random_bits` from values that name a stream (seed, step, place, ...)."""
    digest = hashlib.blake2b(repr(what_for).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) | 1


def random_bits(
    key: int, shape: Sequence[int], window: Sequence[Range], device: torch.device | None = None
) -> torch.Tensor:
    """Return 32 random bits for every element in `window` of a tensor of `shape`, as int64.

    Squares (Widynski, arXiv 2004.06278): four rounds of squaring of the element's index, each
    element by itself, so that any window can be computed anywhere.
    """
    x = torch.zeros((), dtype=torch.int64, device=device)
    stride = 1
    for axis in reversed(range(len(shape))):
        along = torch.arange(*window[axis], device=device) * stride
        x = x + along.view(-1, *[1] * (len(shape) - 1 - axis))
        stride *= shape[axis]
    x = x * key
    y, z = x.clone(), x + key
    for add in (y, z, y):
        x.mul_(x).add_(add)
        low = x.bitwise_left_shift(32)
        x.bitwise_right_shift_(32).bitwise_and_(_LOW).bitwise_or_(low)
    return x.mul_(x).add_(z).bitwise_right_shift_(32).bitwise_and_(_LOW)


class Dropout:
    """Dropout with a mask keyed by (seed, step, microbatch, place).

    place  names the layer and the spot in it, e.g. "layers.3.attention"
    """

    def __init__(self, rate: float, seed: int, place: str) -> None:
        self.rate, self.seed, self.place = rate, seed, place

    def __call__(
        self,
        x: torch.Tensor,
        packed: Packed,
        shape: Sequence[int] | None = None,
        window: Sequence[Range] | None = None,
        *,
        item: int = 0,
    ) -> torch.Tensor:
        """Drop from `x`, which is the `window` of a tensor of `shape` (default: the whole of it).

        `item` distinguishes tensors of one place and microbatch, such as those of its documents.
        """
        if self.rate == 0.0:
            return x
        shape = shape or x.shape
        window = window or [(0, size) for size in shape]
        key = stream_key(self.seed, packed.step, packed.index, self.place, item)
        bits = random_bits(key, shape, window, x.device)
        keep = bits >= round(self.rate * 2**32)
        return x * keep.to(x.dtype).div_(1.0 - self.rate)
