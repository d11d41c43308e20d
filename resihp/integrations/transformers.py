"""Hugging Face's `Trainer`, and its subclasses such as TRL's."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from resihp.instrumentation._patches import Patches

from ._observer import TrainingObserver

__all__ = ["ResiHPCallback"]

try:
    _transformers: Any = import_module("transformers")
except ImportError:  # the name below can be imported still; there is no trainer to give it to
    _transformers = None


class ResiHPCallback(getattr(_transformers, "TrainerCallback", object)):  # type: ignore[misc]
    """Names slow ranks while a `Trainer` trains: `Trainer(…, callbacks=[ResiHPCallback()])`.

    Rank 0 adds `resihp/slowdown_max` and `resihp/verdict` to what the trainer logs with its loss,
    and prints a line at the end of training. Nothing here fails or stops training.

    options  of `resihp.instrument`
    """

    def __init__(self, **options: Any) -> None:
        self._observer = TrainingObserver(options)
        self._patches = Patches()

    @property
    def monitor(self) -> Any:
        """Monitor of the training, which counts failures in `stats`; None before the first."""
        return self._observer.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe the model; steps are counted from the trainer's `global_step`."""
        model, optimizer = kwargs.get("model"), kwargs.get("optimizer")
        self._patches.remove()
        self._observer.begin(model, optimizer, state.global_step)
        if self._observer.reads_verdicts:  # a callback's own `on_log` comes after the reporters'
            self._patches.wrap(_transformers.Trainer, "log", self._with_verdicts)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was, and print a summary."""
        self._patches.remove()
        self._observer.close()

    def _with_verdicts(self, log: Callable[..., None]) -> Callable[..., None]:
        metrics = self._observer.safely(self._metrics_of)

        def log_with_verdicts(trainer: Any, logs: Any, *args: Any, **kwargs: Any) -> None:
            found = metrics(trainer, logs)
            log(trainer, {**logs, **found} if found else logs, *args, **kwargs)

        return log_with_verdicts

    def _metrics_of(self, trainer: Any, logs: Any) -> dict[str, Any]:
        """Return what is added to `logs`: nothing to those of an evaluation, which it returns, and
        to those of another trainer of this process."""
        is_own = any(one is self for one in trainer.callback_handler.callbacks)
        return self._observer.metrics() if is_own and "loss" in logs else {}
