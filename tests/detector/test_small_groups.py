"""Without lengths, and with two stages of two ranks: one slow witness must not blame the others."""

import itertools

import numpy as np
import pytest

from detector import Detector
from resihp.contracts import Job, Layout, ModelShape, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, steps_of

MODEL = ModelShape(layers=8, hidden=1024, heads=16, kv_heads=16, ffn=4096, vocab=1000)
LENGTHS = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1.2, 3000)), 16, 8192).astype(int)


@pytest.mark.parametrize("factor", [1.1, 1.3, 2.0])
@pytest.mark.parametrize("from_step", [0, 12])
@pytest.mark.parametrize("replicas", [1, 2])
def test_only_the_slow_rank_is_named(replicas: int, from_step: int, factor: float) -> None:
    layout = Layout.grid(dp=replicas, pp=2, tp=2, layers=8)
    job = Job(name="job", layout=layout, microbatches=8 * replicas)
    slow = layout.replicas[0].stages[1].ranks[1]
    detector, named = Detector(job), set()
    faults = (Fault(rank=slow, factor=factor, from_step=from_step),)
    for batch in steps_of(job, LENGTHS, steps=25, seed=1, faults=faults, with_lengths=False):
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    # With one replica and no healthy past, one of two may be slow as well as the other fast.
    assert named == ({slow} if replicas > 1 or from_step else set())


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_the_healthy_one_of_a_pair_is_not_named_for_the_other(stages: int) -> None:
    """Once the slow one is in doubt, the level of the pair is learned from the healthy one alone;
    that must not make it look slower than in its first steps."""
    layout = Layout.grid(dp=2, pp=stages, tp=1, layers=16)
    job = Job(name="job", layout=layout, microbatches=16)
    slow = layout.replicas[1].stages[1].ranks[0]
    detector, named = Detector(job), set()
    faults = (Fault(rank=slow, factor=1.6, from_step=0),)
    for batch in steps_of(job, LENGTHS, steps=20, seed=1, faults=faults):
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    assert named <= {slow}


@pytest.mark.parametrize("shape", [(1, 1, 4), (1, 2, 3), (1, 2, 4), (1, 4, 8)])
def test_a_group_without_other_peers_is_not_taken_for_a_common_change(
    shape: tuple[int, int, int],
) -> None:
    """Every timer of a tensor-parallel group lasts as long as the slowest; that one waits least."""
    dp, pp, tp = shape
    layout, slow = Layout.grid(dp=dp, pp=pp, tp=tp, layers=8), 1
    job = Job(name="job", layout=layout, microbatches=4, model=MODEL)
    places = list(layout.places())
    rng, detector, named = np.random.default_rng(0), Detector(job), set()
    for step in range(60):
        rows = []
        for microbatch, (op, stage) in itertools.product(
            range(4), itertools.product((0, 1), range(pp))
        ):
            tokens = 500 + 700 * microbatch
            ranks = [place.rank for place in places if place.pp == stage]
            own = tokens * 1e-3 * (1 + op) * np.exp(rng.normal(0, 0.005, tp))
            own *= np.where((np.array(ranks) == slow) & (step >= 30), 2.0, 1.0)
            rows += [
                (r, microbatch, op, own.max(), own.max() - o, tokens)
                for r, o in zip(ranks, own, strict=True)
            ]
        rank, microbatches, ops, compute, wait, counts = map(np.array, zip(*rows, strict=True))
        batch = TelemetryBatch(
            rank=rank,
            step=np.full(len(rank), step),
            microbatch=microbatches,
            op=ops,
            compute_ms=compute,
            wait_ms=wait,
            tokens=counts,
            sequences=np.ones(len(rank), int),
            sum_sq_len=counts**2,
            max_len=counts,
        )
        named |= {v.rank for v in detector.update(batch) if v.status is Status.FAIL_SLOW}
    assert named == {slow}
