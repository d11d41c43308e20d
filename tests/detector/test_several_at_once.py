"""Most devices of a stage that become slow at once: their own past speaks for all of them."""

from collections.abc import Iterable

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from detector.residuals import common_change
from resihp.contracts import Job, Layout, ModelShape, Status
from resihp.testing.scenarios import Fault, steps_of

LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)
MODEL = ModelShape(layers=16, hidden=1024, heads=16, kv_heads=8, ffn=4096, vocab=32000)
Shape = tuple[int, int, int]


def outcome(
    shape: Shape, ranks: Iterable[int], factor: float, with_lengths: bool
) -> tuple[set[int], dict[int, str]]:
    """Ranks that were ever named, and the words on those inconclusive in the end."""
    dp, pp, tp = shape
    job = Job(
        name="job",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=16),
        microbatches=dp * 4,
        model=MODEL,
        tokens_per_microbatch=8192,
    )
    faults = [Fault(rank=rank, factor=factor, from_step=12) for rank in ranks]
    stream = steps_of(job, LENGTHS, steps=24, seed=1, faults=faults, with_lengths=with_lengths)
    detector = Detector(job, settings=DetectorSettings(train=False))
    named = {
        verdict.rank
        for batch in stream
        for verdict in detector.update(batch)
        if verdict.status is Status.FAIL_SLOW
    }
    verdicts = detector.verdicts()
    unclear = {v.rank: v.evidence[-1] for v in verdicts if v.status is Status.INCONCLUSIVE}
    return named, unclear


@pytest.mark.parametrize("factor", [1.1, 1.5])
@pytest.mark.parametrize(
    ("shape", "slow", "with_lengths"),
    [
        ((4, 4, 1), {4, 5, 6}, False),
        ((3, 4, 1), {3, 4}, False),
        ((4, 2, 1), {4, 5, 6}, False),
        ((4, 2, 1), {4, 5}, False),
        ((4, 2, 1), {4, 5, 6}, True),
        ((4, 1, 1), {0, 1, 2}, True),
    ],
)
def test_all_of_them_are_named_and_nobody_else(
    shape: Shape, slow: set[int], with_lengths: bool, factor: float
) -> None:
    assert outcome(shape, slow, factor, with_lengths) == (slow, {})


@pytest.mark.parametrize("shape", [(3, 4, 1), (3, 2, 1), (4, 4, 1)])
def test_whole_replicas_may_have_more_work(shape: Shape) -> None:
    slow = {r for r in range(shape[0] * shape[1]) if r % shape[0] != shape[0] - 1}
    named, unclear = outcome(shape, slow, 1.8, with_lengths=False)
    assert named == set()
    assert set(unclear) == slow
    assert all("whole replica" in words for words in unclear.values())


def test_what_befalls_all_peers_is_no_matter_of_theirs() -> None:
    change, classes = np.array([0.1, 0.1, 0.1, 0.1, 0.0]), np.array([0, 0, 0, 0, 1])
    trusted, past, noise = np.ones(5, bool), np.full(5, 9.0), np.full(5, 0.01)
    assert common_change(change, classes, trusted, past, noise)[:4].tolist() == [0.1] * 4
    change[3] = 0.0
    assert common_change(change, classes, trusted, past, noise)[:4].tolist() == [0.0] * 4
