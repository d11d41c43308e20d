"""Name and layout of a job, from torch.distributed and from what each rank holds.

Each rank writes its tensor-parallel group, pipeline group and stages to the store of the default
process group, under keys of this job: a process may train several models, and some of the ranks a
model of their own. The first rank of the job reads them all, from the thread that sends telemetry
and without waiting, and marks there that it has. Each of the others looks for that mark alone,
until it has seen it, so that the store of a job of thousands of ranks has little to do. Training
neither takes part in a collective operation nor blocks.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import Any
from weakref import WeakKeyDictionary

import torch

from resihp.contracts import Action, ContractError, Job, Layout, Links, Schedule
from resihp.contracts.job import acceptable_name, name_of_run
from resihp.hooks._environment import ranks_by_environment
from resihp.layout.rank_groups import RankDescription, layout_of

_KEY = "resihp/instrument"
_PATIENCE_S = 60.0
"""Time after which ranks that have not described themselves are taken for data-parallel ones, and
the first rank is no longer waited for."""
_ANSWER_S = 1.0
"""Time for which the store's answer is awaited; the store of a host that hangs gives none."""

_jobs: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""Number of this process's jobs of each name that have described themselves in a store."""


def job_name(members: tuple[int, ...] | None = ()) -> str:
    """Return RESIHP_JOB, else the name of the run in a worker of Ray Train, else the launcher's
    run id and the script's name, with the first of the `members` where those are not all ranks."""
    name = os.environ.get("RESIHP_JOB") or _run_of_ray()
    if name:
        return acceptable_name(name)
    script = Path(sys.argv[0] or "job").stem or "job"
    name = name_of_run(script, os.environ.get("TORCHELASTIC_RUN_ID", "none"))
    return f"{name[:100]}-rank{members[0]}" if members else name


def _run_of_ray() -> str | None:
    """Name of the run of Ray Train of which this process is a worker; None elsewhere."""
    train = sys.modules.get("ray.train")
    try:
        return None if train is None else str(train.get_context().get_experiment_name())
    except Exception:  # noqa: BLE001 another process that has imported Ray, or another Ray
        return None


def require_valid(
    name: str, layout: Layout | None, microbatches: int | None, actions: Collection[str]
) -> None:
    """Raise `ContractError` for what no job can have, which would else be told where it is sent."""
    if layout is None:
        layout = Layout.grid(dp=1, pp=1, tp=1, layers=1)
    elif not isinstance(layout, Layout):
        raise ContractError("layout", f"must be a Layout, not {type(layout).__name__}")
    least = 1 if microbatches is None else microbatches
    _described(name, Schedule.ONE_F_ONE_B, layout, least, Action.ordered(actions))


def _described(
    name: str,
    schedule: Schedule,
    layout: Layout,
    microbatches: int,
    actions: tuple[Action, ...],
) -> Job:
    chunks = layout.replicas[0].chunks
    if layout.pp == 1:
        schedule = Schedule.ONE_F_ONE_B
    if chunks > 1 and schedule is Schedule.ONE_F_ONE_B:
        schedule = Schedule.INTERLEAVED
    return Job(
        name=name,
        layout=layout,
        microbatches=microbatches,
        schedule=schedule,
        chunks=chunks,
        device=_device(),
        links=_links(),
        actions=actions,
    )


class InferredJob:
    """A job whose microbatches are counted in its first step.

    name         of the job
    own          this rank's description
    job          on the first rank of the layout, once it is known
    warn         called, at most once, with kind and text of a warning
    layout       given by the user; None: inferred from the ranks' descriptions
    microbatches of all replicas in a step, given by the user; None: those of this rank's first
                 step times the number of replicas
    actions      that the loop can take on

    Raises `ContractError` for a name, layout, microbatches or actions that no job can have.
    """

    def __init__(
        self,
        name: str,
        own: RankDescription,
        schedule: Schedule,
        *,
        layout: Layout | None,
        microbatches: int | None,
        actions: Collection[str] = (Action.NOTIFY,),
    ) -> None:
        self.name, self._actions = name, Action.ordered(actions)
        require_valid(name, layout, microbatches, self._actions)
        self.job: Job | None = None
        self.warn: Callable[[str, str], object] = _say_nothing
        self.own, self._schedule = own, schedule
        self._layout, self._microbatches = layout, microbatches
        self._passes = 0
        self._asked_s: float | None = None
        self._others = _Descriptions(name, own)
        if layout is None:
            self._others.publish()

    def count(self, passes: int) -> None:
        """Take the number of forward passes of a step of this rank."""
        if not self._passes:
            self._passes = passes // self.own.chunks

    def describe(self, *, now: bool) -> Job | None:
        """Return the job on its first rank; None while the first step lasts or other ranks are
        awaited."""
        layout, others = self._layout, self._others
        if self.own.rank != (others.members[0] if layout is None else min(layout.ranks)):
            return None
        if self._microbatches is None and not self._passes and not now:
            return None
        accept_missing = now or self._is_late()
        if layout is None and not (accept_missing or others.are_told_apart()):
            return None
        if layout is None and others.join():
            self.warn(
                "members",
                f"several groups of ranks train {self.name!r}: all ranks are taken for members of "
                "one job; give models of their own their own `job=`, or give `layout=`",
            )
            return self.describe(now=now)
        if layout is None:
            ranks = others.read(accept_missing=accept_missing)
            if ranks is None:
                return None
            layout = layout_of(ranks)
        microbatches = self._microbatches or max(self._passes, 1) * layout.dp
        self.job = _described(self.name, self._schedule, layout, microbatches, self._actions)
        others.mark_described()
        return self.job

    def is_described(self) -> bool:
        """Return whether the first rank has described the job, or is not waited for any more."""
        return self._is_late() or self._others.is_described()

    def _is_late(self) -> bool:
        if self._asked_s is None:
            self._asked_s = monotonic()
        return monotonic() - self._asked_s > _PATIENCE_S


