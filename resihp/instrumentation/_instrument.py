"""`resihp.instrument`: one line for a training loop."""

from __future__ import annotations

import gc
from _thread import start_new_thread
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet, finalize, ref

import torch

from resihp.contracts import Action, ContractError, Job, Layout, Schedule
from resihp.hooks import Monitor
from resihp.hooks._environment import rank_of_process, ranks_by_environment
from resihp.layout.rank_groups import RankDescription

from . import _collectives
from ._call_arguments import Lengths
from ._data_loaders import time_data_loaders
from ._deepspeed_engines import (
    EngineUpdates,
    InstructionPasses,
    can_time_instructions,
    describe_pipeline_engine,
    is_engine,
    is_pipeline_engine,
)
from ._inferred_job import InferredJob, job_name
from ._modules import ModulePasses, queue_callback
from ._optimizers import OptimizerSteps, require_optimizers
from ._parallelism import describe_module, describe_stages, has_compiled_parts, own_rank
from ._pass_timer import PassTimer
from ._patches import Patches
from ._pipelines import (
    PipelineTransfers,
    StagePasses,
    microbatches_of,
    schedule_of,
    stages_of,
)

_monitors: WeakSet[InstrumentedMonitor] = WeakSet()
"""Those that `instrument` has made in this process."""


class InstrumentedMonitor(Monitor):
    """Monitor of a loop that `instrument` observes."""

    _inferred: InferredJob
    _patches: Patches
    _timer: PassTimer
    _target: Callable[[], Any]
    _passes: ModulePasses

    @property
    def job(self) -> Job | None:
        """Job as its first rank registers it at the sidecar; None before, and on other ranks."""
        return self._inferred.job

    def remove(self) -> None:
        """Leave the loop, and torch, as they were before `instrument`; what is buffered is sent
        by `close`."""
        self._patches.remove()
        _collectives.forget(self._timer)
        self._timer.stop()

    def _end(self) -> None:
        """End as where nobody holds this: what is left is sent, which is not waited for."""
        self.remove()
        self._finalizer()

    def _observes(self) -> bool:
        return self._target() is not None and not self._patches.is_empty

    def _record_whole_steps(self, owner: Any, method: str, reason: str) -> None:
        """Record nothing but each call of `owner.method`, as a step whose waiting is unknown, and
        warn of the `reason`: passes cannot be told. Verdicts are `inconclusive` then."""
        self.remove()
        self._timer.measures_waiting = False
        self._recording.failures.warn_once(
            "passes", f"{reason}: steps are recorded as a whole, slow devices may not be found"
        )
        self._inferred.count(1)
        self._patches.wrap(owner, method, self.step)


def instrument(
    target: Any,
    optimizer: Any = None,
    *,
    job: str | None = None,
    layout: Layout | None = None,
    microbatches: int | None = None,
    actions: Collection[str] = (Action.NOTIFY,),
    url: str | None = None,
    token: str | None = None,
    lengths: Lengths | None = None,
    **options: Any,
) -> InstrumentedMonitor:
    """Observe a training loop, without another line in it, and return its monitor.

    Every rank calls it once, when the model is wrapped and before the first step. Forward passes of
    `target` with gradients, and their backward passes, are the microbatches; a step ends with the
    optimizer's update, or where the loop uses `monitor.step()`. Time in which a pass waits for
    other ranks is told from its own. Nothing here fails or stops training.

    target        a module (plain, DDP, FSDP2, tensor parallel by DTensor, combined, compiled), a
                  schedule or stage of `torch.distributed.pipelining`, or an engine of DeepSpeed
    optimizer     whose update ends a step, or several; others that hold parameters of theirs count
                  too; None: any that holds parameters of `target`; an engine's own in any case
    job           name; default RESIHP_JOB, else the launcher's run id and the script's name, with
                  the first rank of a model that some of the ranks train
    layout        of the ranks that train the model; default from process groups, device meshes and
                  stages
    microbatches  in a step, over all replicas; default those of the first step
    actions       that the loop can take on, of `resihp.contracts.Action`: "quotas" where it takes
                  its microbatches from `Quotas`; default: verdicts and advice, and no plans
    url, token    of the sidecar, as in `Monitor`
    lengths       function of a call's `args` and `kwargs` that returns the lengths of its
                  sequences; default from masks, cumulative lengths and positions among the
                  arguments, else from the input's shape
    options       of `Monitor`

    Raises `ContractError` if `target` or `optimizer` is something else, and for a `job`, `layout`,
    `microbatches` or `actions` that no job can have.
    """
    stages = stages_of(target)
    if not stages and not isinstance(target, torch.nn.Module):
        raise ContractError(
            "target",
            "must be a module, or a schedule or stage of torch.distributed.pipelining, "
            f"not {type(target).__name__}",
        )
    if not is_engine(target):
        require_optimizers(optimizer)
    monitor = monitor_of(
        partial(_describe, target, stages),
        job=job, layout=layout, microbatches=microbatches, actions=actions, url=url, token=token,
        **options,
    )  # fmt: skip
    monitor._target = ref(target)
    _end_earlier(monitor)
    try:
        modules = [stage.submod for stage in stages] or [target]
        _warn_of_other_device(modules, monitor)
        _expect_hidden_waiting(modules, monitor)
        if is_engine(target):
            _time_engine(target, monitor, lengths)
        elif stages:
            _time_stages(stages, optimizer, monitor, lengths)
            if microbatches is None and (count := microbatches_of(target)):
                monitor._inferred.count(count * len(stages))
        else:
            OptimizerSteps(monitor._timer, [target], optimizer, monitor._patches)
            monitor._passes = ModulePasses(target, monitor._timer, lengths, monitor._patches)
        _remove_with(target, monitor)
    except BaseException:
        monitor.remove()
        raise
    return monitor


