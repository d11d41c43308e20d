"""Common part of the architectures: equal layers between an embedding and a head."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from itertools import accumulate
from typing import Protocol, cast

import torch
from torch import nn
from torch.backends import cuda
from torch.nn import functional

from resihp.contracts import ModelShape
from resihp.layout import Param, Range

from .base import Packed, Part, on_device

Entry = tuple[str, tuple[int, ...], int | None, int]
"""Name within the layer, unsharded shape, dimension that is split, unit."""


class PretrainedValues(Protocol):
    """Values of parameters that begin as another training ended."""

    def initial(self, param: Param, rows: Range) -> torch.Tensor:
        """Return these rows of a parameter, float32."""
        ...


class Decoder:
    """Decoder of a `ModelShape`; matrices of a layer begin with "w", biases with "b".

    pretrained  gives the initial values; None: they are random
    """

    def __init__(self, shape: ModelShape, *, seed: int = 0) -> None:
        self.shape, self.seed, self.width = shape, seed, shape.hidden
        self.pretrained: PretrainedValues | None = None

    def layers(self, entries: tuple[Entry, ...]) -> tuple[tuple[Param, ...], ...]:
        """Parameters of all layers."""
        return tuple(
            tuple(
                Param(f"layers.{i}.{name}", shape, dim, unit) for name, shape, dim, unit in entries
            )
            for i in range(self.shape.layers)
        )

    def initial(self, param: Param, rows: Range) -> torch.Tensor:
        """Return pretrained values, or ones for norms, zeros for biases, else normal ones.

        Their deviation is 0.02, and 0.02 / sqrt(2 L) for the matrices into the residual, as in
        GPT-2.
        """
        if self.pretrained is not None:
            return self.pretrained.initial(param, rows)
        return self._random(param).narrow(param.dim or 0, rows[0], width(rows))

    def flops(self, part: Part, ranges: Mapping[str, Range], packed: Packed) -> float:
        """Return 2 per weight and token, plus causal attention over each document."""
        tokens, hidden = len(packed.tokens), self.shape.hidden
        if part == "first":
            return 0.0
        if part == "last":
            return 2.0 * tokens * hidden * width(ranges["table"])
        attention = 2.0 * self.attended(part, packed) * width(ranges["wq"])
        return 2.0 * tokens * hidden * self.columns(ranges) + attention

    def attended(self, part: Part, packed: Packed) -> int:
        """Return the sum over tokens of the tokens that each attends to in a layer, twice."""
        return packed.sum_sq_len

    def columns(self, ranges: Mapping[str, Range]) -> float:
        """Return the columns of matrices that each token passes on this rank."""
        return sum(width(span) for name, span in ranges.items() if name.startswith("w"))

    def _random(self, param: Param) -> torch.Tensor:
        name = param.key.rsplit(".", 1)[1]
        if "norm" in name:
            return torch.ones(param.shape, device="cpu")
        if name.startswith("b"):
            return torch.zeros(param.shape, device="cpu")
        into_residual = name in {"wo", "w_out", "w_down"}
        scale = 0.02 / (2 * self.shape.layers) ** 0.5 if into_residual else 0.02
        return normal(param.key, param.shape, seed=self.seed, scale=scale)


def attend(
    q_TNH: torch.Tensor,
    k_TKH: torch.Tensor,
    v_TKH: torch.Tensor,
    seq_lens: tuple[int, ...],
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Attention of N query heads over K key/value heads, [T, N, H]; N is a multiple of K.

    A token attends to itself and what precedes it in its document, at most `window` tokens. All
    documents at once where torch has a kernel for that, else one after the other.
    """
    packed = _packed_attention() if len(seq_lens) > 1 and _takes_packed(q_TNH) else None
    if packed is not None:
        ends, longest = _ends(seq_lens, q_TNH.device), max(seq_lens)
        is_grouped, before = q_TNH.shape[1] != k_TKH.shape[1], -1 if window is None else window - 1
        return packed(
            *(q_TNH, k_TKH, v_TKH, ends, ends, longest, longest),
            window_size=(before, 0),
            enable_gqa=is_grouped,
        )
    per_document = [
        _attend_in_document(*(x.transpose(0, 1).unsqueeze(0) for x in qkv), window=window)
        for qkv in zip(
            q_TNH.split(seq_lens), k_TKH.split(seq_lens), v_TKH.split(seq_lens), strict=True
        )
    ]
    out_TNH = [out_1NLH.squeeze(0).transpose(0, 1) for out_1NLH in per_document]
    return out_TNH[0] if len(out_TNH) == 1 else torch.cat(out_TNH)


