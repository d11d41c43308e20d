"""Ordinary loops of four processes recorded by the profiler, one rank slow from the start.

The layers' work is emulated by sleeping; everything else in the files is PyTorch's own.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from resihp.contracts import Op, Status
from resihp.offline import analyze, read_trace
from resihp.testing.ordinary_loops import OrdinaryLoop, PaddedLengths, SlowRank
from resihp.testing.profiled_loops import ProfilerChoice, record_loop

RANKS, SLOW = 4, 1
PATIENCE_S = 250.0
LAYOUTS = {
    "ddp": [[[0]], [[1]], [[2]], [[3]]],
    "fsdp2": [[[0]], [[1]], [[2]], [[3]]],
    "hsdp": [[[0]], [[1]], [[2]], [[3]]],
    "tensor_parallel": [[[0, 1]], [[2, 3]]],
    "1f1b": [[[0], [2]], [[1], [3]]],
    "interleaved": [[[0], [2]], [[1], [3]]],
    "zero_bubble": [[[0], [2]], [[1], [3]]],
}
MICROBATCHES = {"ddp": 2, "fsdp2": 1, "tensor_parallel": 1, "1f1b": 4}


def record(folder, kind, factor, choice, *, steps=16, microbatches=None, seed=0):
    """Record a loop of a kind, in which one rank is slower by a factor, and read it."""
    loop = OrdinaryLoop(
        kind,
        steps=steps,
        slow=SlowRank(SLOW, factor),
        documents=PaddedLengths(seed),
        microbatches=microbatches or MICROBATCHES[kind],
        job=f"profiled-{kind}",
        ranks=RANKS,
    )
    record_loop(loop, folder, choice)
    return read_trace(folder)


def named(trace):
    return {v.rank for v in analyze(trace).verdicts if v.status is Status.FAIL_SLOW}


def check_passes(trace, kind, microbatches):
    """Every rank shows each pass of each microbatch once, in all steps."""
    replicas = trace.job.layout.replicas
    assert [[list(s.ranks) for s in r.stages] for r in replicas] == LAYOUTS[kind]
    assert trace.job.microbatches == microbatches * len(replicas)
    chunks = trace.job.chunks
    expected = [(m, c) for m in range(microbatches) for c in range(chunks)]
    for batch in trace.batches():
        for rank in range(RANKS):
            for op in (Op.FORWARD, Op.BACKWARD):
                rows = (batch.rank == rank) & (batch.op == op)
                found = np.stack([batch.microbatch[rows], batch.chunk[rows]], axis=1)
                assert sorted(map(tuple, found.tolist())) == expected
        assert (batch.op == Op.OPTIMIZER).sum() == RANKS


@pytest.mark.parametrize("kind", MICROBATCHES)
def test_the_slow_rank_is_named(tmp_path, kind):
    """On a busy machine a recording may be too short to name anybody: then it is made anew."""
    deadline, count = time.monotonic() + PATIENCE_S, 0
    found: set[int] = set()
    while found != {SLOW}:
        assert time.monotonic() < deadline
        choice = ProfilerChoice(marks_steps=kind in ("ddp", "1f1b"))
        trace = record(tmp_path / str(count), kind, 3.0, choice, seed=count)
        check_passes(trace, kind, MICROBATCHES[kind])
        found = named(trace)
        assert found <= {SLOW}
        count += 1
