"""Quotas in an accumulation loop of the user's on DistributedDataParallel or FSDP2.

The ranks agree on new quotas without a wait of their own: each step one small all-reduce of CPU
tensors runs beside the training, and its result is read when the next step begins.
"""

from __future__ import annotations

import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from numbers import Integral
from weakref import WeakSet, ref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from resihp._shutdown import start_thread
from resihp.contracts import ContractError, PeerLostError, Plan, even_quotas

from ..microbatches.balancing import (
    StepWork,
    assign_by_count,
    assign_by_work,
    at_least_one,
    quotas_by_speed,
    speeds_of_quotas,
    work_of_step,
)
from ..planning.quota_plans import (
    PlanVersionHolder,
    QuotaPlan,
    QuotaPlanPoller,
    quotas_by_replica,
)
from ..planning.sources import NoPlans, PlanSource
from .fsdp import GatheredModels, reshard
from .quota_agreement import QuotaAgreement, QuotaState

_RELEASE_POLL_S = 0.01


class QuotaStep:
    """A step of an accumulation loop: iterate over it once, to its end.

    Each microbatch is computed inside `sync` before the next one is taken: no `list(step)`.

    number        of the step
    microbatches  of this rank, in the order in which they are yielded
    quotas        number of microbatches of each rank
    plan_version  of the plan that the quotas come from; 0: none
    """

    def __init__(
        self,
        number: int,
        assigned: Sequence[tuple[int, ...]],
        rank: int,
        plan_version: int,
        checked: WeakSet[nn.Module],
        gathered: GatheredModels,
    ) -> None:
        self.number, self.plan_version = number, plan_version
        self._checked, self._gathered = checked, gathered
        self.microbatches = assigned[rank]
        self.quotas = tuple(map(len, assigned))
        self.taken = self._synced = 0

    @property
    def scale(self) -> float:
        """Factor on losses that are means, each over as much as the others.

        DDP and FSDP2 divide gradients by the number of ranks; with this factor they are means over
        the microbatches of the step, however many of them a rank has.
        """
        return self.scale_for(1.0, sum(self.quotas))

    def scale_for(self, weight: float, total: float) -> float:
        """Factor on the loss of a microbatch, a mean over `weight` tokens of `total` in the step.

        For a loss that is a sum over tokens, `weight` is 1. `total` is the sum over all ranks.
        """
        if not total > 0.0:
            raise ContractError("total", f"the weights of a step sum to {total}")
        return weight * len(self.quotas) / total

    def __iter__(self) -> Iterator[int]:
        while self.taken < len(self.microbatches):
            self.taken += 1
            yield self.microbatches[self.taken - 1]
            if self._synced < self.taken:  # `sync` would take any of them for the last one
                raise ContractError(
                    "step",
                    "compute each microbatch inside step.sync before the next is taken: no "
                    "list(step), no prefetch; `step.microbatches` tells them beforehand",
                )

    def sync(self, model: nn.Module) -> AbstractContextManager[None]:
        """Return the context of a microbatch's passes: gradients are summed over the ranks behind
        the last one alone.

        `model` is in `DistributedDataParallel` or sharded by `fully_shard`, over all ranks. A
        sharded one is gathered for the first microbatch and resharded behind the last: in between
        each rank holds all parameters and gradients.
        """
        if model not in self._checked:
            _check(model, len(self.quotas))
            self._checked.add(model)
        self._synced, is_last = self.taken, self.taken == len(self.microbatches)
        if isinstance(model, FSDPModule):
            return self._gathered.passes(model, is_last=is_last)
        assert isinstance(model, DistributedDataParallel)
        context: AbstractContextManager[None] = nullcontext() if is_last else model.no_sync()
        return context


