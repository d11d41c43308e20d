"""Sentences on the place at which a cause is largest."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Cause

from ..arrays import mean, quantile
from .effects import Effects
from .operations import Floats, Ints

_LEAST = 1.02  # least ratio to the rest that is reported
_MOST = 0.5  # share from which a place has most of something


def in_passes(effects: Effects, stages: int) -> dict[Cause, str]:
    """Sentences on the heaviest stage and on uneven microbatches."""
    alike = effects.without([Cause.DEVICE])
    found = {}
    if stages > 1 and (words := _heavy_stage(alike, stages)):
        found[Cause.STAGE_IMBALANCE] = words
    if words := _uneven_work(alike):
        found[Cause.SEQUENCE_IMBALANCE] = words
    return found


def _heavy_stage(alike: NDArray[np.float64], stages: int) -> str:
    """Sentence on the heaviest stage, by the median replica's mean time over all its chunks."""
    passes = quantile(mean(alike, axis=(3, 4)), 0.5, axis=2)[:, :, 0, 0, 0]
    weight = np.nansum(passes, axis=0).reshape(-1, stages).sum(axis=0)
    heavy = int(np.argmax(weight))
    others = float(np.delete(weight, heavy).mean())
    ratio = float(weight[heavy]) / others if others > 0 else 1.0
    if ratio < _LEAST:
        return ""
    rest = "the others" if stages > 2 else "the other one"
    return f"stage {heavy} takes {ratio:.2f}x as long as {rest}, whatever the devices"


def _uneven_work(alike: NDArray[np.float64]) -> str:
    """Sentence on the largest work of a microbatch relative to the mean of its step."""
    relative = alike / mean(alike, axis=(2, 3, 4))
    work = mean(relative, axis=(0, 1))[0, 0]
    of_step = mean(work, axis=(0, 2))
    longest = _usual_most(work / of_step, (0, 2))
    fullest = _usual_most(mean(work, axis=2) / of_step, 0)
    if longest < _LEAST:
        return ""
    words = f"the longest one of a step has {longest:.2f}x the mean work"
    if work.shape[0] > 1 and fullest >= _LEAST:
        words += f", the fullest replica {fullest:.2f}x"
    return words


def _usual_most(values: Floats, axis: int | tuple[int, ...]) -> float:
    return float(np.nan_to_num(mean(quantile(values, 1.0, axis), axis=(0, 1, 2)), nan=1.0).item())


def most_of(lost: Mapping[str, Floats], replicas: Ints | None = None) -> tuple[str, str]:
    """The kind with most of the lost time [S, D], and where it is; empty where none is lost.

    `replicas` [D] are their numbers, if they are not counted from 0.
    """
    kind = max(lost, key=lambda name: float(lost[name].sum()))
    return (kind, _place(lost[kind], replicas)) if lost[kind].any() else ("", "")


def _place(lost: Floats, replicas: Ints | None) -> str:
    """The stage and replica with most of the lost time, as words; empty where none has."""
    total = float(lost.sum())
    if total <= 0:
        return ""
    stage, replica = np.unravel_index(int(np.argmax(lost)), lost.shape)
    if lost.size > 1 and float(lost[stage, replica]) > _MOST * total:
        number = replica if replicas is None else replicas[replica]
        return f" of stage {stage} in replica {number}"
    heavy = int(np.argmax(lost.sum(axis=1)))
    if lost.shape[0] > 1 and float(lost[heavy].sum()) > _MOST * total:
        return f" of stage {heavy}"
    return ""
