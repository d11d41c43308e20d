"""`ResiHPCallback` in the Trainer of Lightning."""

from __future__ import annotations

import copy
import gc
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from pathlib import Path
from typing import Any

import pytest

from resihp.contracts import Op

from .conftest import InProcessSidecar, Run

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]

PASSES = [
    record
    for step in range(4)
    for record in (
        *((step, index, op) for index in range(3) for op in (Op.FORWARD, Op.BACKWARD)),
        (step, -1, Op.OPTIMIZER),
    )
]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "fsdp2"])
def test_a_slow_rank_is_named(run: Run, strategy: str, tmp_path: Path) -> None:
    training = run("lightning_trainer.py", "--slow-rank", "1", "--strategy", strategy)
    training.assert_named(1)
    assert training.output.count("ResiHP: rank 1 fail_slow") == 1
    assert "(3 ranks; rank 0: " in training.output
    training.assert_sent(250, loads=100)
    (log,) = tmp_path.rglob("metrics.csv")
    assert "resihp/slowdown_max" in log.read_text()
    assert "rank 1 fail_slow" in log.read_text()


@pytest.fixture
def fit(tmp_path: Path) -> Callable[..., Any]:
    """Function that trains a module on one rank, with these callbacks, and evaluates it."""
    import lightning
    import torch
    from lightning.pytorch.loggers import CSVLogger
    from torch.utils.data import DataLoader, TensorDataset

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: Any, index: int) -> Any:
            return {"loss": self.layer(batch[0]).square().mean()}

        def validation_step(self, batch: Any, index: int) -> Any:
            with torch.enable_grad():  # as some metrics do
                self.layer(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def train(
        *callbacks: Any,
        training_step: Callable[..., Any] = Module.training_step,
        ckpt_path: Any = None,
        members: Any = (),
        **arguments: Any,
    ) -> Any:
        data = DataLoader(TensorDataset(torch.randn(24, 3, 4)), batch_size=2)
        given = {
            "accelerator": "cpu", "max_steps": 4, "accumulate_grad_batches": 3,
            "logger": CSVLogger(tmp_path), "log_every_n_steps": 1, "enable_progress_bar": False,
            "default_root_dir": tmp_path, "enable_model_summary": False, **arguments,
        }  # fmt: skip
        trainer = lightning.Trainer(callbacks=list(callbacks), **given)
        module = type("Own", (Module,), {"training_step": training_step, **dict(members)})()
        trainer.fit(module, data, data, ckpt_path=ckpt_path)
        return trainer

    return train


def test_microbatches_are_recorded_and_evaluation_is_not(
    fit: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.lightning import ResiHPCallback

    callback = ResiHPCallback(client=sidecar, job="own", heartbeat_s=0.0)
    trainer = fit(callback)
    assert sidecar.passes() == PASSES
    assert {1, 2} <= sidecar.loaded_steps()
    assert [(job.name, job.microbatches) for job in sidecar.jobs] == [("own", 3)]
    assert callback.monitor.stats.failures == 0
    assert "training_step" not in vars(trainer.lightning_module)


def test_a_copy_of_a_callback_observes_its_own_training(
    fit: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.lightning import ResiHPCallback

    callback = ResiHPCallback(client=sidecar, heartbeat_s=0.0)
    fit(callback, max_steps=1)
    other = copy.deepcopy(callback)
    assert other.monitor is None
    fit(other)
    assert other._observer.client.passes()[-28:] == PASSES
    assert other.monitor.stats.failures == 0


@pytest.mark.parametrize("optimizers", [1, 2])
def test_manual_optimization_is_observed(
    optimizers: int,
    fit: Callable[..., Any],
    sidecar: InProcessSidecar,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A step ends with the first update of a batch."""
    import torch

    from resihp.integrations.lightning import ResiHPCallback

    def configure(self: Any) -> Any:
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(optimizers)]

    def step(self: Any, batch: Any, index: int) -> None:
        """Accumulate the gradients of three batches, for one network after the other."""
        of_module = self.optimizers()
        for optimizer in of_module if optimizers > 1 else [of_module]:
            self.manual_backward(self.layer(batch[0]).square().mean())
            if index % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    callback = ResiHPCallback(client=sidecar, heartbeat_s=0.0)
    trainer = fit(
        callback,
        training_step=step,
        members={"automatic_optimization": False, "configure_optimizers": configure},
        max_steps=4 * optimizers,
        accumulate_grad_batches=1,
    )
    assert sidecar.passes() == PASSES
    assert [job.microbatches for job in sidecar.jobs] == [3]
    assert callback.monitor.stats.failures == 0
    assert "logged once" not in caplog.text
    assert "manual_backward" not in vars(trainer.lightning_module)


@pytest.mark.parametrize("in_closure", [False, True])
def test_manual_optimization_that_cannot_be_observed_is_told(
    in_closure: bool,
    fit: Callable[..., Any],
    sidecar: InProcessSidecar,
    caplog: pytest.LogCaptureFixture,
) -> None:
    from resihp.integrations.lightning import ResiHPCallback

    def step(self: Any, batch: Any, index: int) -> None:
        def closure() -> None:
            loss = self.layer(batch[0]).square().mean()
            (self.manual_backward if in_closure else type(loss).backward)(loss)

        if not in_closure:
            closure()
        self.optimizers().step(closure if in_closure else None)

    fit(
        ResiHPCallback(client=sidecar, heartbeat_s=0.0),
        training_step=step,
        members={"automatic_optimization": False},
        accumulate_grad_batches=1,
    )
    assert caplog.text.count("in Lightning call `manual_backward`, outside of closures") == 1


def _of_batch(self: Any, batch: Any) -> Any:
    return self.layer(batch[0]).square().mean()


def _of_batch_and_index(self: Any, batch: Any, batch_idx: int) -> Any:
    assert isinstance(batch_idx, int)
    return _of_batch(self, batch)


def _of_iterator(self: Any, dataloader_iter: Any) -> Any:
    batch, _, _ = next(dataloader_iter)
    return _of_batch(self, batch)


@wraps(_of_batch)
def _decorated(*args: Any, **kwargs: Any) -> Any:
    return _of_batch(*args, **kwargs)


@pytest.mark.parametrize(
    "training_step", [_of_batch, _of_batch_and_index, _of_iterator, _decorated]
)
def test_a_module_is_given_what_its_training_step_takes(
    training_step: Callable[..., Any], fit: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    """Lightning reads that from the method's parameters."""
    from resihp.integrations.lightning import ResiHPCallback

    callbacks = [ResiHPCallback(client=sidecar, heartbeat_s=0.0) for _ in range(2)]
    assert fit(*callbacks, training_step=training_step).global_step == 4
    assert [callback.monitor.stats.failures for callback in callbacks] == [0, 0]
    assert len(sidecar.passes()) >= len(PASSES)


@pytest.mark.parametrize("fails", [False, True])
def test_a_batch_is_not_kept_after_its_step(fails: bool) -> None:
    import torch

    from resihp.integrations.lightning import _TrainingStep

    def training_step(batch: Any) -> Any:
        if fails:
            raise ValueError("scripted")
        return batch[0].sum()

    step = _TrainingStep(torch.nn.Linear(4, 4)).observing(training_step)
    batch = torch.ones(2, 4)
    kept = weakref.ref(batch)
    with pytest.raises(ValueError, match="scripted") if fails else nullcontext():
        step(batch)
    del batch
    gc.collect()
    assert kept() is None


def test_a_batch_tells_the_work_in_it(fit: Callable[..., Any], sidecar: InProcessSidecar) -> None:
    from resihp.integrations.lightning import ResiHPCallback

    def lengths(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        (x,) = args
        return [len(row) for row in x]

    fit(ResiHPCallback(client=sidecar, lengths=lengths, heartbeat_s=0.0))
    assert {tokens for tokens, _ in sidecar.work()} == {6}


def test_a_resumed_training_goes_on_counting(
    fit: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    from resihp.integrations.lightning import ResiHPCallback

    path = fit(max_steps=2).checkpoint_callback.best_model_path
    fit(ResiHPCallback(client=sidecar, heartbeat_s=0.0), ckpt_path=path)
    assert sidecar.passes() == [record for record in PASSES if record[0] >= 2]


def test_verdicts_reach_the_logger(
    fit: Callable[..., Any], sidecar: InProcessSidecar, quick_verdicts: None, tmp_path: Path
) -> None:
    import lightning

    from resihp.integrations.lightning import ResiHPCallback

    class Waits(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            deadline_s = time.monotonic() + 60.0
            while trainer.global_step and time.monotonic() < deadline_s:
                if callback._observer.metrics():
                    break
                time.sleep(0.01)

    callback = ResiHPCallback(client=sidecar, interval_s=0.01)
    trainer = fit(Waits(), callback)
    assert trainer.callback_metrics["resihp/slowdown_max"] == 1.5
    (log,) = tmp_path.rglob("metrics.csv")
    assert log.read_text().count("rank 0 fail_slow 1.50x since step 3") == 1


def test_a_failure_of_the_callback_is_counted(
    fit: Callable[..., Any], sidecar: InProcessSidecar, quick_verdicts: None
) -> None:
    from resihp.integrations.lightning import ResiHPCallback

    sidecar.error = RuntimeError("scripted")
    callback = ResiHPCallback(client=sidecar)
    assert fit(callback).global_step == 4
    assert callback.monitor.stats.failures > 0


def test_an_error_of_the_users_is_reported_and_the_module_is_left_as_it_was(
    fit: Callable[..., Any], sidecar: InProcessSidecar
) -> None:
    import lightning

    from resihp.integrations.lightning import ResiHPCallback

    modules = []

    class Fails(lightning.Callback):  # type: ignore[misc]
        def on_train_batch_end(self, trainer: Any, module: Any, *_: Any) -> None:
            modules.append(module)
            raise ValueError("scripted")

    with pytest.raises(ValueError, match="scripted"):
        fit(ResiHPCallback(client=sidecar), Fails())
    assert "training_step" not in vars(modules[0])
    assert "ValueError: scripted" in str(sidecar.heartbeats[-1])
