"""Expected times of recorded steps beside what they took, and the cost of the expectation."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from benchmarks._detector_cases import trace_path
from benchmarks._detector_cost import large_step
from detector import Detector
from detector.rank_table import RankTable
from detector.step_time import PipelineTime, StepExpectation
from resihp.contracts import Job, Layout
from resihp.offline import Trace, read_trace
from service.worker.step_times import StepTime, StepTimes

ERRORS = ("job", "steps", "expected: median", "90%", "mean of the last 8: median", "90% ")
COSTS = ("ranks", "records", "slow ranks", "ms a step")
_LAST = 8


def error_rows(demos: list[Path]) -> list[list[str]]:
    """Relative error on every recorded job that is here, beside the mean of the last steps."""
    jobs = [(name, path) for name in ("SE", "ST") if (path := trace_path(name)) is not None]
    folder = Path(__file__).parents[1] / "tests" / "detector" / "ordinary_loops"
    rows = [_error_row(name, _of_operations(read_trace(path))) for name, path in jobs]
    if demos:
        rows.append(_error_row("demo", *(_of_records(read_trace(path)) for path in demos)))
    kinds = sorted({path.name.split("ms-")[0] for path in folder.glob("*.parquet")})
    for kind in kinds:
        found = (_of_records(read_trace(path)) for path in sorted(folder.glob(f"{kind}ms-*")))
        rows.append(_error_row(f"loop {kind} ms", *found))
    return rows


def _error_row(name: str, *jobs: Iterator[StepExpectation]) -> list[str]:
    """Of the steps of all jobs of which something was expected."""
    errors, naive = list[float](), list[float]()
    for job in jobs:
        past = list[float]()
        for step in job:
            if step.expected_ms is not None and past:
                errors.append(abs(step.expected_ms / step.measured_ms - 1.0))
                naive.append(abs(float(np.mean(past[-_LAST:])) / step.measured_ms - 1.0))
            past.append(step.measured_ms)
    if not errors:
        return [name, "0", *["–"] * 4]
    cells = [f"{np.quantile(own, q):.2%}" for own in (errors, naive) for q in (0.5, 0.9)]
    return [name, str(len(errors)), *cells]


def _of_operations(trace: Trace) -> Iterator[StepExpectation]:
    """The steps of a trace of operations, which took from their first start to their last end."""
    grid, detector = trace.recording, Detector(trace.job)
    took = np.nanmax(grid.start_s + grid.duration_s, axis=(0, 1)) * 1e3
    measured = dict(zip(grid.steps.tolist(), took.tolist(), strict=True))
    for batch in trace.batches():
        detector.update(batch)
        step = int(batch.step[0])
        yield detector.step_time(step, measured[step])


def _of_records(trace: Trace) -> Iterator[StepExpectation]:
    """The steps of a recording of ResiHP, measured as the sidecar does."""
    detector, times = Detector(trace.job), StepTimes(trace.job.layout.ranks)
    plans = {plan.version: plan for plan in trace.plans}

    def told(closed: list[StepTime]) -> Iterator[StepExpectation]:
        return (detector.step_time(step.step, step.observed_ms) for step in closed)

    for batch in trace.batches():
        plan = plans.get(batch.plan_version)
        if plan is not None and plan.version > detector.plan_version:
            yield from told(times.move(plan.layout.ranks))
            detector.apply_plan(plan)
        detector.update(batch)
        if batch.plan_version == detector.plan_version:
            yield from told(times.add(batch))


def cost_rows(repeats: int = 20) -> list[list[str]]:
    """Median time of one expectation of a job of 1,024 ranks, its graph made before."""
    layout = Layout.grid(dp=8, pp=16, tp=8, layers=32)
    job = Job(name="large", layout=layout, microbatches=256)
    step = large_step(job, 0, with_lengths=True)
    pipelines, rows = PipelineTime(job, RankTable.of(layout)), list[list[str]]()
    cases: list[dict[int, float]] = [{}, {5: 1.5}]
    for slow in cases:
        pipelines.ms(step, step.compute_ms, slow)
        spent = []
        for _ in range(repeats):
            start = time.perf_counter()
            pipelines.ms(step, step.compute_ms, slow)
            spent.append(time.perf_counter() - start)
        rows.append(["1,024", f"{len(step):,}", str(len(slow)), f"{np.median(spent) * 1e3:.1f}"])
    return rows
