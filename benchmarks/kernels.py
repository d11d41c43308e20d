"""Real kernels: what passes of a transformer over packed documents take, and what was expected.

`python -m benchmarks.kernels [--device cpu|cuda] [--record PATH] [--trace PATH] [--json PATH]`

Times forward and backward of a small decoder on microbatches packed with documents, whose lengths
are spread as those of the modules of Python's standard library, attention within each; then fits
the predictor to records of documents of up to `--longest` tokens and compares others with it, as
long and up to four times longer. `--record` keeps what was measured as a trace, `--trace` reads
such a one instead. The processor's kernels are real, but it is no accelerator.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks._detector_cases import text_lengths
from benchmarks._detector_cost import ERRORS, Rows, error_rows
from benchmarks._report import machine, print_table, write_json
from benchmarks.shard_width import KV_GROUPS, Shard, data_type
from detector.expectation.length_model import features_of
from detector.rank_table import RankTable
from resihp.contracts import Job, Layout, ModelShape, Op, TelemetryBatch
from resihp.offline import read_trace, write_trace

LAYERS, HIDDEN = 1, 512
SHORTER = 16
"""So many times shorter than the texts are the documents, that a processor may do."""


def job_of(tokens: int) -> Job:
    """One device that holds the whole decoder; `tokens` are the most of a microbatch."""
    shape = ModelShape(
        layers=LAYERS,
        hidden=HIDDEN,
        heads=2 * KV_GROUPS,
        kv_heads=KV_GROUPS,
        ffn=HIDDEN * 11 // 4,
        vocab=1,
    )
    layout = Layout.grid(dp=1, pp=1, tp=1, layers=LAYERS)
    return Job(
        name="kernels", layout=layout, microbatches=1, model=shape, tokens_per_microbatch=tokens
    )


def microbatches(
    tokens: int, longest: int, count: int, rng: np.random.Generator
) -> Iterator[list[int]]:
    """Lengths of the documents of each microbatch: drawn until the next would not fit."""
    pool = np.clip(text_lengths() // SHORTER, 16, longest)
    for _ in range(count):
        held: list[int] = []
        while sum(held) + (drawn := int(rng.choice(pool))) <= tokens:
            held.append(drawn)
        yield held or [drawn]


class Passes:
    """Times the passes of a stack of decoder layers, as a hook around them would."""

    def __init__(self, device: str) -> None:
        self._device, self._dtype = device, data_type(device)
        torch.manual_seed(0)
        self._layers = [Shard(HIDDEN, KV_GROUPS, device) for _ in range(LAYERS)]

    def timed(self, lengths: Sequence[int]) -> tuple[float, float]:
        """Milliseconds of forward and backward over documents of these lengths."""
        shape = (sum(lengths), HIDDEN)
        x = torch.randn(shape, device=self._device, dtype=self._dtype, requires_grad=True)
        begin = self._now()
        y: Tensor = x
        for layer in self._layers:
            y = layer(y, lengths)
        middle = self._now()
        y.sum().backward()
        return 1e3 * (middle - begin), 1e3 * (self._now() - middle)

    def _now(self) -> float:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def record(device: str, tokens: int, longest: int, count: int, seed: int) -> TelemetryBatch:
    """Both passes of `count` microbatches, and of a fifth as many with documents of up to `tokens`.

    Each microbatch is a step of its own.
    """
    rng = np.random.default_rng(seed)
    packed = [
        *microbatches(tokens, longest, count, rng),
        *(m for m in microbatches(tokens, tokens, 20 * count, rng) if max(m) > longest),
    ][: count + count // 5]
    passes = Passes(device)
    for lengths in packed[:5]:
        passes.timed(lengths)
    # In random order, so that what changes with time does not pass for an effect of lengths.
    order = rng.permutation(len(packed))
    took = {int(index): passes.timed(packed[index]) for index in order}
    work = np.array([[sum(m), len(m), sum(n * n for n in m), max(m)] for m in packed])
    tokens_, sequences, squares, longests = np.repeat(work, 2, axis=0).T
    return TelemetryBatch(
        rank=np.zeros(2 * len(packed), np.int32),
        step=np.repeat(np.arange(len(packed)), 2),
        microbatch=np.zeros(2 * len(packed), np.int32),
        op=np.tile([int(Op.FORWARD), int(Op.BACKWARD)], len(packed)),
        compute_ms=np.array([took[index] for index in range(len(packed))]).reshape(-1),
        tokens=tokens_,
        sequences=sequences,
        sum_sq_len=squares,
        max_len=longests,
    )


def rows_of(job: Job, batch: TelemetryBatch) -> Rows:
    """Features, times and devices of records, all of one device."""
    places = RankTable.of(job.layout)
    index = np.zeros(len(batch), np.int64)
    return features_of(places, batch, index), batch.compute_ms, index


def main() -> None:
    """Measure or read, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--tokens", type=int, default=1024, help="of a microbatch, at most")
    parser.add_argument("--longest", type=int, default=256, help="document to learn from")
    parser.add_argument("--microbatches", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", metavar="PATH")
    parser.add_argument("--trace", metavar="PATH")
    parser.add_argument("--json", metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(machine())
    if options.trace:
        trace = read_trace(Path(options.trace))
        job, batch = trace.job, TelemetryBatch.concat(trace.batches())
    else:
        job = job_of(options.tokens)
        batch = record(
            options.device, options.tokens, options.longest, options.microbatches, options.seed
        )
    if options.record:
        write_trace(options.record, job, [batch])
    learned = (batch.max_len <= options.longest) & (batch.step % 4 > 0)
    within = (batch.max_len <= options.longest) & ~learned
    beyond = batch.max_len > options.longest
    rows = error_rows(*(rows_of(job, batch.select(part)) for part in (learned, within, beyond)))
    print_table(f"{learned.sum():,} records to learn from", ERRORS, rows)
    if options.json:
        write_json(options.json, {"rows": rows})


if __name__ == "__main__":
    main()