class Quotas:
    """Assigns the microbatches of each step to the ranks of a `torch.distributed` job.

    Every rank makes one with the same arguments, after `init_process_group`. Every rank has at
    least one microbatch in each step. New quotas come from `plans`, which the first rank asks in a
    thread; they hold from a step on that all ranks know, two steps after the plan or later. A
    source that fails, is silent or answers with nonsense never stops or delays the training.

    microbatches  per step, over all ranks; constant
    plans         source of plans, e.g. `ServicePlans`; None: the quotas stay even
    work          microbatches are assigned by their work, not by their number alone
    monitor       takes over the version of the plan, so that the sidecar knows which plan later
                  records belong to
    ahead         steps for which `assigned` is known before they begin: new quotas hold that many
                  steps later, so that data can be loaded ahead
    """

    def __init__(
        self,
        *,
        microbatches: int,
        plans: PlanSource | None = None,
        work: StepWork | None = None,
        monitor: PlanVersionHolder | None = None,
        ahead: int = 0,
    ) -> None:
        if not (dist.is_available() and dist.is_initialized()):
            raise ContractError("quotas", "call torch.distributed.init_process_group before")
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        why = ": each rank has at least one"
        microbatches = _whole("microbatches", microbatches, least=self._size, why=why)
        ahead = _whole("ahead", ahead, least=0)
        self._microbatches, self._work, self._monitor = microbatches, work, monitor
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self._sent: ref[torch.Tensor] | None = None
        even = even_quotas(microbatches, self._size)
        self._first = QuotaState(0, 0, even, speeds_of_quotas(even))
        self._agreement = QuotaAgreement(self._start_maximum, self._first)
        self._states = deque([self._first] * (ahead + 1), maxlen=ahead + 1)
        self._begun: QuotaStep | None = None
        self._has_plans = plans is not None
        self._poller = QuotaPlanPoller(plans or NoPlans(), self._rank, self._read)
        self._offered: QuotaPlan | None = None
        self._checked: WeakSet[nn.Module] = WeakSet()
        self._gathered = GatheredModels()

    @property
    def in_force(self) -> tuple[int, ...]:
        """Microbatches of each rank in the present step where they are assigned by number."""
        return self._states[0].quotas

    @property
    def failures(self) -> int:
        """Failures of the plan source and of the agreement on this rank; none reached the loop."""
        return self._poller.failures + self._agreement.failures

    def steps(self, count: int, *, first: int = 0) -> Iterator[QuotaStep]:
        """Yield `count` steps, numbered from `first`; iterate over each to its end.

        Raises `ContractError` if a step's microbatches were not all taken, if `work` is not usable
        or if the ranks differ in it.
        """
        self._begun = None
        try:
            for number in range(first, first + count):
                yield self.begin(number)
            self.finish()
        finally:
            self._poller.close()

    def begin(self, number: int, *, microbatches: int | None = None) -> QuotaStep:
        """Begin the step after the last one, where the loop is a trainer's; else `steps` does.

        Every rank begins the same steps in the same order, and calls `finish` at the end. Raises
        what `steps` raises.

        microbatches  of this step, where it has others than usual, as the last one of an epoch
        """
        self._end_step()
        agreement = self._agreement
        if self._rank == 0 and self._has_plans:
            self._poller.start(agreement.in_force.version)
        if agreement.advance() and self._offered is not None:
            plan = replace(self._offered.plan, quotas=self._quotas_of(self._offered))
            self._poller.acknowledge(plan, number + len(self._states) - 1)
            self._offered = None
        self._states.append(agreement.in_force)
        version = self._states[0].version
        if self._monitor is not None and self._monitor.plan_version != version:
            self._monitor.plan_version = version
        if self._rank == 0 and agreement.is_free:
            self._propose(number)
        assigned = self._assign(self._states[0], number, microbatches)
        agreement.begin(zlib.crc32(repr((number, assigned)).encode()))
        if agreement.is_closed and self._group is not None:
            _close(self._group, self._sent)  # so that no other rank waits for this one
            self._group = None
        self._begun = QuotaStep(
            number, assigned, self._rank, version, self._checked, self._gathered
        )
        return self._begun

    def assigned(self, number: int, *, microbatches: int | None = None) -> tuple[int, ...]:
        """Return this rank's microbatches of a step, at most `ahead` after the one begun last.

        Steps before the first one have even quotas. `microbatches` is that of `begin`.
        """
        after = -1 if self._begun is None else number - self._begun.number
        if after >= len(self._states):
            raise ContractError("ahead", f"is {len(self._states) - 1}, not {after}")
        state = self._first if after < 0 else self._states[after]
        return self._assign(state, number, microbatches)[self._rank]

    def finish(self) -> None:
        """End the last step, and ask for no more plans."""
        self._end_step()
        self._agreement.finish()
        self.close()

    def close(self) -> None:
        """Ask for no more plans, without a word to other ranks: where an error ends the loop."""
        self._poller.close()

    def leave_step(self) -> None:
        """Drop what is left of a step that a trainer ends before its update, on all ranks alike.

        Gradients that FSDP2 has not summed yet are dropped too: no `zero_grad` sees them.
        """
        if self._begun is not None:
            self._begun.taken = len(self._begun.microbatches)
        self._gathered.leave()

    def total(self, weight: float) -> float:
        """Sum `weight` over all ranks: of this rank's microbatches of the step. A collective.

        Raises `PeerLostError` where the ranks have lost each other.
        """
        if self._group is None:
            raise PeerLostError("the group that sums weights has failed before")
        summed = torch.tensor(weight, dtype=torch.float64, device="cpu")
        try:
            dist.all_reduce(summed, group=self._group)
        except RuntimeError as error:
            raise PeerLostError(f"weights could not be summed: {error}") from error
        return float(summed)

    def _end_step(self) -> None:
        if self._begun is not None and self._begun.taken < len(self._begun.microbatches):
            raise ContractError("step", "not all of its microbatches were taken")

    def _propose(self, step: int) -> None:
        """Propose the newest plan; it will hold two steps later at the earliest."""
        earliest = step + 1 + len(self._states)
        found = self._poller.newest(self._agreement.in_force.version, earliest)
        if found is None:
            return
        quotas = at_least_one([found.quotas[rank] for rank in range(self._size)])
        speeds = speeds_of_quotas(quotas)
        if found.has_slow_ranks:
            speeds = tuple(found.speed([rank]) for rank in range(self._size))
        self._offered = found
        self._agreement.propose(QuotaState(0, found.version, quotas, speeds))

    def _quotas_of(self, offered: QuotaPlan) -> tuple[int, ...]:
        """Return the quotas in force in the order of the plan's replicas."""
        in_force = self._agreement.in_force.quotas
        return tuple(in_force[replica.ranks[0]] for replica in offered.plan.layout.replicas)

    def _assign(
        self, state: QuotaState, number: int, microbatches: int | None
    ) -> tuple[tuple[int, ...], ...]:
        count = self._microbatches if microbatches is None else microbatches
        quotas = state.quotas
        if count < self._size:
            raise ContractError("microbatches", f"are {count} for {self._size} ranks in a step")
        if count != self._microbatches:
            quotas = at_least_one(quotas_by_speed(count, state.speeds))
        if self._work is None:
            return assign_by_count(quotas)
        return assign_by_work(work_of_step(self._work, number, count), state.speeds, quotas)

    def _read(self, plan: Plan) -> Mapping[int, int]:
        quotas = quotas_by_replica(plan, 1, self._microbatches)
        if set(quotas) != set(range(self._size)):
            raise ContractError(
                "layout",
                f"of plan {plan.version} has the ranks {sorted(quotas)}: this loop changes quotas "
                f"alone, and all of its {self._size} ranks stay",
            )
        given = at_least_one([quotas[rank] for rank in range(self._size)])
        if 0 in quotas.values() and given == self._agreement.in_force.quotas:
            raise ContractError("quotas", "are those in force: each rank has a microbatch at least")
        return quotas

    def _start_maximum(self, numbers: list[float]) -> Callable[[], list[float]]:
        tensor = torch.tensor(numbers, dtype=torch.float64, device="cpu")
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._sent = ref(tensor)

        def result() -> list[float]:
            work.wait()
            found: list[float] = tensor.tolist()
            return found

        return result


