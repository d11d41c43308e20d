"""Jobs whose model is not described: what lengths cost is learned, not assumed."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Layout, Op, Status, TelemetryBatch

RANKS, STEPS, ONSET = 4, 40, 20
JOB = Job(name="j", layout=Layout.grid(dp=RANKS, pp=1, tp=1, layers=1), microbatches=RANKS)


def steps(seed: int, slow: int, factor: float) -> Iterator[TelemetryBatch]:
    """Steps of one microbatch of 256 tokens, where squared lengths cost a hundred times what they
    would in a large model. Times scatter by 1.5%."""
    random = np.random.default_rng(seed)
    for step in range(STEPS):
        lengths = [random.multinomial(256, random.dirichlet(np.ones(6))) for _ in range(RANKS)]
        squares = np.array([(each**2).sum() for each in lengths])
        ms = np.concatenate([5.7 + 8e-5 * squares, 10.8 + 16e-5 * squares])
        ms *= np.exp(random.normal(0.0, 0.015, 2 * RANKS))
        if step >= ONSET and slow >= 0:
            ms[[slow, slow + RANKS]] *= factor
        twice = list(range(RANKS)) * 2
        yield TelemetryBatch(
            rank=twice,
            step=[step] * 2 * RANKS,
            microbatch=[0] * 2 * RANKS,
            chunk=[0] * 2 * RANKS,
            op=[int(Op.FORWARD)] * RANKS + [int(Op.BACKWARD)] * RANKS,
            compute_ms=ms,
            wait_ms=[0.0] * 2 * RANKS,
            tokens=[256] * 2 * RANKS,
            sequences=[6] * 2 * RANKS,
            sum_sq_len=squares[twice],
            max_len=np.array([each.max() for each in lengths])[twice],
        )


def named(stream: Iterator[TelemetryBatch]) -> dict[int, int]:
    """First step in which each rank is called slow."""
    detector, found = Detector(JOB), dict[int, int]()
    for step, batch in enumerate(stream):
        for verdict in detector.update(batch):
            if verdict.status is Status.FAIL_SLOW:
                found.setdefault(verdict.rank, step)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [1.2, 1.5])
def test_a_slow_rank_is_named_within_five_steps(seed, factor):
    slow = seed % RANKS
    found = named(steps(seed, slow, factor))
    assert set(found) == {slow}
    assert ONSET < found[slow] < ONSET + 5


@pytest.mark.parametrize("seed", range(10))
def test_no_healthy_rank_is_named(seed):
    assert not named(steps(100 + seed, -1, 1.0))