@cache
def _packed_attention() -> Callable[..., torch.Tensor] | None:
    """Return torch's attention over packed documents, if it knows windows and grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    known = inspect.signature(varlen_attn).parameters
    is_known = known.keys() >= {"window_size", "enable_gqa"}
    return cast(Callable[..., torch.Tensor], varlen_attn) if is_known else None


def _takes_packed(q_TNH: torch.Tensor) -> bool:
    """True if flash attention, which alone takes packed documents, is there for these heads.

    It is disabled where attention is to repeat its bits.
    """
    if q_TNH.device.type != "cuda" or q_TNH.dtype not in (torch.bfloat16, torch.float16):
        return False
    heads, head_dim = q_TNH.shape[1:]
    is_there = cuda.flash_sdp_enabled() and cuda.is_flash_attention_available()
    is_new = torch.cuda.get_device_capability(q_TNH.device) >= (8, 0)
    return is_there and is_new and heads > 0 and head_dim % 8 == 0 and head_dim <= 256


@lru_cache(maxsize=16)  # as tables of rotary positions
def _ends(seq_lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return where documents begin and end among the tokens, [documents + 1], int32."""
    ends = torch.tensor([0, *accumulate(seq_lens)], dtype=torch.int32, device="cpu")
    return on_device(ends, device)


def _attend_in_document(
    q_1NLH: torch.Tensor, k_1KLH: torch.Tensor, v_1KLH: torch.Tensor, *, window: int | None
) -> torch.Tensor:
    """Attention in one document, [1, N, L, H]: torch's fused kernels, whose memory is linear in
    the length, take four dimensions only."""
    heads, length = q_1NLH.shape[1:3]
    is_grouped, is_masked = heads != k_1KLH.shape[1], window is not None and length > window
    if is_grouped and not _takes_grouped_heads(q_1NLH, is_masked=is_masked):
        each, is_grouped = heads // k_1KLH.shape[1], False
        k_1KLH, v_1KLH = (x.repeat_interleave(each, 1) for x in (k_1KLH, v_1KLH))
    if window is None or not is_masked:
        return functional.scaled_dot_product_attention(
            q_1NLH, k_1KLH, v_1KLH, is_causal=True, enable_gqa=is_grouped
        )
    blocks = []  # of as many queries as the window is wide: memory is linear in the length
    for start in range(0, length, window):
        stop, first = min(start + window, length), max(0, start - window + 1)
        queries = torch.arange(start, stop, device=q_1NLH.device).unsqueeze(1)
        behind = queries - torch.arange(first, stop, device=q_1NLH.device)
        blocks.append(
            functional.scaled_dot_product_attention(
                q_1NLH[:, :, start:stop],
                k_1KLH[:, :, first:stop],
                v_1KLH[:, :, first:stop],
                attn_mask=(behind >= 0) & (behind < window),
                enable_gqa=is_grouped,
            )
        )
    return torch.cat(blocks, dim=2)


def _takes_grouped_heads(q_1NLH: torch.Tensor, *, is_masked: bool) -> bool:
    """True if a fused kernel takes fewer key heads than query heads here.

    On accelerators flash attention alone does; it takes no mask, and 16 bits only.
    """
    kind = q_1NLH.device.type
    if kind == "cpu":
        return True
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else q_1NLH.dtype
    return not is_masked and dtype in (torch.bfloat16, torch.float16)


def attended_pairs(seq_lens: tuple[int, ...], window: int | None) -> int:
    """Return twice the pairs of tokens in causal attention: the squared length without a window."""
    return sum(
        length * length if window is None or length <= window else window * (2 * length - window)
        for length in seq_lens
    )


def empty(*shape: int) -> nn.Parameter:
    """Create a parameter with values unset."""
    return nn.Parameter(torch.empty(shape, device="cpu"))


def width(span: Range) -> int:
    """Return the number of rows or columns in a range."""
    return span[1] - span[0]


def normal(key: str, shape: tuple[int, ...], *, seed: int, scale: float) -> torch.Tensor:
    """Return normal values with deviation `scale`: a function of seed and key."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{key}".encode()))
    return torch.randn(shape, generator=generator, device="cpu") * scale


def positions(seq_lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return the position [T] of each token in its document."""
    return torch.cat([torch.arange(length, device=device) for length in seq_lens])
