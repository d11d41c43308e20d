"""Lightning's `Trainer`, of the package `lightning` or `pytorch_lightning`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any

import torch

from resihp.instrumentation._patches import Patches

from ._observer import SLOWDOWN, VERDICT, TrainingObserver

__all__ = ["ResiHPCallback"]

_PACKAGES = ["lightning.pytorch", "pytorch_lightning"]
if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    _PACKAGES.reverse()  # each accepts its own callbacks only


def _package() -> Any:
    """Return the package; None without any, so that the name below can be imported still."""
    for name in _PACKAGES:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


_lightning = _package()


class ResiHPCallback(getattr(_lightning, "Callback", object)):  # type: ignore[misc]
    """Names slow ranks while a `Trainer` trains: `Trainer(callbacks=[ResiHPCallback()])`.

    A call of `training_step` is a forward pass, with any strategy; with manual optimization what it
    does before its first `manual_backward` is, and its first update ends a step. Rank 0 logs
    `resihp/slowdown_max`, and `resihp/verdict` when it changes, and prints a line at the end of
    training. Nothing here fails or stops training.

    options  of `resihp.instrument`; `lengths` is given the batch, or its elements if it is a tuple
             or a list
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._observer = TrainingObserver(options)
        self._patches = Patches()
        self._logged = ""

    @property
    def monitor(self) -> Any:
        """Monitor of the training, which counts failures in `stats`; None before the first."""
        return self._observer.monitor

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Observe `training_step`; steps are counted from the trainer's `global_step`."""
        self._observer.safely(self._begin)(trainer, pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Begin the optimizer's update: Lightning's passes are inside `optimizer.step(closure)`."""
        if self.monitor is not None:
            self._observer.safely(self.monitor._timer.begin_update)()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the verdicts on rank 0."""
        if self._observer.reads_verdicts:
            self._observer.safely(self._log)(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the module as it was, and print a summary."""
        self._patches.remove()
        summary = self._observer.end()
        if summary is not None:
            _lightning.utilities.rank_zero_info(summary)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Leave the module as it was, and report the error that ends this rank."""
        self._patches.remove()
        self._observer.end(exception)

    def _begin(self, trainer: Any, pl_module: Any) -> None:
        self._logged = ""
        self._patches.remove()
        step = _TrainingStep(pl_module)
        self._observer.begin(step, list(trainer.optimizers) or None, trainer.global_step)
        self._patches.wrap(pl_module, "training_step", step.observing)
        if not pl_module.automatic_optimization and self.monitor is not None:
            self._patches.wrap(pl_module, "manual_backward", self.monitor._passes.ending)

    def _log(self, trainer: Any, pl_module: Any) -> None:
        found = self._observer.metrics()
        if not found:
            return
        pl_module.log(
            SLOWDOWN, found[SLOWDOWN], on_step=True, on_epoch=False, rank_zero_only=True,
            batch_size=1,
        )  # fmt: skip
        text = found[VERDICT]
        if text != self._logged:  # loggers of metrics hold numbers in the first place
            self._logged = text
            for logger in trainer.loggers:
                self._observer.safely(_log_text)(logger, text, trainer.global_step)


class _TrainingStep(torch.nn.Module):
    """`training_step` of a module as a module of its own, whose inputs are the batch.

    Strategies that do not wrap the module call the method without calling the module.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._call: Callable[[], Any] = _no_step

    def observing(self, training_step: Callable[..., Any]) -> Callable[..., Any]:
        """Return `training_step` as a call of this module."""

        def step(batch: Any = None, *args: Any, **kwargs: Any) -> Any:
            self._call = partial(training_step, batch, *args, **kwargs)
            try:
                return self(*(batch if isinstance(batch, list | tuple) else (batch,)))
            finally:
                self._call = _no_step  # the batch would stay in memory until the next one

        # Lightning reads the parameters of the method behind one decorator, with `self`.
        step.__wrapped__ = getattr(training_step, "__wrapped__", training_step)  # type: ignore[attr-defined]
        return step

    def forward(self, *inputs: Any) -> Any:
        """Return what `training_step` returns for the present batch."""
        return self._call()


def _no_step() -> None:
    """Stand in for `training_step` outside of its calls."""


def _log_text(logger: Any, text: str, step: int) -> None:
    add_text = getattr(logger.experiment, "add_text", None)
    if add_text is not None:  # tensorboard, which refuses text among metrics
        add_text(VERDICT, text, step)
    else:
        logger.log_metrics({VERDICT: text}, step=step)
