"""Quotas in the loops of trainers: the data of a rank, and plans for loops that suit them.

Every function here is called alike on all ranks.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from itertools import count, islice, pairwise, tee
from typing import Any

import torch
import torch.distributed as dist

from resihp.client import Client
from resihp.contracts import Action, Job, Layout, Plan
from resihp.elastic import NoPlans, PlanSource, Quotas, ServicePlans

_PATIENCE = timedelta(seconds=10)
_ONE_AHEAD = 1
"""Accelerate's loaders fetch a batch before they yield the last one, to know that it is."""


def sidecar_plans(client: Client, job: str, microbatches: int) -> PlanSource:
    """Return the sidecar's plans for a data-parallel job whose quotas can change."""
    layout = Layout.grid(dp=dist.get_world_size(), pp=1, tp=1, layers=1)
    described = Job(name=job, layout=layout, microbatches=microbatches, actions=(Action.QUOTAS,))
    return ServicePlans(client, described, patience=_PATIENCE)


class CheckedPlans(NoPlans):
    """Plans of a source once `allow` was called; after `refuse` it is told why there are none.

    Only the first rank asks for plans, so that its check decides for all ranks.
    """

    def __init__(self, plans: PlanSource) -> None:
        self._plans = plans
        self._refusal = ""
        self._refused = 0
        self._is_checked = threading.Event()

    @property
    def is_checked(self) -> bool:
        """True after `allow` or `refuse`."""
        return self._is_checked.is_set()

    def allow(self) -> None:
        """Pass plans on from now on."""
        self._is_checked.set()

    def refuse(self, why: str) -> None:
        """Refuse all plans."""
        self._refusal = why
        self._is_checked.set()

    def wait(self, after: int, seconds: float) -> Plan | None:
        """A plan, or None; after a refusal always None."""
        if not self._is_checked.wait(seconds):
            return None
        plan = self._plans.wait(max(after, self._refused), seconds)
        if plan is None or not self._refusal:
            return plan
        self._refused = plan.version
        self._plans.refused(plan, 0, self._refusal)
        return None

    def applied(self, plan: Plan, rank: int, step: int, pause_ms: float) -> None:
        """Pass it on."""
        self._plans.applied(plan, rank, step, pause_ms)

    def refused(self, plan: Plan, rank: int, why: str) -> None:
        """Pass it on."""
        self._plans.refused(plan, rank, why)

    def slowdowns(self) -> Mapping[int, float]:
        """Slowdown of each slow rank, where the source knows them."""
        slowdowns: Callable[[], Mapping[int, float]] = getattr(self._plans, "slowdowns", dict)
        return slowdowns()


class QuotaBatches:
    """Batch sampler of this rank by quotas, in a loader of Accelerate that `refusals` lets pass.

    The microbatches of a step are the batches that all ranks together would take in it, in that
    order; Accelerate gives batch `i` to rank `i % ranks`. So each step, and each pass over the
    data, has the samples that it has without quotas, those that even out the end among them.

    In use it is the batch sampler that `BatchSamplerShard` shards, for one process: then that hands
    out all of its batches. Attributes are those of the batch sampler that was there before.

    accumulation  batches a rank in a step, without quotas
    quotas        assigns them; its `ahead` is `steps_ahead(loader)`
    first         called as a pass begins: number of its first step, also if that is skipped
    """

    def __init__(
        self, loader: Any, accumulation: int, quotas: Quotas, first: Callable[[], int]
    ) -> None:
        self._shard = loader.batch_sampler
        self._batches = self._shard.batch_sampler
        self._of_ranks = [copy.copy(self._shard) for _ in range(self._shard.num_processes)]
        for rank, of_rank in enumerate(self._of_ranks):
            of_rank.process_index = rank
        self._before = (self._batches, self._shard.num_processes, self._shard.process_index)
        self._length = len(self._shard)
        self._accumulation, self._quotas, self._first = accumulation, quotas, first

    def use(self) -> None:
        """Hand out the loader's batches, in passes that begin from now on."""
        self._set(self, 1, 0)

    def remove(self) -> None:
        """Leave the loader as it was."""
        self._set(*self._before)

    def _set(self, batches: Any, processes: int, index: int) -> None:
        shard = self._shard
        shard.batch_sampler, shard.num_processes, shard.process_index = batches, processes, index

    def __len__(self) -> int:
        return self._length

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":  # while it is being copied
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[list[int]]:
        copies = tee(self._batches, len(self._of_ranks))
        for of_rank, batches in zip(self._of_ranks, copies, strict=True):
            of_rank.batch_sampler = _Pass(batches, self._batches)
        rows = zip(*self._of_ranks, strict=True)
        for number in count(self._first()):
            step = [batch for row in islice(rows, self._accumulation) for batch in row]
            if not step:
                return
            for index in self._quotas.assigned(number, microbatches=len(step)):
                yield step[index]


