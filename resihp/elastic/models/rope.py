"""Rotary positions and their variants for documents longer than those of the pretraining.

Each variant is a frozen dataclass; apart from `theta` its fields have the names that Hugging Face's
configuration files give them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch

from resihp.contracts import ContractError

from .base import on_device
from .compilation import compilable


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions (Su et al., RoFormer, arXiv 2104.09864, eq. 34).

    theta  base of the wavelengths
    """

    theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.theta <= 1.0:
            raise ContractError("rope_theta", f"must be above 1, not {self.theta}")

    def frequencies(self, head_dim: int, length: int) -> torch.Tensor:
        """Return the angle [head_dim / 2] by which a position turns, in a document of `length`."""
        return _frequencies(self.theta, head_dim)

    @property
    def scale(self) -> float:
        """Factor on queries and keys."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class LinearRope(Rope):
    """Positions divided by `factor` (Chen et al., Position Interpolation, arXiv 2306.15595)."""

    factor: float

    def frequencies(self, head_dim: int, length: int) -> torch.Tensor:
        """Return the angles, all divided by `factor`."""
        return super().frequencies(head_dim, length) / self.factor


@dataclass(frozen=True, kw_only=True)
class DynamicRope(Rope):
    """NTK-aware scaling by the length of the document, from `max_position_embeddings` on."""

    factor: float
    max_position_embeddings: int

    def frequencies(self, head_dim: int, length: int) -> torch.Tensor:
        """Return the angles for a base that grows with the document."""
        stretch = max(length, self.max_position_embeddings) / self.max_position_embeddings
        growth = self.factor * stretch - (self.factor - 1.0)
        return _frequencies(self.theta * growth ** (head_dim / (head_dim - 2)), head_dim)


@dataclass(frozen=True, kw_only=True)
class Llama3Rope(Rope):
    """Scaling of Llama 3.1: low frequencies divided by `factor`, high ones kept, a ramp between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def frequencies(self, head_dim: int, length: int) -> torch.Tensor:
        """Return the angles, scaled by how often each turns in the original context."""
        kept = super().frequencies(head_dim, length)
        turns = self.original_max_position_embeddings * kept / (2.0 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
        return (1.0 - share) * kept / self.factor + share * kept


@dataclass(frozen=True, kw_only=True)
class YarnRope(Rope):
    """YaRN (Peng et al., arXiv 2309.00071): a ramp between kept and divided frequencies.

    attention_factor  on queries and keys; None: sqrt(1/t) of eq. 22, or with both `mscale` and
                      `mscale_all_dim` their ratio
    beta_fast, beta_slow  turns in the original context at which the ramp ends and begins
    truncate          ends of the ramp are whole dimensions
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def frequencies(self, head_dim: int, length: int) -> torch.Tensor:
        """Return the angles; those that turn often in the original context are kept."""
        kept = super().frequencies(head_dim, length)
        first, last = (
            self._dimension(self.beta_fast, head_dim),
            self._dimension(self.beta_slow, head_dim),
        )
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        last += 0.001 * (first == last)
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - first) / (
            last - first
        )
        divided = ramp.clamp(0.0, 1.0)
        return kept / self.factor * divided + kept * (1.0 - divided)

    @property
    def scale(self) -> float:
        """Factor on queries and keys."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)
        return self._magnitude(1.0)

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1.0 else 1.0

    def _dimension(self, turns: float, head_dim: int) -> float:
        """Return the dimension that turns so often in the original context (eq. 17 solved)."""
        wavelength = self.original_max_position_embeddings / (turns * 2.0 * math.pi)
        return head_dim * math.log(wavelength) / (2.0 * math.log(self.theta))


@compilable
def rotate(x_TNH: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn each half-vector pair by its angle; the second half holds the partners of the first."""
    left, right = x_TNH.chunk(2, dim=-1)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1).to(x_TNH.dtype)


@lru_cache(maxsize=16)  # more microbatches than that are seldom under way
def rotary(
    rope: Rope, seq_lens: tuple[int, ...], head_dim: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scaled cosine and sine [T, 1, H/2]; positions restart with each document.

    Lengths and frequencies of all documents cross to the device in one copy.
    """
    lengths = torch.tensor(seq_lens, device="cpu").unsqueeze(1)
    frequencies = torch.stack([_cached_frequencies(rope, head_dim, n) for n in seq_lens])
    documents = on_device(torch.cat((lengths, frequencies), dim=1), device)
    lengths, frequencies = documents[:, 0].long(), documents[:, 1:]
    tokens = sum(seq_lens)
    document = torch.repeat_interleave(lengths, output_size=tokens)  # else the host waits for it
    starts = lengths.cumsum(dim=0) - lengths
    positions = torch.arange(tokens, device=device) - starts[document]
    angles = (positions.unsqueeze(1) * frequencies[document]).unsqueeze(1)
    return angles.cos() * rope.scale, angles.sin() * rope.scale


@lru_cache(maxsize=1024)
def _cached_frequencies(rope: Rope, head_dim: int, length: int) -> torch.Tensor:
    return rope.frequencies(head_dim, length)


def _frequencies(theta: float, head_dim: int) -> torch.Tensor:
    return 1.0 / theta ** (
        torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    )