class _Descriptions:
    """Descriptions of the members of a job in the store of the default process group.

    Without such a group all ranks of the launcher are taken for data-parallel ones.

    The keys count the jobs of the same name, as of models that are trained one after the other:
    every rank makes them in the same order.
    """

    def __init__(self, name: str, own: RankDescription) -> None:
        self._own = own
        self._world = ranks_by_environment("WORLD_SIZE") or 1
        number = 0
        self._store: Any = None
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self._world = distributed.get_world_size()
            get_store = getattr(distributed.distributed_c10d, "_get_default_store", None)
            self._store = None if get_store is None else get_store()
        if self._store is not None:
            numbers = _jobs.setdefault(self._store, Counter())
            number, numbers[name] = numbers[name], numbers[name] + 1
        self._key = f"{_KEY}/{name}/{number}"
        self._described = f"{self._key}/described"
        self._is_described = self._store is None
        self._some = own.members or ()
        self._asking: Thread | None = None

    @property
    def members(self) -> Sequence[int]:
        """Ranks of the job, in order."""
        return self._some or range(self._world)

    def are_told_apart(self) -> bool:
        """Return whether the ranks beside the members have described themselves for some job."""
        others = [f"{_KEY}/{rank}" for rank in self._beside()]
        return not others or self._store is None or bool(self._store.check(others))

    def join(self) -> bool:
        """Take all ranks for members if one beside them has described itself for a job of this
        name, as where each group has a share of one model; return whether."""
        is_shared = self._store is not None and any(
            self._store.check([f"{self._key}/{rank}"]) for rank in self._beside()
        )
        if is_shared:
            self._some = ()
        return is_shared

    def _beside(self) -> list[int]:
        return sorted(set(range(self._world)).difference(self.members))

    def publish(self) -> None:
        """Write this rank's description, and that it has written one."""
        if self._store is not None:
            one = self._own
            text = json.dumps([one.tensor, one.pipeline, one.stages, one.chunks])
            self._store.set(f"{self._key}/{one.rank}", text)
            self._store.set(f"{_KEY}/{one.rank}", "1")

    def read(self, *, accept_missing: bool) -> list[RankDescription] | None:
        """Return all descriptions; None while one is missing, unless it may be."""
        own, ranks = self._own, self.members
        missing = [RankDescription(rank, (rank,)) for rank in ranks]
        if self._store is None or own.is_alone:
            return missing
        keys = [f"{self._key}/{rank}" for rank in ranks]
        if not accept_missing and not self._store.check(keys):
            return None
        return [
            _parsed(one.rank, self._store.get(key)) if self._store.check([key]) else one
            for one, key in zip(missing, keys, strict=True)
        ]

    def mark_described(self) -> None:
        """Tell the other ranks that the job is known."""
        if self._store is not None:
            self._store.set(self._described, "1")

    def is_described(self) -> bool:
        """Return whether the mark has been seen, or the store has been lost.

        A thread of its own asks: a store does not answer while its host hangs, nor while this
        process waits in it.
        """
        if not self._is_described and (self._asking is None or not self._asking.is_alive()):
            self._asking = Thread(target=self._ask, name="resihp-store", daemon=True)
            self._asking.start()
            self._asking.join(_ANSWER_S)
        return self._is_described

    def _ask(self) -> None:
        try:
            self._is_described = bool(self._store.check([self._described]))
        except Exception:  # noqa: BLE001 the boundary: nobody can set the mark any more
            self._is_described = True


def _say_nothing(kind: str, text: str) -> None: ...


def _parsed(rank: int, text: bytes) -> RankDescription:
    tensor, pipeline, stages, chunks = json.loads(text)
    return RankDescription(rank, tuple(tensor), tuple(pipeline), stages, chunks)


def _links() -> Links:
    """Network with the launcher's number of ranks per node, if it gives one."""
    ranks = ranks_by_environment("LOCAL_WORLD_SIZE")
    return Links() if ranks is None else Links(ranks_per_node=ranks)


def _device() -> str:
    cuda = torch.cuda
    return cuda.get_device_name() if cuda.is_available() and cuda.is_initialized() else "cpu"
