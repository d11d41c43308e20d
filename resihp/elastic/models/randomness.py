"""Random numbers that do not depend on the layout: a function of what they are for, not of a state.

A mask is that of the unsharded tensor, of which a rank computes its window only. Nothing of it has
to move when the layout changes, and nothing to be stored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from resihp.layout import Range

from .contract import Packed

_LOW = 0xFFFFFFFF


def stream_key(*what_for: int | str) -> int:
    """A key for `random_bits`, from anything that tells streams apart (seed, step, place, ...)."""
    digest = hashlib.blake2b(repr(what_for).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True) | 1


def random_bits(
    key: int, shape: Sequence[int], window: Sequence[Range], device: torch.device | None = None
) -> torch.Tensor:
    """32 random bits for every element in `window` of a tensor of `shape`, as int64.

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
    """Dropout whose mask is keyed by (seed, step, microbatch, place).

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

        `item` tells tensors of one place and microbatch apart, such as those of its documents.
        """
        if self.rate == 0.0:
            return x
        shape = shape or x.shape
        window = window or [(0, size) for size in shape]
        key = stream_key(self.seed, packed.step, packed.index, self.place, item)
        bits = random_bits(key, shape, window, x.device)
        keep = bits >= round(self.rate * 2**32)
        return x * keep.to(x.dtype).div_(1.0 - self.rate)
