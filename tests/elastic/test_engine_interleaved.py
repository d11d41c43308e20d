"""Stages that hold several model chunks train like any other, and change into any other layout."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import ContractError, Job, Layout, Op, Plan, Replica, Schedule, Stage
from resihp.elastic.state.phases import Phase
from resihp.elastic.step import Setup
from resihp.elastic.step.schedule import check_schedule
from resihp.layout import moves
from resihp.pipeline.orders import stage_order
from scheduler import make_plan
from tests.elastic.engine_job import ALONE, GRID, Case, Fault, plan, run
from tests.elastic.test_models import MODELS, OPTIMIZER, SHAPE, batch
from tests.elastic.threads import Run, train

STEPS, MICROBATCHES = 3, 5
CHUNKED = Layout.grid(dp=1, pp=2, tp=1, layers=4, chunks=2)
LAYOUTS = {
    "two by two": CHUNKED,
    "uneven": Layout(
        (
            Replica(
                (
                    Stage((0, 1), (0, 1), (1, 3), ((2, 2),)),
                    Stage((2,), (1, 2), (4,), ((2, 4),)),
                )
            ),
            Replica((Stage((3,), (0, 3), (4,)), Stage((4,), (3, 4), (4,)))),
        )
    ),
    "three chunks": Layout(
        (
            Replica(
                (
                    Stage((0,), (0, 1), (4,), ((2, 3), (3, 3))),
                    Stage((1, 2), (1, 2), (1, 1), ((3, 3), (3, 4))),
                )
            ),
        )
    ),
}


def interleaved(layout: Layout) -> Plan:
    """Five microbatches, the first replica with most of them."""
    rest = (1,) * (layout.dp - 1)
    quotas = (MICROBATCHES - len(rest), *rest)
    return Plan(version=0, layout=layout, quotas=quotas, schedule=Schedule.INTERLEAVED)


@pytest.fixture(scope="module")
def references() -> dict[str, Run]:
    """Each model trained on one rank."""
    alone = Plan(version=0, layout=ALONE, quotas=(MICROBATCHES,))
    return {n: train(Setup(MODELS[n], OPTIMIZER, batch), alone, STEPS) for n in ("llama", "gpt2")}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_every_interleaved_layout_trains_alike(
    model: str, layout: Layout, references: dict[str, Run]
) -> None:
    found = train(Setup(MODELS[model], OPTIMIZER, batch), interleaved(layout), STEPS)
    assert found.losses == pytest.approx(references[model].losses, abs=2e-5)
    assert found.norms == pytest.approx(references[model].norms, rel=1e-4)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_schedule_changes_no_bit(deterministic: bool) -> None:
    """Each parameter adds up the same microbatches in the same order under either."""
    setup = Setup(MODELS["llama"], OPTIMIZER, batch, deterministic=deterministic)
    flat = Layout.grid(dp=1, pp=2, tp=1, layers=SHAPE.layers)
    usual = train(setup, Plan(version=0, layout=flat, quotas=(MICROBATCHES,)), STEPS)
    found = train(setup, interleaved(CHUNKED), STEPS)
    assert found.losses == usual.losses
    expected = usual.state
    for param, tensors in found.state.items():
        assert all(map(torch.equal, tensors, expected[param])), param.key


@given(stages=st.integers(2, 5), chunks=st.integers(2, 4), microbatches=st.integers(0, 12))
def test_each_link_is_read_in_the_order_in_which_it_is_written(
    stages: int, chunks: int, microbatches: int
) -> None:
    """Otherwise a rank would take one microbatch's activation for another's."""
    orders = [
        stage_order(
            Schedule.INTERLEAVED,
            stage=stage,
            stages=stages,
            chunks=chunks,
            microbatches=microbatches,
        )
        for stage in range(stages)
    ]
    for op, step in ((Op.FORWARD, 1), (Op.BACKWARD, -1)):
        for stage in range(stages):
            reader = (stage + step) % stages
            wraps = not 0 <= stage + step < stages
            written = [(p.microbatch, p.chunk + step * wraps) for p in orders[stage] if p.op is op]
            read = [(p.microbatch, p.chunk) for p in orders[reader] if p.op is op]
            ends = range(chunks)
            assert [w for w in written if w[1] in ends] == [
                r for r in read if not wraps or r[1] != (0 if step == 1 else chunks - 1)
            ]


def test_live_changes_between_interleaved_and_other_layouts(tmp_path: Path) -> None:
    """And a loss while interleaved: the replica that is whole goes on, the step is completed."""
    steps = 9
    chunked = Layout.grid(dp=2, pp=2, tp=2, layers=4, units=4, chunks=2)
    plans = (
        replace(plan(1, chunked, from_step=1), schedule=Schedule.INTERLEAVED),
        plan(2, GRID, from_step=3),
        replace(plan(3, chunked, quotas=(2, 4), from_step=5), schedule=Schedule.INTERLEAVED),
    )
    case = Case(GRID, steps, plans, faults=(Fault(7, Phase.ACCUMULATING, 7),))
    alone, outcome = run(Case(ALONE, steps), tmp_path / "alone"), run(case, tmp_path / "job")
    assert {rank for rank, code in outcome.exit_codes.items() if code != 0} == {7}, outcome.logs
    assert {1, 2, 3} < {s["version"] for s in outcome.switches}, outcome.logs
    for step in range(steps):
        assert outcome.losses[step] == pytest.approx(alone.losses[step], abs=2e-5), outcome.logs
    for generation in range(len(plans)):
        after = outcome.full_state(f"after{generation + 1}")
        for key, tensors in outcome.full_state(f"before{generation}").items():
            assert all(map(torch.equal, tensors, after[key])), f"{key} changed in {generation + 1}"


def test_the_scheduler_plans_an_interleaved_job_into_a_layout_that_runs() -> None:
    """Also where a replica is left with one stage, of one chunk beside interleaved ones."""
    job = Job(
        name="chunked",
        layout=Layout.grid(dp=2, pp=2, tp=1, layers=SHAPE.layers, chunks=2),
        microbatches=MICROBATCHES,
        model=SHAPE,
        schedule=Schedule.INTERLEAVED,
        chunks=2,
    )
    for speeds in ({1: 0.5}, {2: 0.0}):
        planned = make_plan(job, speeds, job.layout, version=1)
        check_schedule(planned)
        assert planned.schedule is Schedule.INTERLEAVED
        assert moves(job.layout, planned.layout, MODELS["llama"].parameters, lost=[2])


def test_a_plan_whose_schedule_does_not_fit_its_layout_is_refused() -> None:
    flat = Plan(version=0, layout=ALONE, quotas=(MICROBATCHES,), schedule=Schedule.INTERLEAVED)
    chunked = replace(interleaved(CHUNKED), schedule=Schedule.ONE_F_ONE_B)
    setup = Setup(MODELS["llama"], OPTIMIZER, batch)
    with pytest.raises(ContractError, match="interleaved needs several model chunks"):
        train(setup, flat, 1)
    with pytest.raises(ContractError, match="runs one model chunk"):
        train(setup, chunked, 1)
