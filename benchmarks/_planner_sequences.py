"""Predicted and simulated steps with microbatches of real documents."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from benchmarks._planner_cases import faults, job_of
from benchmarks._report import print_table
from resihp.contracts import Job
from scheduler import make_plan, model_preset, simulate

Floats = NDArray[np.float64]

SHAPE = model_preset("llama-2-70b")
BYTES_PER_TOKEN = 4
SIZES = (8192, 32768, 131072)  # tokens of a microbatch
STEPS = 24  # simulated steps per mean
KNOWN = 4000  # microbatches in the sample given to the planner


def document_tokens() -> list[int]:
    """Lengths of the Python sources of the standard library, in a fixed order."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sizes = [path.stat().st_size for path in sorted(folder.rglob("*.py"))]
    return [max(1, size // BYTES_PER_TOKEN) for size in sizes if size]


def packed(lengths: list[int], tokens: int, random: np.random.Generator) -> Iterator[float]:
    """Work of successive microbatches: documents in random order, cut at the end of each.

    FLOPs of the weights and of causal attention within each piece (`scheduler.cost_model`).
    """
    squares, left = 0, tokens
    while True:
        length = lengths[random.integers(len(lengths))]
        while length:
            piece = min(length, left)
            squares, left, length = squares + piece * piece, left - piece, length - piece
            if not left:
                yield 2.0 * tokens * SHAPE.layer_params + 2.0 * squares * SHAPE.hidden
                squares, left = 0, tokens


def print_sequences(seeds: int) -> None:
    """Print prediction errors with and without sequence lengths, by size of microbatch."""
    lengths, rows = document_tokens(), []
    for tokens in SIZES:
        random = np.random.default_rng(tokens)
        source = packed(lengths, tokens, random)
        sample = random.permutation([next(source) for _ in range(2 * KNOWN)])
        plain, fitted = _errors(job_of(256), sample / sample.mean(), random, seeds)
        spread = sample.std() / sample.mean()
        rows.append([tokens, f"{spread:.1%}", *_error_cells(plain), *_error_cells(fitted)])
    columns = ["tokens", "spread of work", "mean work alone", "worst", "with lengths", "worst"]
    title = "Microbatches of real documents: predicted over simulated steps (256 microbatches)"
    print_table(title, columns, rows)


def _error_cells(errors: list[float]) -> tuple[str, str]:
    return f"{fmean(errors):+.1%}", f"{max(errors, key=abs):+.1%}"


def _errors(
    job: Job, relative: Floats, random: np.random.Generator, seeds: int
) -> tuple[list[float], list[float]]:
    """Relative prediction errors of plans for slow and dead devices.

    First from mean work only, then with a sample of microbatches; relative to the mean of simulated
    steps of microbatches outside the sample. The caller has shuffled the packed microbatches, as a
    data loader does.
    """
    known, fresh = relative[:KNOWN], relative[KNOWN:]
    plain, fitted = [], []
    for seed in range(seeds):
        speeds = faults(256, 4, 4, seed)
        plan = make_plan(job, speeds)
        drawn = [random.choice(fresh, job.microbatches).tolist() for _ in range(STEPS)]
        times = [
            simulate(job, plan.layout, plan.quotas, speeds, d, schedule=plan.schedule).step_ms
            for d in drawn
        ]
        plain.append(plan.step_ms / fmean(times) - 1.0)
        fitted.append(make_plan(job, speeds, work=known.tolist()).step_ms / fmean(times) - 1.0)
    return plain, fitted