def monitor_of(
    describe: Callable[[int], tuple[Schedule, RankDescription]],
    *,
    job: str | None = None,
    layout: Layout | None = None,
    microbatches: int | None = None,
    actions: Collection[str] = (Action.NOTIFY,),
    url: str | None = None,
    token: str | None = None,
    **options: Any,
) -> InstrumentedMonitor:
    """Return a monitor of a loop whose passes the caller reports to its timer.

    describe  returns the order of the passes and the coordinates of a rank; where it fails, the
              rank counts as a replica
    others    as in `instrument`
    """
    rank, in_group = options.pop("rank", None), own_rank()
    rank = rank_of_process(in_group if rank is None else rank)
    schedule, own = Schedule.ONE_F_ONE_B, RankDescription(rank, (rank,))
    unknown: Exception | None = None
    try:
        schedule, own = describe(own.rank)
    except Exception as error:  # noqa: BLE001 the boundary: the rank counts as a replica
        unknown = error
    inferred = InferredJob(
        job or job_name(own.members),
        own,
        schedule,
        layout=layout,
        microbatches=microbatches,
        actions=actions,
    )
    monitor = InstrumentedMonitor(job=inferred, url=url, token=token, rank=rank, **options)
    failures = monitor._recording.failures
    if unknown is not None:
        failures.add("reading the layout", unknown)
    world = ranks_by_environment("WORLD_SIZE") or 1
    if in_group is None and layout is None and world > 1:
        failures.warn_once(
            "group",
            f"there is no process group yet: all {world} ranks are taken for data-parallel ones, "
            "call `instrument` after `init_process_group`, or give it `layout=`",
        )
    if own.members is None and layout is None:
        failures.warn_once(
            "members",
            "the groups of the model do not tell which ranks train it: all are taken for members "
            "of its job, give `layout=` if they are fewer",
        )
    inferred.warn = failures.warn_once
    can_wait = queue_callback() is not None
    timer = PassTimer(monitor._recording, monitor.between_steps, measures_waiting=can_wait)
    timer.on_step_end = inferred.count
    monitor._inferred, monitor._timer, monitor._patches = inferred, timer, Patches()
    if not _collectives.listen(timer) or not can_wait:
        timer.measures_waiting = False
        failures.warn_once(
            "waiting",
            "this torch does not tell waiting for other ranks from a rank's own time: "
            "slow devices may not be found",
        )
    if not time_data_loaders(timer, monitor._patches):
        failures.warn_once(
            "data",
            "this torch does not show its data loaders: a rank that hangs in one is reported after "
            "ten minutes",
        )
    return monitor


