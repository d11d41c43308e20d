"""Quotas in the loop of transformers' `Trainer`.

The loop stays as it is. In each step every rank's loop sees as many batches as ever, which are
slots here: a slot holds some, one or none of the rank's microbatches. So what the loop does once a
batch or once a step is alike on all ranks, and so are its divisors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resihp.elastic import PlanSource, Quotas
from resihp.instrumentation._patches import Patches

from ._quotas import CheckedPlans, CollectiveCheck, QuotaBatches, refusals, slots, steps_ahead

_METHODS = ("training_step", "floating_point_ops")


class _Slot(list[Any]):
    """Microbatches that the loop takes for one batch."""


def trainer_refusals(trainer: Any) -> Iterator[str]:
    """Yield why a trainer cannot train by quotas; nothing if it can."""
    args, model = trainer.args, getattr(trainer, "model_wrapped", None)
    loader = getattr(trainer.callback_handler, "train_dataloader", None)
    yield from refusals(loader, args.gradient_accumulation_steps)
    if not isinstance(model, DistributedDataParallel):
        yield f"the model is {type(model).__name__}, not DistributedDataParallel"
    elif any(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules()):
        yield "SyncBatchNorm communicates in each microbatch"
    if not all(callable(getattr(trainer, name, None)) for name in _METHODS):
        yield "this version of transformers has another loop"
    counts_tokens = getattr(trainer, "model_accepts_loss_kwargs", True) or getattr(
        trainer, "compute_loss_func", None
    )
    if counts_tokens and not getattr(args, "average_tokens_across_devices", False):
        yield "each rank divides by its own tokens: set average_tokens_across_devices=True"
    if getattr(args, "include_num_input_tokens_seen", "no") not in (False, "no"):
        yield "include_num_input_tokens_seen communicates in each microbatch"
    accumulation = getattr(trainer.accelerator, "gradient_state", None)
    if getattr(accumulation, "plugin_kwargs", {}).get("sync_each_batch"):
        yield "sync_each_batch sums gradients in each microbatch"


class TrainerQuotas:
    """Quotas of one training, made behind its first `get_batch_samples` on all ranks alike.

    trainer  that `trainer_refusals` lets pass
    plans    source of plans, on the first rank
    warn     is given the reason if the loop turns out not to suit quotas
    """

    def __init__(
        self, trainer: Any, plans: PlanSource | None, monitor: Any, warn: Callable[[str], None]
    ) -> None:
        self._trainer, self._warn, self._patches = trainer, warn, Patches()
        args = trainer.args
        loader = trainer.callback_handler.train_dataloader
        self._accumulation: int = args.gradient_accumulation_steps
        self._ranks = dist.get_world_size()
        self._plans = None if plans is None else CheckedPlans(plans)
        self.quotas = Quotas(
            microbatches=self._accumulation * self._ranks,
            plans=self._plans,
            monitor=monitor,
            ahead=steps_ahead(loader),
        )
        self._number: int = trainer.state.global_step
        steps_an_epoch = max(-(-len(loader) // self._accumulation), 1)
        self._skipped = 0 if args.ignore_data_skip else self._number % steps_an_epoch
        self._batches = QuotaBatches(loader, self._accumulation, self.quotas, self._first_of_pass)
        self._check = CollectiveCheck()
        self._take: Iterator[int] = iter(())
        self._batches.use()
        self._patches.add(self._batches.remove)
        self._patches.wrap(trainer, "training_step", self._in_slots)
        self._patches.wrap(trainer, "floating_point_ops", _summed_in_slots)

    def get_batch_samples(
        self, original: Callable[..., Any], iterator: Any, batches: int, *rest: Any
    ) -> Any:
        """Return the slots of a step, and what else `original` returns for its microbatches.

        Raises `RuntimeError` if the loader has others.
        """
        self.quotas.leave_step()  # a callback may have ended it before its update
        self._step = self.quotas.begin(self._number, microbatches=batches * self._ranks)
        self._take = iter(self._step)
        due = len(self._step.microbatches)
        samples, *others = original(iterator, due, *rest)
        if len(samples) != due:
            raise RuntimeError(f"step {self._number} has {due} microbatches, not {len(samples)}")
        self._number += 1
        return [_Slot(held) for held in slots(samples, batches)], *others

    def finish(self) -> None:
        """Leave the trainer as it was."""
        self.remove()
        self.quotas.leave_step()
        self.quotas.finish()

    def remove(self) -> None:
        """Leave the trainer as it was, without a word to other ranks."""
        self._patches.remove()
        self.quotas.close()

    def _first_of_pass(self) -> int:
        """Return the number of the first step of the pass over the data that begins now."""
        skipped, self._skipped = self._skipped, 0
        return self._number - skipped

    def _in_slots(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def training_step(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(inputs, _Slot):
                return original(model, inputs, *args, **kwargs)
            loss = torch.zeros((), device=self._trainer.args.device)
            for microbatch in inputs:
                next(self._take)
                is_last = self._step.taken == len(self._step.microbatches)
                is_due = self._plans is not None and not self._plans.is_checked
                looking = self._check.microbatch(model) if is_due and not is_last else nullcontext()
                with self._step.sync(model), looking:
                    loss = loss + original(model, microbatch, *args, **kwargs)
                if is_due and is_last:
                    self._allow()
            return loss

        return training_step

    def _allow(self) -> None:
        """Take plans from now on, unless the loop was seen to communicate in a microbatch."""
        if self._plans is None:
            return
        if self._check.found:
            why = "its loss or training_step communicates in each microbatch"
        elif not self._check.checked and _has_own_loss(self._trainer):
            why = (
                "it has its own compute_loss or training_step, which cannot be seen not to "
                "communicate where a rank has two microbatches in a step"
            )
        else:
            self._plans.allow()
            return
        self._plans.refuse(why)
        self._warn(why)


def _summed_in_slots(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def floating_point_ops(inputs: Any) -> Any:
        if isinstance(inputs, _Slot):
            return sum(original(microbatch) for microbatch in inputs)
        return original(inputs)

    return floating_point_ops


def _has_own_loss(trainer: Any) -> bool:
    """Return whether a class other than those of transformers computes the loss."""
    names = ("compute_loss", "training_step")
    homes = {getattr(getattr(type(trainer), name), "__module__", "") for name in names}
    is_given = getattr(trainer, "compute_loss_func", None) is not None
    return is_given or not all(home.startswith("transformers.") for home in homes)
