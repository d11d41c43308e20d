"""Name and layout of a job, from torch.distributed and from what each rank holds.

Each rank writes its tensor-parallel group, pipeline group and stages to the store of the default
process group. Rank 0 reads them all, from the thread that sends telemetry and without waiting, and
marks there that it has. Each of the others looks for that mark alone, so that the store of a job of
thousands of ranks has little to do. Training neither takes part in a collective operation nor
blocks.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from resihp.contracts import Job, Layout, Replica, Schedule, Stage

_KEY = "resihp/instrument"
_DESCRIBED = f"{_KEY}/described"
_PATIENCE_S = 60.0
"""Time after which ranks that have not described themselves are taken for data-parallel ones, and
rank 0 is no longer waited for."""


def job_name() -> str:
    """Return RESIHP_JOB, else the name of the run in a worker of Ray Train, else the launcher's
    run id and the script's name."""
    name = os.environ.get("RESIHP_JOB") or _run_of_ray()
    if not name:
        script = Path(sys.argv[0] or "job").stem or "job"
        run = os.environ.get("TORCHELASTIC_RUN_ID", "none")
        name = script if run == "none" else f"{script}-{run}"
    return acceptable(name)


def acceptable(name: str) -> str:
    """Return `name` without what the name of a job may not have.

    >>> acceptable("runs/of today")
    'runs-of today'
    """
    return "".join(c if c.isprintable() and c != "/" else "-" for c in name)[:128]


def _run_of_ray() -> str | None:
    """Name of the run of Ray Train of which this process is a worker; None elsewhere."""
    train = sys.modules.get("ray.train")
    try:
        return None if train is None else str(train.get_context().get_experiment_name())
    except Exception:  # noqa: BLE001 another process that has imported Ray, or another Ray
        return None


@dataclass(frozen=True)
class RankDescription:
    """Coordinates that one rank knows of itself.

    tensor    ranks of its tensor-parallel group, in order
    pipeline  ranks of its pipeline in the order of their stages; () without a pipeline
    stages    number of all stages of the pipeline; chunks: those that this rank holds
    """

    rank: int
    tensor: tuple[int, ...]
    pipeline: tuple[int, ...] = ()
    stages: int = 1
    chunks: int = 1

    @property
    def is_alone(self) -> bool:
        """True if the rank holds a whole replica."""
        return len(self.tensor) == 1 and len(self.pipeline) <= 1


class InferredJob:
    """A job whose microbatches are counted in its first step.

    name         of the job
    job          on rank 0, once it is known
    layout       given by the user; None: inferred from the ranks' descriptions
    microbatches of all replicas in a step, given by the user; None: those of this rank's first
                 step times the number of replicas
    """

    def __init__(
        self,
        name: str,
        own: RankDescription,
        schedule: Schedule,
        *,
        layout: Layout | None,
        microbatches: int | None,
    ) -> None:
        self.name = name
        self.job: Job | None = None
        self._own, self._schedule = own, schedule
        self._layout, self._microbatches = layout, microbatches
        self._passes = 0
        self._asked_s: float | None = None
        self._others = _Descriptions(own)
        if layout is None:
            self._others.publish()

    def count(self, passes: int) -> None:
        """Take the number of forward passes of a step of this rank."""
        if not self._passes:
            self._passes = passes // self._own.chunks

    def describe(self, *, now: bool) -> Job | None:
        """Return the job on rank 0; None while the first step lasts or other ranks are awaited."""
        if self._own.rank or (self._microbatches is None and not self._passes and not now):
            return None
        layout = self._layout
        if layout is None:
            ranks = self._others.read(accept_missing=now or self._is_late())
            if ranks is None:
                return None
            layout = layout_of(ranks)
        each = max(self._passes, 1)
        chunks = layout.replicas[0].chunks
        self.job = Job(
            name=self.name,
            layout=layout,
            microbatches=self._microbatches or each * layout.dp,
            schedule=self._schedule if layout.pp > 1 else Schedule.ONE_F_ONE_B,
            chunks=chunks,
            device=_device(),
        )
        self._others.mark_described()
        return self.job

    def is_described(self) -> bool:
        """Return whether rank 0 has described the job, or is not waited for any more."""
        return self._others.is_described() or self._is_late()

    def _is_late(self) -> bool:
        if self._asked_s is None:
            self._asked_s = monotonic()
        return monotonic() - self._asked_s > _PATIENCE_S


