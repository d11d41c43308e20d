"""Slow devices that a what-if analysis need not find again."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Layout, Status, Verdict

from .operations import Ints


@dataclass(frozen=True, kw_only=True)
class SlowDevice:
    """A device that the detector has named.

    dp, pp  replica and stage that it is part of
    factor  its slowdown
    since   first slow step; None: from the start
    until   first step in which it was healthy again; None: still slow
    """

    rank: int
    dp: int
    pp: int
    factor: float
    since: int | None = None
    until: int | None = None

    @classmethod
    def named(cls, verdicts: Iterable[Verdict], layout: Layout) -> tuple[SlowDevice, ...]:
        """The devices of a layout that verdicts name, the slowest first."""
        places = {place.rank: place for place in layout.places()}
        found = [
            cls(
                rank=verdict.rank,
                dp=places[verdict.rank].dp,
                pp=places[verdict.rank].pp,
                factor=verdict.slowdown,
                since=verdict.since_step,
            )
            for verdict in verdicts
            if verdict.status is Status.FAIL_SLOW and verdict.rank in places
        ]
        return tuple(sorted(found, key=lambda device: (-device.factor, device.rank)))


def known_factor(
    slow: Sequence[SlowDevice], steps: Ints, replicas: Ints, *, stages: int, chunks: int
) -> NDArray[np.float64]:
    """Factor [1, C, D, T, 1] of the slowest known device of every place at every step.

    `steps` [T] and `replicas` [D] are their numbers. The places are those of `Effects`: each chunk
    of a stage is as slow as the device that holds the stage.
    """
    factor = np.ones((1, stages * chunks, replicas.size, steps.size, 1))
    for device in slow:
        on = np.ones(steps.size, bool) if device.since is None else steps >= device.since
        if device.until is not None:
            on &= steps < device.until
        if device.pp < stages:
            held = factor[0, device.pp :: stages, :, :, 0]
            rows = np.ix_(np.arange(chunks), replicas == device.dp, on)
            held[rows] = np.maximum(held[rows], device.factor)
    return factor
