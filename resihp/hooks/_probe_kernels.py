"""Kernels of probes: the same work on every rank, so that times can be compared.

With CUDA in use they run there, in the current stream, timed by events; else on the host, by torch
if the trainer has loaded it, else by numpy. No library is loaded for them. The first run warms up
and is not counted; the best of the others counts, because interruptions only make a run longer.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import perf_counter
from typing import Any

_RUNS = 5
_HOST_WIDTH = 320
_HOST_FLOATS = 1 << 20
_CUDA_WIDTH = 2048
_CUDA_FLOATS = 1 << 24
_CUDA_REPEATS = 8


def gemm_ms(budget_ms: float) -> float:
    """Measure the best time of a square matrix product, in ms."""
    torch, cuda = _torch()
    if cuda is not None:
        half = torch.ones((_CUDA_WIDTH, _CUDA_WIDTH), dtype=torch.float16, device="cuda")
        out = torch.empty_like(half)
        return _best_on_cuda(cuda, lambda: torch.mm(half, half, out=out), budget_ms)
    shape = (_HOST_WIDTH, _HOST_WIDTH)
    if torch is not None:
        one = torch.ones(shape)
        return _best(lambda: torch.mm(one, one), budget_ms)
    import numpy as np

    ones = np.ones(shape, np.float32)
    return _best(lambda: np.matmul(ones, ones), budget_ms)


def memory_ms(budget_ms: float) -> float:
    """Measure the best time of a copy within memory, in ms."""
    torch, cuda = _torch()
    if cuda is not None:
        source = torch.ones(_CUDA_FLOATS, device="cuda")
        target = torch.empty_like(source)
        return _best_on_cuda(cuda, lambda: target.copy_(source), budget_ms)
    import numpy as np

    ones = np.ones(_HOST_FLOATS, np.float32)
    copy = np.empty_like(ones)
    return _best(lambda: np.copyto(copy, ones), budget_ms)


TIMED: dict[str, Callable[[float], float]] = {"gemm": gemm_ms, "memory": memory_ms}
"""Kernels by kind of probe, for probes that one rank runs alone."""


def _torch() -> tuple[Any, Any]:
    """Return the modules torch and torch.cuda, None for those that the trainer does not use."""
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    return torch, cuda if cuda is not None and cuda.is_initialized() else None


def _best(work: Callable[[], object], budget_ms: float) -> float:
    begun = perf_counter()
    work()
    best = float("inf")
    for _ in range(_RUNS):
        start = perf_counter()
        work()
        stop = perf_counter()
        best = min(best, stop - start)
        if (stop - begun) * 1e3 > budget_ms:
            break
    return best * 1e3


def _best_on_cuda(cuda: Any, work: Callable[[], object], budget_ms: float) -> float:
    """Wait for the last event only. Raises `RuntimeError` in a stream that is being captured."""
    if cuda.is_current_stream_capturing():
        raise RuntimeError("the current stream is being captured")
    work()
    best, spent = float("inf"), 0.0
    for _ in range(_RUNS):
        start, stop = (cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_CUDA_REPEATS):
            work()
        stop.record()
        stop.synchronize()
        elapsed = float(start.elapsed_time(stop))
        best, spent = min(best, elapsed), spent + elapsed
        if spent > budget_ms:
            break
    return best
