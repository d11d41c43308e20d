"""Profiler files of ordinary loops on a CUDA device, with a slow rank.

Recorded by `benchmarks._gpu_loops` on an H200 (torch 2.11, NCCL 2.28.9): four ranks side by side on
the device, rank 1 of them 1.5 times as slow as the others, by kernels that only wait. Five steps
are kept, and of each event what names, times and shapes it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from resihp.contracts import Op, Status
from resihp.offline import analyze, read_trace

FILES = Path(__file__).parent / "h200"
SLOW, FACTOR = 1, 1.5
LAYOUTS = {
    "ddp": [[[0]], [[1]], [[2]], [[3]]],
    "fsdp2": [[[0]], [[1]], [[2]], [[3]]],
    "tensor_parallel": [[[0, 1]], [[2, 3]]],
    "1f1b": [[[0], [2]], [[1], [3]]],
}


@pytest.fixture(scope="module", params=LAYOUTS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_slow_rank_is_named(kind: str) -> None:
    result = analyze(read_trace(FILES / kind))
    slow = {v.rank: v.slowdown for v in result.verdicts if v.status is Status.FAIL_SLOW}
    assert list(slow) == [SLOW]
    assert slow[SLOW] == pytest.approx(FACTOR, abs=0.1)
    assert result.diagnosis.detail[0].startswith(f"Rank {SLOW} ")


def test_the_layout_is_that_of_the_process_groups(kind: str) -> None:
    layout = read_trace(FILES / kind).job.layout
    assert [[list(s.ranks) for s in r.stages] for r in layout.replicas] == LAYOUTS[kind]


def test_waiting_for_the_slow_rank_is_no_work_of_its_peers(kind: str) -> None:
    """Counted as work, it would make all ranks of a synchronous job equally slow."""
    trace = read_trace(FILES / kind)
    own = dict.fromkeys(range(4), 0.0)
    for batch in trace.batches():
        passes = np.isin(batch.op, [Op.FORWARD, Op.BACKWARD])
        for rank in own:
            own[rank] += float(batch.compute_ms[passes & (batch.rank == rank)].sum())
    assert own.pop(SLOW) > 1.25 * max(own.values())
