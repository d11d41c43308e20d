"""Places of a layout: what each holds of the model, and which devices there are known to be slow.

A place is a replica's chunk of a stage; a tensor-parallel group computes it as one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Layout, Stage, Status, Verdict

from ..arrays import quantile
from .operations import Floats, Ints

_NO_LAYER = 0.1
"""Size, in layers, of a chunk that holds none: what a pass takes besides."""


@dataclass(frozen=True, eq=False)
class HeldParts:
    """Parts of the model that the places compute.

    A plan gives devices that are slow less to do, and what a lost one held to others. Such a place
    takes longer or shorter than its peers with healthy devices.

    size  [1, C, D, 1, 1] layers times the largest share that a member holds of them, relative to
          the lower median replica's; 1 where a replica has no such stage
    kind  [C, D] equal numbers where replicas hold as much; times need not be quite in proportion
    """

    size: Floats
    kind: Ints

    @classmethod
    def of(cls, layout: Layout, chunks: int) -> HeldParts:
        """The parts in a layout."""
        held = np.full((chunks * layout.pp, layout.dp), np.nan)
        head = np.zeros(held.shape, np.int64)
        for dp, replica in enumerate(layout.replicas):
            for pp, stage in enumerate(replica.stages):
                held[pp :: layout.pp, dp] = _sizes(stage, chunks)
                head[-layout.pp + pp, dp] = stage.chunks[-1][1] == layout.layers
        size = np.nan_to_num(held / quantile(held, 0.5, axis=1), nan=1.0)
        _, number = np.unique(np.round(size, 9), return_inverse=True)
        kind = 2 * number.reshape(size.shape).astype(np.int64) + head
        return cls(size[None, :, :, None, None], kind)


def _sizes(stage: Stage, chunks: int) -> NDArray[np.float64]:
    """Size of each chunk of a stage, as the member with the largest share computes it; chunks that
    the layout does not tell apart are alike."""
    layers = np.resize([float(stop - start) for start, stop in stage.chunks], chunks)
    return np.asarray(np.maximum(layers, _NO_LAYER) * max(stage.shares) / sum(stage.shares))


@dataclass(frozen=True, kw_only=True)
class SlowDevice:
    """A device that the detector has named, and that a what-if analysis need not find again.

    dp, pp  replica and stage that it is part of
    factor  its slowdown
    share   its share of the layers, of the largest one in its group
    since   first slow step; None: from the start
    until   first step in which it was healthy again; None: still slow
    by_host its host is the cause, as its sensors show
    """

    rank: int
    dp: int
    pp: int
    factor: float
    share: float = 1.0
    since: int | None = None
    until: int | None = None
    by_host: bool = False

    @classmethod
    def named(
        cls, verdicts: Iterable[Verdict], layout: Layout, *, by_host: Collection[int] = ()
    ) -> tuple[SlowDevice, ...]:
        """The devices of a layout that verdicts name, the slowest first. `by_host` are the ranks
        whose hosts are the cause."""
        places = {place.rank: place for place in layout.places()}
        found = [
            cls(
                rank=v.rank,
                dp=place.dp,
                pp=place.pp,
                factor=v.slowdown,
                share=_share(layout.stage_at(place), v.rank),
                since=v.since_step,
                by_host=v.rank in by_host,
            )
            for v in verdicts
            if v.status is Status.FAIL_SLOW and (place := places.get(v.rank)) is not None
        ]
        return tuple(sorted(found, key=lambda device: (-device.factor, device.rank)))


def known_factor(
    slow: Sequence[SlowDevice], steps: Ints, replicas: Ints, *, stages: int, chunks: int
) -> NDArray[np.float64]:
    """Factor [1, C, D, T, 1] by which known devices make every place slower at every step.

    `steps` [T] and `replicas` [D] are their numbers. The places are those of `Effects`: each chunk
    of a stage is as slow as the device that holds the stage. One that holds less than others of its
    group costs less, or nothing.
    """
    factor = np.ones((1, stages * chunks, replicas.size, steps.size, 1))
    for device in slow:
        on = np.ones(steps.size, bool) if device.since is None else steps >= device.since
        if device.until is not None:
            on &= steps < device.until
        if device.pp < stages:
            held = factor[0, device.pp :: stages, :, :, 0]
            rows = np.ix_(np.arange(chunks), replicas == device.dp, on)
            held[rows] = np.maximum(held[rows], device.factor * device.share)
    return factor


def _share(stage: Stage, rank: int) -> float:
    """Share of a rank of the stage, of the largest one."""
    return stage.shares[stage.ranks.index(rank)] / max(stage.shares)
