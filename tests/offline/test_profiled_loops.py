"""Ordinary loops of four processes recorded by the profiler, with a slow rank.

The layers' work is emulated by sleeping; everything else in the files is PyTorch's own.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from resihp.contracts import Op, Status
from resihp.offline import analyze, read_trace
from resihp.testing.ordinary_loops import (
    LAYERS,
    TOKENS,
    OrdinaryLoop,
    PaddedLengths,
    SlowRank,
    forward_ms,
)
from resihp.testing.profiled_loops import SKIPPED_STEPS, ProfilerChoice, record_loop

RANKS, SLOW = 4, 1
PATIENCE_S = 1200.0
LAYOUTS = {
    "ddp": [[[0]], [[1]], [[2]], [[3]]],
    "fsdp2": [[[0]], [[1]], [[2]], [[3]]],
    "hsdp": [[[0]], [[1]], [[2]], [[3]]],
    "tensor_parallel": [[[0, 1]], [[2, 3]]],
    "1f1b": [[[0], [2]], [[1], [3]]],
    "interleaved": [[[0], [2]], [[1], [3]]],
    "zero_bubble": [[[0], [2]], [[1], [3]]],
}


def loop_of(kind, *, steps, slow, pace=1.0, microbatches=None, seed=0):
    is_staged = len(LAYOUTS[kind][0]) > 1  # stages take tensors of one shape only
    count = 4 if is_staged else 2 if kind == "ddp" else 1
    return OrdinaryLoop(
        kind,
        steps=steps,
        slow=slow,
        documents=PaddedLengths(seed, least=TOKENS - 1 if is_staged else TOKENS // 2),
        microbatches=microbatches or count,
        job=f"profiled-{kind}",
        ranks=RANKS,
        pace=pace,
    )


def place(kind, rank):
    """Replica of a rank, and whether it has a stage of a pipeline."""
    (dp,) = (d for d, replica in enumerate(LAYOUTS[kind]) for s in replica if rank in s)
    return dp, len(LAYOUTS[kind][0]) > 1


def check_records(trace, loop, first_step):
    """Every rank shows each pass of each microbatch once, and no pass took less time than its
    emulated work, so that none of that counts as waiting."""
    replicas = trace.job.layout.replicas
    assert [[list(s.ranks) for s in r.stages] for r in replicas] == LAYOUTS[loop.kind]
    assert trace.job.microbatches == loop.microbatches * len(replicas)
    chunks = trace.job.chunks
    assert chunks == (2 if loop.kind in ("interleaved", "zero_bubble") else 1)
    assert len(trace.steps) == loop.steps - SKIPPED_STEPS
    passes = [(m, c) for m in range(loop.microbatches) for c in range(chunks)]
    for batch in trace.batches():
        step = int(batch.step[0]) - trace.steps[0] + first_step
        assert np.count_nonzero(batch.op == Op.OPTIMIZER) == RANKS
        for rank in range(RANKS):
            replica, is_staged = place(loop.kind, rank)
            slow = loop.slow.factor if rank == loop.slow.rank and step >= loop.slow.since else 1.0
            for op, times in ((Op.FORWARD, 1.0), (Op.BACKWARD, 2.0)):
                rows = np.flatnonzero((batch.rank == rank) & (batch.op == op))
                rows = rows[np.lexsort((batch.chunk[rows], batch.microbatch[rows]))]
                found = np.stack([batch.microbatch[rows], batch.chunk[rows]], axis=1)
                assert [tuple(each) for each in found.tolist()] == passes
                assert np.isfinite(batch.wait_ms[rows]).all()
                for row, (microbatch, _) in zip(rows, passes, strict=True):
                    lengths = loop.documents.lengths(replica, step, microbatch)
                    work_ms = loop.pace * forward_ms(lengths) * times * slow * LAYERS / chunks
                    assert batch.compute_ms[row] >= work_ms
                    assert is_staged or batch.tokens[row] == sum(lengths)


def named(trace):
    return {v.rank for v in analyze(trace).verdicts if v.status is Status.FAIL_SLOW}


@pytest.mark.parametrize(
    ("kind", "marks_steps"),
    [("ddp", True), ("fsdp2", False), ("tensor_parallel", True), ("zero_bubble", False)],
)
def test_passes_are_found(tmp_path, kind, marks_steps):
    loop = loop_of(kind, steps=SKIPPED_STEPS + 3, slow=SlowRank(SLOW, 1.5))
    record_loop(loop, tmp_path, ProfilerChoice(marks_steps=marks_steps))
    check_records(read_trace(tmp_path), loop, SKIPPED_STEPS)


@pytest.mark.parametrize("shapes", [True, False])
def test_passes_in_turn_are_found(tmp_path, shapes):
    loop = loop_of("1f1b", steps=SKIPPED_STEPS + 3, slow=SlowRank(SLOW, 1.5))
    record_loop(loop, tmp_path, ProfilerChoice(shapes=shapes))
    trace = read_trace(tmp_path)
    check_records(trace, loop, SKIPPED_STEPS)
    assert set(trace.records["tokens"][trace.records["op"] <= Op.BACKWARD] >= 0) == {shapes}


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [1.0, 1.5])
@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_slow_rank_is_named(tmp_path, kind, factor, seed):
    """Nobody else ever is. On a busy machine a recording may be too short: then it is made anew.

    Where all stages have two replicas only, the rank is slow from the middle on: there one that
    always was stays inconclusive.
    """
    since = 14 if len(LAYOUTS[kind]) < RANKS else 0
    pace = 16.0 if kind == "tensor_parallel" else 4.0  # DTensor has the host compute for 50 ms
    slow = SlowRank(SLOW if factor > 1.0 else -1, factor, since=since)
    deadline, count, found = time.monotonic() + PATIENCE_S, 0, set[int]()
    while found != {slow.rank} - {-1} or not count:
        assert time.monotonic() < deadline
        loop = loop_of(kind, steps=since + 18, slow=slow, pace=pace, seed=100 * seed + count)
        record_loop(loop, tmp_path / str(count))
        trace = read_trace(tmp_path / str(count))
        check_records(trace, loop, SKIPPED_STEPS)
        found = named(trace)
        assert found <= {slow.rank}
        count += 1
