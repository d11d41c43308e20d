"""Numbers in contracts: those of numpy become plain, fractions are no counts."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from fractions import Fraction

import numpy as np
import pytest

from resihp.contracts import (
    Advice,
    Cause,
    ContractError,
    Diagnosis,
    FaultRate,
    Heartbeat,
    Job,
    LayerCost,
    Layout,
    Links,
    LinkVerdict,
    Memory,
    ModelShape,
    Plan,
    Protection,
    RankAmount,
    Replica,
    Schedule,
    SensorSample,
    Stage,
    Status,
    TelemetryBatch,
    TrainingPosition,
    Verdict,
    even_quotas,
    from_json,
    to_json,
)

MODEL = ModelShape(layers=4, hidden=64, heads=4, kv_heads=2, ffn=128, vocab=100)
MEMORY = Memory(
    budget_bytes=1000, activation_bytes_per_layer=10, layer_params=RankAmount(split=4.0, whole=1.0)
)
CHUNKED = Layout.grid(dp=2, pp=2, tp=2, layers=4, units=2, chunks=2)
JOB = Job(
    name="j",
    layout=CHUNKED,
    microbatches=8,
    quotas=(5, 3),
    model=MODEL,
    tokens_per_microbatch=512,
    schedule=Schedule.INTERLEAVED,
    chunks=2,
    max_in_flight=4,
    cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
    memory=MEMORY,
    links=Links(ranks_per_node=4, latency_ms=0.25),
    protection=Protection(faults=FaultRate(100.0, 2, 5.0), interval_s=9.0, cost_s=0.5),
)
CONTRACTS = [
    JOB,
    Replica(Layout.grid(dp=1, pp=2, tp=1, layers=2).replicas[0].stages, in_flight=(2, 1)),
    Plan(version=3, layout=CHUNKED, quotas=(5, 3), from_step=7, step_ms=11.0, bound_ms=10.0),
    Verdict(
        rank=1, status=Status.FAIL_SLOW, slowdown=1.5, since_step=4, interval=(1.25, 2.0), step=9
    ),
    LinkVerdict(rank=0, peer=1, status=Status.FAIL_SLOW, group=(0, 1), since_step=4, since_s=2.5),
    Diagnosis(slowdown=1.5, root_cause=Cause.DEVICE, attribution={Cause.DEVICE: 0.5}, steps=8),
    Heartbeat(
        ranks=(0, 1),
        sequence=3,
        step=0,
        position=TrainingPosition(step=4, microbatch=1, passes=2, for_s=0.5),
        sensors=SensorSample(seconds=5.0, busy=0.5),
    ),
    Advice(ranks=(5,), others=(4,), nodes=(1,), step_ms=150.0, without_ms=120.0, replaced_ms=100.0),
]


def with_numpy(value: object) -> object:
    """The same value with numpy's numbers in place of all plain ones."""
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        return replace(value, **{name: with_numpy(item) for name, item in held.items()})
    if isinstance(value, tuple):
        return tuple(map(with_numpy, value))
    if isinstance(value, dict):
        return {key: with_numpy(item) for key, item in value.items()}
    return {int: np.int64, float: np.float32}.get(type(value), lambda same: same)(value)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda contract: type(contract).__name__)
def test_numbers_of_numpy_become_plain_ones(contract):
    same = with_numpy(contract)
    assert json.loads(json.dumps(to_json(same))) == json.loads(json.dumps(to_json(contract)))
    assert same == contract
    assert from_json(type(contract), with_numpy(to_json(contract))) == contract


def test_a_layout_of_numpys_numbers_is_the_same():
    sizes = np.array([2, 2, 2, 4, 2, 2])
    names = ("dp", "pp", "tp", "layers", "units", "chunks")
    assert json.dumps(to_json(Layout.grid(**dict(zip(names, sizes, strict=True))))) == json.dumps(
        to_json(CHUNKED)
    )
    assert json.dumps(even_quotas(np.int64(7), np.int64(2))) == "[4, 3]"


STAGES = Layout.grid(dp=1, pp=2, tp=1, layers=2).replicas[0].stages
FLAT = Layout.grid(dp=2, pp=1, tp=1, layers=2)


