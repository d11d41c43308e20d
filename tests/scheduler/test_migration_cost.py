"""What a change of layout moves, and what real sequences do to a prediction."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import Job, Layout, Memory, ModelShape
from resihp.layout import Param, Parameters, least_numel
from scheduler import make_plan, simulate
from scheduler.migration import migration_ms, received_bytes

SHAPE = ModelShape(layers=8, hidden=64, heads=8, kv_heads=8, ffn=128, vocab=512)


def a_job(dp=2, pp=2, tp=2):
    return Job(
        name="test",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=8, units=8),
        microbatches=8 * dp,
        model=SHAPE,
        memory=Memory(bytes_per_param=8.0, optimizer_bytes_per_param=8.0),
    )


@settings(deadline=None, max_examples=60)
@given(
    slow=st.dictionaries(st.integers(0, 7), st.sampled_from([0.0, 0.2, 0.5, 0.8]), max_size=4),
)
def test_bytes_are_those_of_the_least_moves(slow):
    """The same as the algebra of layouts counts, parameter by parameter."""
    job = a_job()
    new = make_plan(job, slow).layout
    rows = SHAPE.kv_heads
    layers = tuple(
        (Param(f"layers.{i}", (rows, SHAPE.layer_params), 0),) for i in range(SHAPE.layers)
    )
    ends = [(Param(name, (rows, SHAPE.embedding_params), 0),) for name in ("embedding", "head")]
    numel = least_numel(job.layout, new, Parameters(layers, *ends)) / rows
    received = received_bytes(job, job.layout, new)
    assert sum(received.values()) == pytest.approx(numel * 12.0)
    assert (migration_ms(job, job.layout, new) > 0.0) == bool(received)


@pytest.mark.parametrize("spread", [0.5, 1.0, 1.5])
def test_packed_documents_keep_to_the_prediction(spread):
    """Documents of log-normal lengths packed into the token budget: within 5%."""
    shape = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=32, ffn=11008, vocab=32000)
    job = Job(
        name="test",
        layout=Layout.grid(dp=4, pp=4, tp=2, layers=32, units=32),
        microbatches=64,
        model=shape,
        tokens_per_microbatch=8192,
        device="H100",
    )
    speeds = {3: 0.5, 9: 0.0}
    plan = make_plan(job, speeds)
    random = np.random.default_rng(0)
    work = [[packed_work(random, spread, shape, 8192) for _ in range(q)] for q in plan.quotas]
    mean = np.mean([item for row in work for item in row])
    relative = [[item / mean for item in row] for row in work]
    played = simulate(job, plan.layout, plan.quotas, speeds, relative)
    assert played.step_ms == pytest.approx(plan.step_ms, rel=0.05)
    assert played.step_ms >= plan.step_ms * 0.98


def packed_work(random, spread, shape, tokens):
    squares, left = 0, tokens
    while left:
        length = min(left, int(random.lognormal(6.5, spread)) + 1)
        squares, left = squares + length * length, left - length
    return 2.0 * tokens * shape.layer_params + 2.0 * squares * shape.hidden