class _Pass:
    """One pass over a batch sampler."""

    def __init__(self, batches: Iterator[list[int]], sampler: Any) -> None:
        self._batches, self._sampler = batches, sampler

    def __iter__(self) -> Iterator[list[int]]:
        return map(copy.copy, self._batches)  # Accelerate completes the last one in place

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)


def refusals(loader: Any, accumulation: int) -> Iterator[str]:
    """Yield why the batches of a loader cannot be handed out by quotas; nothing if they can."""
    ranks = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    shard: Any = getattr(loader, "batch_sampler", None)
    if ranks == 1:
        yield "there is one rank"
    if accumulation < 2:
        yield "a step has one microbatch a rank: use gradient accumulation"
    needed = ("batch_sampler", "num_processes", "process_index", "even_batches", "split_batches")
    if not all(hasattr(shard, name) for name in needed):
        yield (
            "the data loader does not shard the batches of a map-style dataset (iterable datasets "
            "and dispatch_batches=True do not, nor may this version of Accelerate)"
        )
    elif shard.num_processes != ranks:
        yield f"the batches are sharded over {shard.num_processes} of {ranks} ranks"
    elif shard.split_batches or not shard.even_batches:
        yield "split_batches=True and even_batches=False are not supported"
    if getattr(loader, "use_stateful_dataloader", False):
        yield "a stateful data loader counts the batches of its own rank"
    if not getattr(loader, "in_order", True):
        yield "in_order=False lets batches come in another step than theirs"


def steps_ahead(loader: Any) -> int:
    """Return the largest number of batches that a loader fetches before it is asked for them: the
    steps that they may belong to, each of which has one at least."""
    prefetched: int = loader.num_workers * (loader.prefetch_factor or 0)
    return _ONE_AHEAD + prefetched


def collectives() -> int | None:
    """Return the number of collectives of the default process group; None: this torch hides it."""
    try:
        number: int = dist.group.WORLD._get_sequence_number_for_group()  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):
        return None
    return number


class CollectiveCheck:
    """Looks for collectives in microbatches: ranks with unequal quotas would hang in them.

    found    collectives where there should be none
    checked  microbatches that were looked at
    """

    def __init__(self) -> None:
        self.found = self.checked = 0

    @contextmanager
    def microbatch(self, model: torch.nn.parallel.DistributedDataParallel) -> Iterator[None]:
        """Enclose the passes of a microbatch behind which gradients are not summed.

        One that broadcasts the model's buffers is let pass: it is the first one on all ranks.
        """
        broadcasts = getattr(model, "will_sync_module_buffers", lambda: True)()
        before = collectives()
        yield
        after = collectives()
        if not broadcasts and before is not None and after is not None:
            self.checked += 1
            self.found += after - before


def slots(microbatches: list[Any], number: int) -> list[list[Any]]:
    """Spread microbatches over `number` slots, in order, with one at least in the last.

    >>> slots(["a", "b"], 3), slots(["a", "b", "c"], 2)
    ([[], ['a'], ['b']], [['a'], ['b', 'c']])
    """
    edges = [len(microbatches) * slot // number for slot in range(number + 1)]
    return [microbatches[start:stop] for start, stop in pairwise(edges)]