@pytest.mark.parametrize("wrong", [1.5, 4.0, np.float64(4.0), Fraction(3, 2), "4", True, None])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda value: Stage((value,), (0, 4)), "ranks"),
        (lambda value: Stage((0,), (0, value)), "layers"),
        (lambda value: Stage((0,), (0, 4), (value,)), "shares"),
        (lambda value: Stage((0,), (0, 1), (), ((1, value),)), "more_layers"),
        (lambda value: Replica(STAGES, in_flight=(value, 1)), "in_flight"),
        (lambda value: Layout.grid(dp=value, pp=1, tp=1, layers=4), "dp, pp, tp"),
        (lambda value: Layout.grid(dp=1, pp=1, tp=1, layers=value), "layers"),
        (lambda value: Plan(version=0, layout=FLAT, quotas=(value, 2)), "quotas"),
        (lambda value: Plan(version=value, layout=FLAT, quotas=(2, 2)), "version"),
        (lambda value: replace(JOB, quotas=(value, 4)), "quotas"),
        (lambda value: replace(JOB, microbatches=value), "microbatches"),
        (lambda value: replace(JOB, chunks=value), "chunks"),
        (lambda value: replace(MODEL, ffn=value), "ffn"),
        (lambda value: Links(ranks_per_node=value), "ranks_per_node"),
        (lambda value: FaultRate(1.0, value), "faults"),
        (lambda value: Verdict(rank=value, status=Status.HEALTHY), "rank"),
        (lambda value: LinkVerdict(rank=0, peer=value, status=Status.HEALTHY), "peer"),
        (lambda value: Heartbeat(ranks=(value,)), "ranks"),
        (lambda value: TrainingPosition(step=value), "step"),
        (lambda value: replace(TelemetryBatch.empty(), dropped=value), "dropped"),
        (lambda value: even_quotas(value, 2), "microbatches"),
    ],
)
def test_a_count_is_a_whole_number(make, field, wrong):
    with pytest.raises(ContractError, match="must be a whole number") as caught:
        make(wrong)
    assert caught.value.field == field


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 10**400, "4", True, 1j])
@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda value: RankAmount(split=value), "split"),
        (lambda value: Links(latency_ms=value), "latency_ms"),
        (FaultRate, "prior_mtbf_s"),
        (lambda value: Protection(interval_s=value), "interval_s"),
        (lambda value: Verdict(rank=0, status=Status.HEALTHY, confidence=value), "confidence"),
        (lambda value: Plan(version=0, layout=FLAT, quotas=(2, 2), step_ms=value), "step_ms"),
        (lambda value: SensorSample(seconds=1.0, busy=value), "busy"),
    ],
)
def test_a_measure_is_a_finite_number(make, field, wrong):
    with pytest.raises(ContractError, match="must be a number, finite") as caught:
        make(wrong)
    assert caught.value.field == field


@pytest.mark.parametrize("layers", [(0,), (0, 1, 2)])
def test_a_range_has_two_ends(layers):
    with pytest.raises(ContractError, match="layers: must be a half-open range"):
        Stage((0,), layers)


@pytest.mark.parametrize(
    ("make", "field", "least", "most"),
    [
        (lambda ms: LayerCost(forward_ms=ms, backward_ms=1.0), "forward_ms", 1e-29, 1e15),
        (lambda ms: LayerCost(forward_ms=1.0, backward_ms=1.0, head_ms=ms), "head_ms", 0.0, 1e15),
        (lambda rate: Links(intra_gbytes_per_s=rate), "intra_gbytes_per_s", 1e-6, 1e300),
        (lambda rate: Links(inter_gbytes_per_s=rate), "inter_gbytes_per_s", 1e-6, 1e300),
        (lambda ms: Links(latency_ms=ms), "latency_ms", 0.0, 1e15),
        (lambda s: Protection(interval_s=s), "interval_s", 0.0, 1e15),
    ],
)
def test_times_and_bandwidths_are_such_that_plans_can_be_made_of_them(make, field, least, most):
    make(least), make(most)
    for beyond in (-1.0, 1e-320 if least else 1e290, 1.1 * most * 1e15):
        with pytest.raises(ContractError, match="must be a number, finite") as caught:
            make(beyond)
        assert caught.value.field == field


def test_the_message_names_both_bounds():
    with pytest.raises(ContractError, match=r"finite, 0 or more and at most 1e\+15, not 1e\+16"):
        Links(latency_ms=1e16)


@pytest.mark.parametrize("field", ["step_ms", "without_ms", "replaced_ms"])
@pytest.mark.parametrize("wrong", [0.0, -1.0])
def test_advice_is_of_steps_that_take_time(field, wrong):
    given_ = {"step_ms": 5.0, "without_ms": 4.0, "replaced_ms": 3.0, field: wrong}
    with pytest.raises(ContractError, match="above 0") as caught:
        Advice(ranks=(1,), **given_)
    assert caught.value.field == field
