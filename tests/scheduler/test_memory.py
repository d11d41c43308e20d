"""Layers that fit are those whose peak is within the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Job, Layout, Memory, ModelShape, RankAmount, Stage
from scheduler import simulate
from scheduler.memory import MemoryFootprint

SHAPE = ModelShape(layers=4, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=100)
BYTES = st.integers(0, 1000)
AMOUNT = st.builds(RankAmount, split=BYTES, whole=BYTES)
MEMORY = st.builds(
    Memory,
    budget_bytes=st.integers(1, 60_000),
    bytes_per_param=st.just(2.0),
    optimizer_bytes_per_param=st.just(3.0),
    layer_params=st.builds(RankAmount, split=st.integers(1, 300), whole=BYTES),
    first_params=AMOUNT,
    last_params=AMOUNT,
    layer_activations=AMOUNT,
    first_activations=AMOUNT,
    layer_pass=AMOUNT,
    head_pass=AMOUNT,
    layer_split=AMOUNT,
    head_split=AMOUNT,
    boundary_bytes=BYTES,
    reduce_bytes_per_param=st.floats(0.0, 4.0),
    update_bytes_per_param=st.floats(0.0, 4.0),
    update=AMOUNT,
)


def job_of(memory: Memory, *, recompute: bool = False) -> Job:
    return Job(
        name="memory",
        layout=Layout.grid(dp=2, pp=2, tp=2, layers=4, units=4),
        microbatches=8,
        model=SHAPE,
        tokens_per_microbatch=32,
        memory=memory,
        recompute=recompute,
    )


@given(
    MEMORY,
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=4
    ),
    st.integers(1, 2),
)
def test_one_layer_more_would_not_fit(
    memory: Memory, stages: list[tuple[int, int, int]], replicas: int
) -> None:
    """Of every stage: (units of its widest share out of 4, microbatches in flight, and how many of
    them at most are between the halves of their backward pass)."""
    footprint = MemoryFootprint.of(job_of(memory), replicas)
    units_of, in_flight_of, split_of = zip(*stages, strict=True)
    split_of = tuple(map(min, split_of, in_flight_of))
    counts = np.array([in_flight_of]), np.array([split_of])
    most = footprint.most_layers(np.array([units_of]) / 4, *counts)[0]
    rows = zip(units_of, in_flight_of, split_of, most.tolist(), strict=True)
    for index, (units, in_flight, split, layers) in enumerate(rows):
        ends = {"first": index == 0, "last": index + 1 == len(stages)}
        shares = (units, 4 - units) if units < 4 else (4,)
        fitting, beyond = (
            footprint.stage_bytes(
                Stage(tuple(range(len(shares))), (0, count), shares),
                **ends,
                in_flight=in_flight,
                split=split,
            )[0]
            for count in (layers, layers + 1)
        )
        assert memory.budget_bytes is not None
        tiny = 1e-6 * memory.budget_bytes
        assert not layers or fitting <= memory.budget_bytes + tiny
        assert beyond > memory.budget_bytes - tiny


def test_recomputation_is_an_input() -> None:
    """Where nothing is measured, 2 bytes per token and hidden unit are kept in place of 34."""
    kept, again = (
        simulate(job, job.layout, job.quotas).peak_bytes
        for job in (job_of(Memory()), job_of(Memory(), recompute=True))
    )
    layout = job_of(Memory()).layout
    for rank, bytes_kept in kept.items():
        place = layout.place_of(rank)
        assert place is not None
        layers, in_flight, share = 2, 2 - place.pp, 1 / 2
        saved = (34 - 2) * 32 * SHAPE.hidden * layers * in_flight * share
        assert bytes_kept - again[rank] == saved


def test_a_tied_table_counts_once_where_one_stage_holds_both_ends() -> None:
    shape = ModelShape(
        layers=4, hidden=64, heads=4, kv_heads=4, ffn=128, vocab=100, tied_embeddings=True
    )
    for stages, due in ((1, 1), (2, 2)):
        layout = Layout.grid(dp=1, pp=stages, tp=1, layers=4, units=4)
        job = Job(name="tied", layout=layout, microbatches=1, model=shape, memory=Memory())
        total = sum(simulate(job, layout, job.quotas).peak_bytes.values())
        assert total == 16 * (4 * shape.layer_params + due * shape.embedding_params)


@pytest.mark.parametrize(("budget", "layers"), [(1000, True), (999, False)])
def test_layers_of_no_bytes_fit_where_the_ends_take_the_whole_budget(budget, layers) -> None:
    ends = Memory(
        budget_bytes=budget,
        bytes_per_param=1.0,
        optimizer_bytes_per_param=0.0,
        activation_bytes_per_layer=0,
        layer_params=RankAmount(),
        first_params=RankAmount(split=1000.0),
        last_params=RankAmount(split=1000.0),
    )
    footprint, one = MemoryFootprint.of(job_of(ends), 1), np.ones((1, 2), np.int64)
    most = footprint.most_layers(np.ones((1, 2)), one, 0 * one)[0]
    assert (most >= 4).tolist() == [layers] * 2
    held = footprint.stage_bytes(Stage((0,), (0, 4)), first=True, last=False, in_flight=1)
    assert (held[0] <= budget) == layers
