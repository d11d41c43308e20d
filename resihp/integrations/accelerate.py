"""Loops with Hugging Face's Accelerate whose batches are handed out by quotas."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

import torch.distributed as dist
from torch import nn

from resihp.contracts import ContractError
from resihp.elastic import Quotas

from ._observer import TrainingObserver
from ._quotas import QuotaBatches, refusals, sidecar_plans, steps_ahead

if TYPE_CHECKING:
    from resihp.elastic import PlanSource
    from resihp.elastic.ddp.quotas import QuotaStep

__all__ = ["QuotaSteps"]


class LoadedStep:
    """A step of the loop: iterate over it once, to its end; it yields this rank's batches.

    number, quotas  and `scale`, `scale_for` and `sync` as in the steps of `resihp.elastic.Quotas`
    """

    def __init__(self, step: QuotaStep, batches: Iterator[Any]) -> None:
        self._step, self._batches = step, batches
        self.number, self.quotas = step.number, step.quotas

    def __iter__(self) -> Iterator[Any]:
        for _ in self._step:
            yield next(self._batches)

    @property
    def scale(self) -> float:
        """Factor on losses that are means, each over as much as the others."""
        return self._step.scale

    def scale_for(self, weight: float, total: float) -> float:
        """Factor on a loss that is a mean over `weight` tokens of `total` in the step."""
        return self._step.scale_for(weight, total)

    def sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of a batch's passes: gradients are summed behind the last alone."""
        return self._step.sync(model)


class QuotaSteps:
    """Steps of an accumulation loop with Accelerate: slow ranks get fewer batches, others more.

    Iterate over it once a pass over the data, over each of its steps, and over the batches of each
    step. All ranks make one, behind `Accelerator.prepare`, with gradient accumulation left at 1
    there. Observes the loop as `resihp.instrument` does.

    model, optimizer, data  as `prepare` returned them; `model` in DistributedDataParallel
    accumulation            batches a rank in a step where quotas are even
    first                   steps done before, by a training that is resumed
    skip                    as many of them belong to the pass that it goes on with, the first one
                            here: `done_of_pass` of the training before. Default: those that are
                            left of whole passes, where none was left early
    plans                   source of plans; default the sidecar's
    options                 of `resihp.instrument`

    Raises `ContractError` for data that cannot be handed out by quotas.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        data: Any,
        *,
        accumulation: int,
        first: int = 0,
        skip: int | None = None,
        plans: PlanSource | None = None,
        **options: Any,
    ) -> None:
        for refusal in refusals(data, accumulation):
            raise ContractError("data", refusal)
        steps = -(-len(data) // accumulation)
        skip = first % steps if skip is None else skip
        if not 0 <= skip <= min(first, steps - 1):
            raise ContractError("skip", f"is {skip}, of {first} steps done and {steps} of a pass")
        if data.gradient_state.num_steps != 1:
            raise ContractError("gradient_accumulation_steps", "leave it at 1 in the Accelerator")
        self._data, self._accumulation = data, accumulation
        self._ranks = dist.get_world_size()
        microbatches = accumulation * self._ranks
        self._observer = TrainingObserver(options)
        self._observer.begin(
            model, optimizer, first, actions=("quotas",), microbatches=microbatches
        )
        if plans is None and dist.get_rank() == 0:
            plans = self._observer.safely(sidecar_plans)(
                self._observer.client, self._observer.job, microbatches
            )
        self._quotas = Quotas(
            microbatches=microbatches,
            plans=plans,
            monitor=self._observer.monitor,
            ahead=steps_ahead(data),
        )
        self._number, self._steps = first, steps
        self._skip = skip  # of the first pass, which is the rest of another one
        self._first_of_pass = first - skip
        self._batches = QuotaBatches(data, accumulation, self._quotas, lambda: self._first_of_pass)
        self._batches.use()

    def __len__(self) -> int:
        """Steps of a pass."""
        return self._steps

    @property
    def done(self) -> int:
        """Number of steps begun, of those before included."""
        return self._number

    @property
    def done_of_pass(self) -> int:
        """Number of them in the pass in progress; 0 between two passes."""
        return (self._number - self._first_of_pass) % self._steps

    def __iter__(self) -> Iterator[LoadedStep]:
        """Yield the steps of a pass over the data."""
        done, self._skip = self._skip, 0
        self._first_of_pass = self._number - done
        batches = iter(_without_first(self._data, done * self._accumulation))
        try:
            for step in range(done, self._steps):
                of_rank = min(self._accumulation, len(self._data) - step * self._accumulation)
                begun = self._quotas.begin(self._number, microbatches=of_rank * self._ranks)
                self._number += 1
                yield LoadedStep(begun, batches)
        finally:
            self._first_of_pass = self._number  # the next one is whole, also if this one was left

    def total(self, weight: float) -> float:
        """Sum `weight` over all ranks, as for `scale_for`. A collective."""
        return self._quotas.total(weight)

    def metrics(self) -> dict[str, Any]:
        """Return what the job's logger should log, on the first rank."""
        return self._observer.metrics()

    def close(self, error: BaseException | None = None) -> None:
        """End the loop, leave data and model as they were, and print a summary."""
        self._batches.remove()
        if error is None:
            self._quotas.finish()
        else:
            self._quotas.close()
        self._observer.close(error)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close(error)


def _without_first(data: Any, batches: int) -> Any:
    """Return the loader without its first batches."""
    if not batches:
        return data
    return import_module("accelerate").skip_first_batches(data, batches)