def _describe(target: Any, stages: Sequence[Any], rank: int) -> tuple[Schedule, RankDescription]:
    if stages:
        return schedule_of(target), describe_stages(stages, rank)
    if is_pipeline_engine(target):
        return Schedule.ONE_F_ONE_B, describe_pipeline_engine(target, rank)
    return Schedule.ONE_F_ONE_B, describe_module([target], rank)


def _end_earlier(monitor: InstrumentedMonitor) -> None:
    """End the monitors of earlier calls whose target is the same, and those under the same name
    whose target has ended or is not observed any more; warn of one for another target: the sidecar
    would take both for one."""
    name, rank, target = monitor._inferred.name, monitor.rank, monitor._target()
    earlier = list(_monitors)
    _monitors.add(monitor)
    others = []
    for each in earlier:
        if each._target() is target:
            each._end()
        elif (each._inferred.name, each.rank) == (name, rank):
            others.append(each)
    if any(other._observes() for other in others):
        gc.collect()  # a model that nobody holds any more may wait for it
    for other in others:
        if not other._observes():
            other._end()
    if any(other._observes() for other in others):
        monitor._recording.failures.warn_once(
            "name",
            f"another model of this process is instrumented as rank {rank} of {name!r}: give each "
            "its own `job=`",
        )


def _warn_of_other_device(modules: Sequence[torch.nn.Module], monitor: InstrumentedMonitor) -> None:
    """Warn if the modules are on another CUDA device than the current one, which is timed."""
    cuda = torch.cuda
    if not cuda.is_initialized():
        return
    held = (parameter for module in modules for parameter in module.parameters())
    device = next((parameter.device for parameter in held if parameter.is_cuda), None)
    if device is not None and device.index != (current := cuda.current_device()):
        monitor._recording.failures.warn_once(
            "device",
            f"the model is on {device} and the current device is cuda:{current}, whose times and "
            f"probes are taken: call `torch.cuda.set_device({device.index})` before `instrument`",
        )


def _expect_hidden_waiting(
    modules: Sequence[torch.nn.Module], monitor: InstrumentedMonitor
) -> None:
    """Take waiting for unknown where a tensor-parallel group waits inside compiled graphs, which
    Python does not see: as own time it would make all ranks of the group slow."""
    if len(monitor._inferred.own.tensor) > 1 and has_compiled_parts(modules):
        monitor._timer.measures_waiting = False
        monitor._recording.failures.warn_once(
            "compiled",
            "the model is tensor-parallel and compiled, which hides its collectives: waiting for "
            "other ranks is not told from a rank's own time, slow devices may not be found",
        )


def _remove_with(target: Any, monitor: InstrumentedMonitor) -> None:
    """Have the monitor removed when nothing holds `target` any more; torch, which is patched, holds
    the monitor until then.

    Another thread removes it, which waits for `lock`: the garbage collector ends a target anywhere,
    also in the middle of what patches torch. It starts with no lock of Python's.
    """
    safely = monitor._timer.safely
    finalizer = finalize(target, safely(start_new_thread), safely(monitor.remove), ())
    finalizer.atexit = False  # the last step of a process is not ended early
    monitor._patches.add(finalizer.detach)


def _time_stages(
    stages: Sequence[Any], optimizer: Any, monitor: InstrumentedMonitor, lengths: Lengths | None
) -> None:
    timer, patches = monitor._timer, monitor._patches
    OptimizerSteps(timer, [stage.submod for stage in stages], optimizer, patches)
    for chunk, stage in enumerate(stages):
        StagePasses(stage, chunk, timer, lengths, patches)
    if not PipelineTransfers(stages, timer, patches).is_possible:
        monitor._recording.failures.warn_once(
            "transfers",
            "this torch does not show the transfers of its pipelines: slow links are not found",
        )


def _time_engine(engine: Any, monitor: InstrumentedMonitor, lengths: Lengths | None) -> None:
    timer, patches = monitor._timer, monitor._patches
    if not is_pipeline_engine(engine):
        ModulePasses(engine, timer, lengths, patches)
        EngineUpdates(engine, timer, patches)
    elif can_time_instructions(engine):
        InstructionPasses(engine, timer, lengths, patches)
    else:
        reason = "this DeepSpeed does not tell the passes of its pipelines"
        monitor._record_whole_steps(engine, "train_batch", reason)
