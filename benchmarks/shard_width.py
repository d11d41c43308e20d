"""Speed of tensor-parallel shards of any width: does half a layer more cost half as much more?

`python -m benchmarks.shard_width [--json PATH] [--device cpu|cuda] [--hidden N] [--tokens N]`

Times forward and backward of one rank's share of a decoder layer, for every number of KV groups
from one to all, and fits the scheduler's cost model `fixed + share * layer` to it. Widths that are
no power of two (3/8, 5/8, ...) are what uneven shares need.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from benchmarks._report import machine, print_table, write_json

KV_GROUPS = 8
HEADS_PER_GROUP = 2


class Shard(torch.nn.Module):
    """`groups` of the KV groups of a decoder layer, and as much of its feed-forward network."""

    def __init__(self, hidden: int, groups: int, device: str) -> None:
        super().__init__()
        self.head_dim = hidden // (KV_GROUPS * HEADS_PER_GROUP)
        self.heads, self.groups = groups * HEADS_PER_GROUP, groups
        inner = hidden * 11 // 4 * groups // KV_GROUPS

        def linear(rows: int, columns: int) -> torch.nn.Linear:
            return torch.nn.Linear(
                rows, columns, bias=False, device=device, dtype=data_type(device)
            )

        self.query = linear(hidden, self.heads * self.head_dim)
        self.key_value = linear(hidden, 2 * groups * self.head_dim)
        self.output = linear(self.heads * self.head_dim, hidden)
        self.gate_up, self.down = linear(hidden, 2 * inner), linear(inner, hidden)

    def forward(self, x: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """One layer's partial sums, without the reductions that join the shards.

        `x` has shape (tokens, hidden) and holds documents of these lengths, or one.
        """
        tokens, hidden = x.shape
        parts = [tokens] if lengths is None else list(lengths)
        normed = functional.rms_norm(x, (hidden,))
        query = self.query(normed).view(tokens, self.heads, self.head_dim).transpose(0, 1)
        key, value = self.key_value(normed).view(tokens, 2, self.groups, self.head_dim).unbind(1)
        key, value = (t.transpose(0, 1).repeat_interleave(HEADS_PER_GROUP, 0) for t in (key, value))
        split = (t.split(parts, dim=1) for t in (query, key, value))
        attended = [  # in four dimensions: torch's fused kernels take no others
            functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(0)
            for q, k, v in zip(*([t.unsqueeze(0) for t in part] for part in split), strict=True)
        ]
        mixed = torch.cat(attended, dim=1)
        x = x + self.output(mixed.transpose(0, 1).reshape(tokens, -1))
        gate, up = self.gate_up(functional.rms_norm(x, (hidden,))).chunk(2, -1)
        result: Tensor = x + self.down(functional.silu(gate) * up)
        return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", metavar="PATH")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(machine())
    widths = list(range(1, KV_GROUPS + 1))
    times = _measure(widths, options)
    fits = [_fit(widths, [t[k] for t in times]) for k in (0, 1)]
    _print(widths, times, fits)
    if options.json:
        rows = [
            {"groups": w, "forward_ms": f, "backward_ms": b}
            for w, (f, b) in zip(widths, times, strict=True)
        ]
        write_json(options.json, {"rows": rows, "fit": {"forward": fits[0], "backward": fits[1]}})


def _measure(widths: list[int], options: argparse.Namespace) -> list[tuple[float, float]]:
    """Least forward and backward milliseconds of every width, measured in turns."""
    shards = [Shard(options.hidden, width, options.device) for width in widths]
    shape = (options.tokens, options.hidden)
    x = torch.randn(
        shape, device=options.device, dtype=data_type(options.device), requires_grad=True
    )
    took: list[list[tuple[float, float]]] = [[] for _ in widths]
    for repeat in range(options.repeats + 2):
        for shard, found in zip(shards, took, strict=True):
            y, forward = _timed(partial(shard, x), options.device)
            _, backward = _timed(y.sum().backward, options.device)
            if repeat >= 2:
                found.append((forward, backward))
    return [(min(f for f, _ in found), min(b for _, b in found)) for found in took]


def _timed(work: Callable[[], Any], device: str) -> tuple[Any, float]:
    """What `work` returns, and its milliseconds: of the processor, which others may share."""
    clock = time.perf_counter if device == "cuda" else time.process_time
    begin = clock()
    result = work()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, 1e3 * (clock() - begin)


def data_type(device: str) -> torch.dtype:
    """What a device computes in."""
    return torch.bfloat16 if device == "cuda" else torch.float32


def _fit(widths: list[int], times: list[float]) -> dict[str, float]:
    """Least squares of `fixed + share * layer`, and the largest relative error of it."""
    shares = np.array(widths) / KV_GROUPS
    design = np.stack([np.ones_like(shares), shares], axis=1)
    weights = 1.0 / np.array(times)
    fixed, layer = np.linalg.lstsq(design * weights[:, None], np.ones(len(times)), rcond=None)[0]
    errors = (fixed + layer * shares) / np.array(times) - 1.0
    return {
        "fixed_ms": float(fixed),
        "layer_ms": float(layer),
        "worst_error": float(np.abs(errors).max()),
    }


def _print(
    widths: list[int], times: list[tuple[float, float]], fits: list[dict[str, float]]
) -> None:
    total = [forward + backward for forward, backward in times]
    rows = []
    for width, (forward, backward), both in zip(widths, times, total, strict=True):
        model = sum(fit["fixed_ms"] + fit["layer_ms"] * width / KV_GROUPS for fit in fits)
        linear = both / (total[-1] * width / KV_GROUPS)
        odd = "odd" if width & (width - 1) else ""
        rows.append(
            [
                f"{width}/{KV_GROUPS}",
                odd,
                f"{forward:.2f}",
                f"{backward:.2f}",
                f"{linear:.3f}",
                f"{model / both - 1.0:+.1%}",
            ]
        )
    columns = ["share", "", "forward ms", "backward ms", "over linear", "cost model"]
    print_table("One rank's share of a decoder layer", columns, rows)
    for name, fit in zip(("forward", "backward"), fits, strict=True):
        print(
            f"{name}: {fit['fixed_ms']:.2f} ms + share x {fit['layer_ms']:.2f} ms, "
            f"within {fit['worst_error']:.1%}"
        )


if __name__ == "__main__":
    main()