def _whole(field: str, value: object, *, least: int, why: str = "") -> int:
    """The plain `int` of a whole number. Raises `ContractError`."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ContractError(field, f"must be a whole number, not {value!r}")
    if value < least:
        raise ContractError(field, f"must be {least} or more, not {value}{why}")
    return int(value)


def _close(group: dist.ProcessGroup, sent: ref[torch.Tensor] | None) -> None:
    """Close a group as soon as the tensor that it sent last is released.

    torch joins the group's threads when it is freed. One of them may need the interpreter to
    release that tensor: freed here and now, both would wait for ever.
    """
    dist.destroy_process_group(group)  # the thread still holds it
    is_ending, held = threading.Event(), [group]

    def free() -> None:
        while sent is not None and sent() is not None and not is_ending.wait(_RELEASE_POLL_S):
            pass
        held.clear()

    thread = threading.Thread(target=free, name="resihp-quotas-close", daemon=True)
    start_thread(thread, is_ending.set)


def _check(model: nn.Module, ranks: int) -> None:
    """Raise `ContractError` for a model that communicates in each microbatch.

    Its ranks would wait for each other where they have different numbers of microbatches.
    """
    if isinstance(model, DistributedDataParallel):
        size = model.process_group.size()
        if model.static_graph:
            raise ContractError(
                "model",
                "DDP with static_graph=True cannot leave out the sum of a microbatch: leave it "
                "False, and take find_unused_parameters=True for parameters that are not used",
            )
    elif isinstance(model, FSDPModule):
        reshard(model)
        meshes = {one.device_mesh for one in model.parameters() if isinstance(one, DTensor)}
        size = next(iter(meshes)).size() if len(meshes) == 1 else 0
        if any(mesh.ndim > 1 for mesh in meshes):
            raise ContractError("model", "is sharded over a mesh of several dimensions: use one")
    else:
        raise ContractError(
            "model",
            f"{type(model).__name__} is neither DistributedDataParallel nor sharded by fully_shard "
            "(FSDP2): wrap it in one of them. FSDP1 and tensor parallelism communicate in each "
            "microbatch, and ranks with different numbers of them would hang",
        )
    if size != ranks:
        raise ContractError("model", f"spans {size} of the job's {ranks} ranks: it must span all")
    if any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ContractError(
            "model", "SyncBatchNorm communicates in each microbatch: use GroupNorm or LayerNorm"
        )