def layout_of(ranks: Sequence[RankDescription]) -> Layout:
    """Return the layout that all ranks' descriptions make up.

    A model is as many layers as it has chunks of stages: their real number is not known. Ranks that
    no complete replica holds are replicas of their own.
    """
    by_rank = {one.rank: one for one in ranks}
    replicas: list[Replica] = []
    placed: set[int] = set()
    depth = max(one.stages for one in ranks)
    for one in sorted(ranks, key=lambda one: one.rank):
        if one.rank in placed:
            continue
        pipeline = one.pipeline or (one.rank,)
        groups = [by_rank[rank].tensor for rank in pipeline if rank in by_rank]
        members = {rank for group in groups for rank in group}
        if len(groups) < len(pipeline) or members & placed or members - by_rank.keys():
            groups, members = [(one.rank,)], {one.rank}
        placed |= members
        replicas.append(_replica(groups, depth))
    return Layout(tuple(replicas))


def _replica(groups: Sequence[tuple[int, ...]], layers: int) -> Replica:
    """Replica of `groups`, one a stage, with the layers spread over them chunk by chunk."""
    depth = len(groups)
    chunks = max(1, layers // depth) if depth > 1 else 1
    if depth == 1:
        return Replica((Stage(groups[0], (0, layers)),))
    return Replica(
        tuple(
            Stage(
                group,
                (at, at + 1),
                more_layers=tuple((at + c * depth, at + c * depth + 1) for c in range(1, chunks)),
            )
            for at, group in enumerate(groups)
        )
    )


class _Descriptions:
    """Descriptions of all ranks in the store of the default process group."""

    def __init__(self, own: RankDescription) -> None:
        self._own = own
        self._world = 1
        self._store: Any = None
        distributed = torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            self._world = distributed.get_world_size()
            get_store = getattr(distributed.distributed_c10d, "_get_default_store", None)
            self._store = None if get_store is None else get_store()

    def publish(self) -> None:
        """Write this rank's description."""
        if self._store is not None:
            one = self._own
            text = json.dumps([one.tensor, one.pipeline, one.stages, one.chunks])
            self._store.set(f"{_KEY}/{one.rank}", text)

    def read(self, *, accept_missing: bool) -> list[RankDescription] | None:
        """Return all descriptions; None while one is missing, unless it may be."""
        own, ranks = self._own, range(self._world)
        missing = [RankDescription(rank, (rank,)) for rank in ranks]
        if self._store is None or own.is_alone:
            return missing
        keys = [f"{_KEY}/{rank}" for rank in ranks]
        if not accept_missing and not self._store.check(keys):
            return None
        return [
            _parsed(rank, self._store.get(key)) if self._store.check([key]) else missing[rank]
            for rank, key in zip(ranks, keys, strict=True)
        ]

    def mark_described(self) -> None:
        """Tell the other ranks that the job is known."""
        if self._store is not None:
            self._store.set(_DESCRIBED, "1")

    def is_described(self) -> bool:
        """Return whether the mark is there."""
        return self._store is None or bool(self._store.check([_DESCRIBED]))


def _parsed(rank: int, text: bytes) -> RankDescription:
    tensor, pipeline, stages, chunks = json.loads(text)
    return RankDescription(rank, tuple(tensor), tuple(pipeline), stages, chunks)


def _device() -> str:
    cuda = torch.cuda
    return cuda.get_device_name() if cuda.is_available() and cuda.is_initialized() else "cpu"
