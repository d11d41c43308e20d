"""`observed` in a configuration of torchtitan's Trainer."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from functools import partial
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from resihp.contracts import Op

from .conftest import EXAMPLES, InProcessSidecar, Run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

RECORDS = [
    record
    for step in range(1, 4)
    for record in (
        *((step, index, op) for index in range(2) for op in (Op.FORWARD, Op.BACKWARD)),
        (step, -1, Op.OPTIMIZER),
    )
]
"""Records of three steps of two microbatches, numbered as torchtitan does."""


@pytest.mark.parametrize(
    ("options", "ranks", "slow"),
    [
        ((), 3, 1),
        (("--pipeline-stages", "2"), 4, 2),
        (("--tensor-ranks", "2", "--factor", "6", "--slow-since", "12", "--steps", "30"), 4, 3),
    ],
    ids=["fsdp", "pipeline", "tensor"],
)
def test_a_slow_rank_is_named(
    run: Run, options: tuple[str, ...], ranks: int, slow: int, tmp_path: Path
) -> None:
    training = run("torchtitan_trainer.py", "--slow-rank", str(slow), *options, ranks=ranks)
    training.assert_named(slow)
    assert f"resihp/verdict: rank {slow} fail_slow" in training.output
    assert training.output.count(f"ResiHP: rank {slow} fail_slow") == 1
    assert scalars(tmp_path)["resihp/slowdown_max"]


def scalars(folder: Path) -> dict[str, list[float]]:
    """Values by name in the only log of TensorBoard below `folder` that has any."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found: dict[str, list[float]] = {}
    for path in folder.rglob("events.out.*"):
        events = EventAccumulator(str(path))
        events.Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend(event.value for event in events.Scalars(tag))
    return found


@pytest.fixture
def trainer_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Function that makes a trainer of one rank, observed with these options."""
    pytest.importorskip("torchtitan")
    import torch

    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setenv("EXAMPLE_OPTIONS", f"--steps 3 --folder {tmp_path}")
    for name, value in {
        "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import torchtitan_trainer as example

    def make(**options: Any) -> Any:
        monkeypatch.setattr(example, "observed", lambda config: observed(config, **options))
        return example.small_llama().build()

    from resihp.integrations.torchtitan import observed

    yield make
    torch.distributed.destroy_process_group()
    torch.autograd.set_multithreading_enabled(True)
    gc.enable()


def test_microbatches_are_recorded(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    trainer = trainer_of(client=sidecar, job="own", heartbeat_s=0.0)
    plain = trainer.model_parts[0]._compiled_call_impl
    trainer.train()
    trainer.close()
    assert sidecar.passes() == RECORDS
    assert [(job.name, job.microbatches) for job in sidecar.jobs] == [("own", 2)]
    assert {sequences for _, sequences in sidecar.work()} == {4}  # documents, in two rows
    assert trainer._observer.monitor.stats.failures == 0
    assert trainer.model_parts[0]._compiled_call_impl is plain
    assert "log" not in vars(trainer.metrics_processor)


def test_verdicts_reach_the_loggers_of_the_trainer(
    trainer_of: Callable[..., Any],
    sidecar: InProcessSidecar,
    quick_verdicts: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = trainer_of(client=sidecar, interval_s=0.01)
    plain_step = type(trainer).train_step

    def train_step(self: Any, data: Any) -> None:
        deadline_s = time.monotonic() + 60.0
        while self.step == 3 and not self._observer.metrics() and time.monotonic() < deadline_s:
            time.sleep(0.01)
        plain_step(self, data)

    monkeypatch.setattr(type(trainer), "train_step", train_step)
    trainer.metrics_processor.config.log_freq = 1
    caplog.set_level("INFO")  # torchtitan logs to the root
    trainer.train()
    trainer.close()
    text = "rank 0 fail_slow 1.50x since step 3"
    found = scalars(tmp_path)
    assert set(found["resihp/slowdown_max"]) == {1.5}
    assert len(found["grad_norm"]) == 3
    assert caplog.text.count(f"resihp/verdict: {text}") == 1
    assert caplog.text.count(f"ResiHP: {text}") == 1


def test_steps_of_cuda_graphs_are_recorded_as_a_whole(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = trainer_of(client=sidecar, job="own", heartbeat_s=0.0)
    trainer.fwd_bwd_fn = partial(trainer._forward_backward_body)
    trainer.train()
    trainer.close()
    assert sidecar.passes() == [(step, 0, Op.FORWARD) for step in (2, 3)]
    assert all(isnan(wait) for batch in sidecar.batches for wait in batch.wait_ms)
    assert caplog.text.count("CUDA graphs hide the passes") == 1
    assert "train_step" not in vars(trainer)


def test_a_failure_of_the_observer_is_counted(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar, quick_verdicts: None
) -> None:
    sidecar.error = RuntimeError("scripted")
    trainer = trainer_of(client=sidecar)
    trainer.train()
    trainer.close()
    assert trainer.step == 3
    assert trainer._observer.monitor.stats.failures > 0


def test_an_error_of_the_users_is_reported(
    trainer_of: Callable[..., Any], sidecar: InProcessSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(client=sidecar)
    plain = trainer.model_parts[0]._compiled_call_impl

    def fail() -> None:
        raise ValueError("scripted")

    monkeypatch.setattr(trainer.lr_schedulers, "step", fail)
    with pytest.raises(ValueError, match="scripted"):
        trainer.train()
    trainer.close()
    assert "ValueError: scripted" in str(sidecar.heartbeats[-1])
    assert trainer.model_parts[0]._compiled_call_impl is plain


def test_what_is_no_configuration_is_refused() -> None:
    from resihp.integrations.torchtitan import observed

    with pytest.raises(TypeError, match=r"must be a Trainer\.Config"):
        observed(object())
