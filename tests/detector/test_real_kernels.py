"""Times of real kernels over documents of many lengths, recorded by `benchmarks.kernels`."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.kernels import rows_of
from detector import Detector, Predictor
from resihp.contracts import Job, Layout, Status, TelemetryBatch
from resihp.offline import read_trace

TRACE = read_trace(Path(__file__).parent / "kernels-cpu.parquet")
RECORDS = TelemetryBatch.concat(TRACE.batches())
LONGEST = 256
RANKS, EACH = 8, 4


def test_expected_times_hold_within_the_lengths_and_beyond() -> None:
    """A predictor that has seen short documents alone; tokens alone err twice as far."""
    short = RECORDS.max_len <= LONGEST
    learned = short & (RECORDS.step % 4 > 0)
    features, times, devices = rows_of(TRACE.job, RECORDS.select(learned))
    model = Predictor().fit(features, times, devices)

    def error(part: np.ndarray) -> float:
        features, times, _ = rows_of(TRACE.job, RECORDS.select(part))
        return float(np.median(np.abs(model.predict(features) / times - 1.0)))

    typical = float(np.median(times / features[:, 0]))
    by_tokens = np.abs(typical * RECORDS.tokens / RECORDS.compute_ms - 1.0)
    assert error(short & ~learned) < 0.06
    assert error(~short) < 0.15
    assert 2.0 * error(~short) < float(np.median(by_tokens[~short]))


def dealt(slow: int | None, steps: int, seed: int) -> list[TelemetryBatch]:
    """The recorded microbatches, dealt to ranks at random; `slow` takes 1.3 times as long."""
    rng = np.random.default_rng(seed)
    batches = []
    for step in range(steps):
        drawn = rng.integers(0, len(RECORDS) // 2, RANKS * EACH)
        rows = np.stack([2 * drawn, 2 * drawn + 1], axis=1).reshape(-1)
        columns = {**RECORDS.select(rows).columns()}
        rank = np.repeat(np.arange(RANKS), 2 * EACH)
        columns["rank"], columns["step"] = rank, np.full(rows.size, step)
        columns["microbatch"] = np.tile(np.repeat(np.arange(EACH), 2), RANKS)
        slower = 1.3 if step >= steps // 2 else 1.0
        columns["compute_ms"] = columns["compute_ms"] * np.where(rank == slow, slower, 1.0)
        batches.append(TelemetryBatch(**columns))
    return batches


@pytest.mark.parametrize("slow", [None, 0, 5])
@pytest.mark.parametrize("seed", range(3))
def test_only_the_slow_rank_is_named_among_long_and_short_documents(
    slow: int | None, seed: int
) -> None:
    job = Job(
        name="dealt",
        layout=Layout.grid(dp=RANKS, pp=1, tp=1, layers=1),
        microbatches=RANKS * EACH,
        model=TRACE.job.model,
        tokens_per_microbatch=TRACE.job.tokens_per_microbatch,
    )
    detector = Detector(job)
    named = set()
    for batch in dealt(slow, 60, seed):
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    assert named == ({slow} if slow is not None else set())
