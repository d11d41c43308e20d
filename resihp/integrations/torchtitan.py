"""torchtitan's `Trainer`, by a configuration that `observed` returned."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

from resihp.instrumentation._patches import Patches

from ._observer import SLOWDOWN, VERDICT, TrainingObserver

__all__ = ["observed"]


def observed(config: Any, **options: Any) -> Any:
    """Return `config` for a trainer that names slow ranks while it trains.

    The trainer is that of `config`, in a subclass. The rank that logs the loss adds
    `resihp/slowdown_max` to it, logs `resihp/verdict` when it changes, and a line at the end of
    training. Nothing here fails or stops training.

    config   a `Trainer.Config` of torchtitan, as the functions of a `config_registry` return it
    options  of `resihp.instrument`. Raises `TypeError` for one that it does not have
    """
    inherited: Any = type(config)
    trainer = getattr(inherited, "_owner", None)
    if trainer is None or not hasattr(trainer, "train_step"):
        raise TypeError(f"config must be a Trainer.Config of torchtitan, not {inherited}")

    @dataclass(kw_only=True, slots=True)
    class Config(inherited):  # type: ignore[misc]
        pass

    members = {
        "Config": Config,
        "_options": options,
        "_observer": TrainingObserver(options),
        "_patches": Patches(),
    }
    type(f"Observed{trainer.__name__}", (_ObservedTraining, trainer), members)  # wires `build`
    return Config(**{field.name: getattr(config, field.name) for field in fields(config)})


class _ObservedTraining:
    """Mixin of a `Trainer`, as the first base class of a subclass of it.

    Steps are numbered in the records as in torchtitan's log.
    """

    _options: dict[str, Any]
    _observer: TrainingObserver
    _patches: Patches
    _is_observed = False
    _logged = ""

    def train(self) -> None:
        """Train, and end the observation with it."""
        try:
            super().train()  # type: ignore[misc]
        except BaseException as error:
            self._end(error)
            raise
        self._end(None)

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step; the first one, after a checkpoint was loaded, begins the observation."""
        if not self._is_observed:
            self._is_observed = True
            self._observer.safely(self._begin)()
        return super().train_step(*args, **kwargs)  # type: ignore[misc]

    def _begin(self) -> None:
        trainer: Any = self
        target = getattr(trainer, "pp_schedule", None) or trainer.model_parts[0]
        rank = self._observer.safely(_log_rank)(trainer) or 0
        self._observer = TrainingObserver(self._options, logging_rank=rank)
        self._observer.begin(target, trainer.optimizers, trainer.step)
        monitor = self._observer.monitor
        if monitor is not None and _has_cuda_graphs(trainer):
            monitor.current_step += 1  # the present step has begun
            reason = "CUDA graphs hide the passes, see --training.disable_cuda_graphs"
            monitor._record_whole_steps(trainer, "train_step", reason)
        if self._observer.reads_verdicts:
            self._patches.wrap(trainer.metrics_processor, "log", self._with_verdicts)

    def _end(self, error: BaseException | None) -> None:
        self._patches.remove()
        self._is_observed = False
        summary = self._observer.end(error)
        if summary is not None:
            _logger().info(summary)

    def _with_verdicts(self, log: Callable[..., Any]) -> Callable[..., Any]:
        metrics = self._observer.safely(self._observer.metrics)
        note = self._observer.safely(self._log_text)

        def log_with_verdicts(step: int, *args: Any, **kwargs: Any) -> Any:
            found = metrics()
            if found:
                more = kwargs.get("extra_metrics") or {}
                kwargs["extra_metrics"] = {**more, SLOWDOWN: found[SLOWDOWN]}
                note(step, found[VERDICT])
            return log(step, *args, **kwargs)

        return log_with_verdicts

    def _log_text(self, step: int, text: str) -> None:
        """Log the verdict where it changed, to the console and to loggers that hold text."""
        if text == self._logged:
            return
        self._logged = text
        _logger().info(f"{VERDICT}: {text}")
        trainer: Any = self
        logger = trainer.metrics_processor.logger
        for one in getattr(logger, "_loggers", [logger]):
            board = getattr(one, "writer", None)
            if board is not None:  # tensorboard, which refuses text among metrics
                board.add_text(VERDICT, text, step)
            else:
                one.log({VERDICT: text}, step)


def _has_cuda_graphs(trainer: Any) -> bool:
    """Return whether passes are captured: torchtitan then calls them by another function."""
    plain = getattr(trainer, "_forward_backward_body", None)
    return plain is not None and getattr(trainer, "fwd_bwd_fn", plain) != plain


def _log_rank(trainer: Any) -> int:
    """Return the rank that has the loss and logs it: in a pipeline that of the last stage."""
    find = getattr(import_module("torchtitan.components.metrics"), "_get_metrics_rank", None)
    if find is None:
        return 0
    schedule = trainer.config.parallelism.pipeline_parallel_schedule
    return int(find(parallel_dims=trainer.parallel_dims, pp_schedule=schedule))


def _logger() -> Any:
    return import_module("torchtitan.tools.logging").logger
