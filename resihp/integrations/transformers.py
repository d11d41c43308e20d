"""Hugging Face's `Trainer`, and its subclasses such as TRL's."""

from __future__ import annotations

from _thread import start_new_thread
from collections.abc import Callable
from functools import partial, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any
from weakref import finalize, ref

from resihp.instrumentation._patches import Patches

from ._observer import QUOTAS, TrainingObserver

if TYPE_CHECKING:
    from resihp.elastic import PlanSource

    from ._trainer_quotas import TrainerQuotas

__all__ = ["ResiHPCallback"]

try:
    _transformers: Any = import_module("transformers")
except ImportError:  # the name below can be imported still; there is no trainer to give it to
    _transformers = None


_OF_TRAINING = ("_quotas", "_is_waiting", "_begin", "_trainer")
"""Attributes of a callback that belong to the present training."""


class ResiHPCallback(getattr(_transformers, "TrainerCallback", object)):  # type: ignore[misc]
    """Names slow ranks while a `Trainer` trains: `Trainer(…, callbacks=[ResiHPCallback()])`.

    Rank 0 adds `resihp/slowdown_max` and `resihp/verdict` to what the trainer logs with its loss,
    and prints a line at the end of training. Nothing here fails or stops training.

    quotas   True: slow ranks get fewer microbatches of gradient accumulation, by the sidecar's
             plans, and the others more; or another source of plans. Where the trainer cannot do so,
             a warning says why, and training goes on without
    options  of `resihp.instrument`
    """

    def __init__(self, *, quotas: bool | PlanSource = False, **options: Any) -> None:
        self._observer = TrainingObserver(options)
        self._patches = Patches()
        self._asked = quotas
        self._stand_by()

    def __getstate__(self) -> dict[str, Any]:
        """Return what copies and pickles hold, which are part of no training."""
        return {name: value for name, value in vars(self).items() if name not in _OF_TRAINING}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._stand_by()

    def _stand_by(self) -> None:
        """Wait for a trainer to begin."""
        self._quotas: TrainerQuotas | None = None
        self._is_waiting = False
        self._begin: Callable[..., None] = self._observer.begin
        self._trainer: Callable[[], Any] = _no_trainer
        if _transformers is not None:
            of_train = Patches()  # callbacks are told nothing of an error, nor what the loop calls
            of_train.wrap(_transformers.Trainer, "train", _telling(ref(self)))
            # In another thread: the garbage collector ends a callback also amid what patches torch.
            finalize(self, start_new_thread, of_train.remove, ()).atexit = False

    @property
    def monitor(self) -> Any:
        """Monitor of the training, which counts failures in `stats`; None before the first."""
        return self._observer.monitor

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe what the loop calls: the model as it is wrapped or compiled, by DDP, DeepSpeed
        and others. Steps are counted from the trainer's `global_step`."""
        self._remove()
        model, trainer = kwargs.get("model"), self._trainer()
        if getattr(trainer, "model", None) is model:
            model = getattr(trainer, "model_wrapped", model)
        self._begin = partial(
            self._observer.begin, model, kwargs.get("optimizer"), state.global_step
        )
        self._is_waiting = self._asked is not False and self._patches.wrap(
            _transformers.Trainer, "get_batch_samples", self._by_quotas
        )  # its first call shows the trainer
        if not self._is_waiting:
            is_asked = self._asked is not False
            self._observe("this version of transformers has another loop" if is_asked else "")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Observe a trainer that does not take its batches as transformers' own do."""
        if self._is_waiting:
            self._observe("the trainer has a get_batch_samples of its own")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Leave the model as it was, and print a summary."""
        quotas = self._quotas
        self._remove()
        if quotas is not None:
            self._observer.safely(quotas.finish)()
        self._observer.close()

    def _meet(self, trainer: Any) -> None:
        """Take the trainer that begins to train for this callback's, if it is."""
        if self._is_of(trainer):
            self._trainer = ref(trainer)

    def _leave(self, trainer: Any, error: BaseException | None) -> None:
        """Leave the model as it was at the end of `train`, also where the trainer has removed this
        callback meanwhile, and report the error that ends this rank."""
        if self._trainer() is trainer or self._is_of(trainer):
            try:
                self._remove()
            finally:
                self._observer.end(error)

    def _remove(self) -> None:
        self._patches.remove()
        if self._quotas is not None:
            self._quotas.remove()
            self._quotas = None

    def _observe(self, refusal: str = "", **defaults: Any) -> None:
        """Begin to observe; `refusal` is why there are no quotas, though asked for."""
        self._is_waiting = False
        self._begin(**defaults)
        if refusal:
            self._warn(refusal)
        if self._observer.reads_verdicts:  # a callback's own `on_log` comes after the reporters'
            self._patches.wrap(_transformers.Trainer, "log", self._with_verdicts)

    def _warn(self, refusal: str) -> None:
        self._observer.warn("quotas", f"no quotas in this training: {refusal}")

    def _by_quotas(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_batch_samples(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            batches = partial(original, trainer)
            if not self._is_of(trainer):
                return batches(*args, **kwargs)
            if self._is_waiting:
                self._quotas = self._observer.safely(self._begin_quotas)(trainer)
                if self._is_waiting:
                    self._observe("they could not begin")
            if self._quotas is None:
                return batches(*args, **kwargs)
            return self._quotas.get_batch_samples(batches, *args, **kwargs)

        return get_batch_samples

    def _begin_quotas(self, trainer: Any) -> TrainerQuotas | None:
        """Begin to observe, and return the quotas; None where the trainer cannot have them."""
        from ._quotas import sidecar_plans
        from ._trainer_quotas import TrainerQuotas, trainer_refusals

        refusal = next(trainer_refusals(trainer), "")
        if refusal:
            self._observe(refusal)
            return None
        args = trainer.args
        microbatches = args.gradient_accumulation_steps * args.world_size
        self._observe(actions=("quotas",), microbatches=microbatches)
        plans: PlanSource | None = None
        if args.process_index == 0:
            plans = (
                self._observer.safely(sidecar_plans)(
                    self._observer.client, self._observer.job, microbatches
                )
                if isinstance(self._asked, bool)
                else self._asked
            )
        return TrainerQuotas(trainer, plans, self.monitor, self._warn)

    def _with_verdicts(self, log: Callable[..., None]) -> Callable[..., None]:
        metrics = self._observer.safely(self._metrics_of)

        def log_with_verdicts(trainer: Any, logs: Any, *args: Any, **kwargs: Any) -> None:
            found = metrics(trainer, logs)
            log(trainer, {**logs, **found} if found else logs, *args, **kwargs)

        return log_with_verdicts

    def _metrics_of(self, trainer: Any, logs: Any) -> dict[str, Any]:
        """Return what is added to `logs`: nothing to those of an evaluation, which it returns, and
        to those of another trainer of this process."""
        if not self._is_of(trainer) or "loss" not in logs:
            return {}
        found = self._observer.metrics()
        if self._quotas is not None:
            found[QUOTAS] = " ".join(map(str, self._quotas.quotas.in_force))
        return found

    def _is_of(self, trainer: Any) -> bool:
        return any(one is self for one in trainer.callback_handler.callbacks)


def _no_trainer() -> None:
    """Stand in for the trainer before its training, and where `train` is not that of its class."""


def _telling(callback: ref[ResiHPCallback]) -> Callable[..., Any]:
    """Return a wrapper of `Trainer.train` that tells the callback of trainer and errors."""

    def tell(method: Callable[..., None], *args: Any) -> None:
        alive = callback()
        if alive is not None:
            alive._observer.safely(method)(alive, *args)

    def wrapper(train: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(train)
        def train_observed(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            tell(ResiHPCallback._meet, trainer)
            try:
                result = train(trainer, *args, **kwargs)
            except BaseException as error:
                tell(ResiHPCallback._leave, trainer, error)
                raise
            tell(ResiHPCallback._leave, trainer, None)
            return result

        return train_observed

    return wrapper
