"""`observe` on the engines of DeepSpeed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from resihp.contracts import Op

from .conftest import InProcessSidecar, Run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

RECORDS = [
    record
    for step in range(3)
    for record in (
        *((step, index, op) for index in range(2) for op in (Op.FORWARD, Op.BACKWARD)),
        (step, -1, Op.OPTIMIZER),
    )
]


@pytest.mark.parametrize("zero", ["1", "3"])  # reductions after the passes, and in them
def test_a_slow_rank_is_named(run: Run, zero: str, tmp_path: Path) -> None:
    training = run("deepspeed_engine.py", "--slow-rank", "1", "--zero", zero)
    training.assert_named(1)
    assert training.output.count("ResiHP: rank 1 fail_slow") == 1
    assert "resihp/verdict: rank 1 fail_slow" in training.output
    (slowdown,) = tmp_path.rglob("resihp_slowdown_max.csv")
    assert slowdown.read_text().startswith("step,slowdown_max\n")


def test_a_slow_rank_of_a_pipeline_is_named(run: Run) -> None:
    training = run("deepspeed_pipeline.py", "--slow-rank", "2", ranks=4)
    training.assert_named(2)
    assert training.output.count("ResiHP: rank 2 fail_slow") == 1


@pytest.fixture
def engine_of(world: Any, tmp_path: Path) -> Callable[..., Any]:
    """Function that makes an engine for a module, or a pipeline of one stage."""
    import torch

    def make(model: Any, **config: Any) -> Any:
        given = {
            "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2,
            "csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "csv"},
            "zero_allow_untested_optimizer": True, **config,
        }  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = world.initialize(model=model, optimizer=optimizer, config=given)
        return engine

    return make


def train(engine: Any, steps: int) -> None:
    """Train on random numbers, and evaluate between the steps."""
    import torch

    for _ in range(2 * steps):
        engine.backward(engine(torch.randn(2, 3, 4)).square().mean())
        engine.step()
        with torch.no_grad():
            engine(torch.randn(2, 3, 4))


def pairs() -> Iterator[Any]:
    import torch

    while True:
        yield torch.randn(2, 4), torch.randn(2, 4)


def pipeline(world: Any) -> Any:
    import torch

    return world.pipe.PipelineModule(
        [torch.nn.Linear(4, 4)], num_stages=1, loss_fn=torch.nn.MSELoss()
    )


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_microbatches_are_recorded_and_evaluation_is_not(
    engine_of: Callable[..., Any], sidecar: InProcessSidecar, stage: int
) -> None:
    import torch

    from resihp.integrations.deepspeed import observe

    engine = engine_of(torch.nn.Linear(4, 4), zero_optimization={"stage": stage})
    observer = observe(engine, client=sidecar, job="own", heartbeat_s=0.0)
    train(engine, 3)
    observer.close()
    assert sidecar.passes() == RECORDS
    assert [(job.name, job.microbatches) for job in sidecar.jobs] == [("own", 2)]
    assert observer.monitor.stats.failures == 0
    assert "step" not in vars(engine)
    assert engine._compiled_call_impl is None


def test_steps_are_counted_from_the_engines(
    engine_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    import torch

    from resihp.integrations.deepspeed import observe

    engine = engine_of(torch.nn.Linear(4, 4))
    train(engine, 1)
    observer = observe(engine, client=sidecar, heartbeat_s=0.0)
    train(engine, 2)
    observer.close()
    assert sidecar.passes() == [record for record in RECORDS if record[0] >= 1]


def test_microbatches_of_a_pipeline_are_recorded(
    world: Any, engine_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.deepspeed import observe

    engine = engine_of(pipeline(world))
    data = pairs()
    observer = observe(engine, client=sidecar, job="own", heartbeat_s=0.0)
    for _ in range(3):
        engine.train_batch(data)
        engine.eval_batch(data)
    observer.close()
    assert sidecar.passes() == RECORDS
    assert [(job.name, job.microbatches) for job in sidecar.jobs] == [("own", 2)]
    assert observer.monitor.stats.failures == 0
    assert "_INSTRUCTION_MAP" not in vars(engine)


def test_a_pipeline_whose_passes_are_unknown_is_recorded_by_the_step(
    world: Any,
    engine_of: Callable[..., Any],
    sidecar: InProcessSidecar,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from resihp.integrations.deepspeed import observe

    monkeypatch.setattr("resihp.instrumentation._deepspeed_engines._TABLE", "_ABSENT")
    engine = engine_of(pipeline(world))
    data = pairs()
    observer = observe(engine, client=sidecar, job="own", heartbeat_s=0.0)
    for _ in range(3):
        engine.train_batch(data)
    observer.close()
    assert engine.global_steps == 3
    assert sidecar.passes() == [(step, 0, Op.FORWARD) for step in range(3)]
    assert all(isnan(wait) for batch in sidecar.batches for wait in batch.wait_ms)
    assert caplog.text.count("steps are recorded as a whole") == 1
    assert "train_batch" not in vars(engine)


def test_verdicts_reach_the_monitors_of_the_engine(
    engine_of: Callable[..., Any],
    sidecar: InProcessSidecar,
    quick_verdicts: None,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    from resihp.integrations.deepspeed import observe

    engine = engine_of(torch.nn.Linear(4, 4))
    observer = observe(engine, client=sidecar, interval_s=0.01)
    deadline_s = time.monotonic() + 60.0
    while not observer.metrics() and time.monotonic() < deadline_s:
        train(engine, 1)
    train(engine, 1)
    observer.close()
    observer.close()
    text = "rank 0 fail_slow 1.50x since step 3"
    folder = tmp_path / "csv"
    assert set((folder / "resihp_slowdown_max.csv").read_text().splitlines()[1:]) >= {
        f"{engine.global_samples},1.5"
    }
    assert (folder / "resihp_verdict.csv").read_text().count(text) == 1
    assert capsys.readouterr().out.count(f"ResiHP: {text}") == 1


def test_a_failure_of_the_observer_is_counted(
    engine_of: Callable[..., Any], sidecar: InProcessSidecar, quick_verdicts: None
) -> None:
    import torch

    from resihp.integrations.deepspeed import observe

    sidecar.error = RuntimeError("scripted")
    engine = engine_of(torch.nn.Linear(4, 4))
    observer = observe(engine, client=sidecar)
    train(engine, 2)
    observer.close()
    assert engine.global_steps == 2
    assert observer.monitor.stats.failures > 0
