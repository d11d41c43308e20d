"""Microbatch records of one rank, from its profile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from resihp.contracts import Op

from ._passes import PassWindows, StepRange, find_passes, find_steps
from ._rank_profile import Communication, ProcessGroup, Shapes, read_profile
from ._timing import PassClock, clock_of


class Row(NamedTuple):
    """One record; the names are those of `TelemetryBatch`."""

    rank: int
    step: int
    microbatch: int
    op: Op
    compute_ms: float
    wait_ms: float = float("nan")
    chunk: int = 0
    peer: int = -1
    tokens: int = -1
    sequences: int = -1
    sum_sq_len: int = -1
    max_len: int = -1


class Exposed(NamedTuple):
    """Communication in a step, and how long the rank did no work of its own meanwhile."""

    step: int
    communication: Communication
    exposed_us: float


@dataclass(frozen=True)
class RankRecords:
    """Contents of one rank's file as records; their steps are indices into `steps`.

    epoch_us     what to add to a time to have that of the host's clock; NaN where unknown
    is_numbered  whether the profiler has numbered the steps
    is_split     whether backward passes ran in two halves
    untimed_ms   time of a usual step in which the rank neither computed, loaded data nor waited for
                 others; NaN where no step has both ends
    """

    rank: int
    epoch_us: float
    groups: tuple[ProcessGroup, ...]
    steps: Sequence[StepRange]
    is_numbered: bool
    is_split: bool
    untimed_ms: float
    rows: Sequence[Row]
    exposed: Sequence[Exposed]


def read_rank(path: Path, rank: int | None) -> RankRecords:
    """The records in a file; `rank` is that of its name. Raises `TraceError`."""
    profile = read_profile(path, rank)
    clock = clock_of(profile)
    steps, is_numbered = find_steps(profile)
    passes = find_passes(profile, steps)
    rows = [
        row
        for step, each in enumerate(passes)
        for row in _rows(profile.rank, step, each, clock, profile.shapes)
    ]
    exposed = list(_exposed(steps, profile.communications, clock))
    return RankRecords(
        rank=profile.rank,
        epoch_us=profile.epoch_us,
        groups=profile.groups,
        steps=steps,
        is_numbered=is_numbered,
        is_split=any(one.is_split for each in passes for one in each),
        untimed_ms=_untimed_ms(steps, rows, exposed),
        rows=rows,
        exposed=exposed,
    )


def joined_cycles(cycles: Sequence[RankRecords]) -> RankRecords:
    """One rank's records in several cycles of the profiler's schedule, whose steps differ."""
    firsts = np.cumsum([0, *(len(one.steps) for one in cycles)]).tolist()
    parts = list(zip(cycles, firsts, strict=False))
    return replace(
        cycles[0],
        groups=tuple(dict.fromkeys(group for one in cycles for group in one.groups)),
        steps=[step for one in cycles for step in one.steps],
        is_split=any(one.is_split for one in cycles),
        untimed_ms=float(np.median([one.untimed_ms for one in cycles])),
        rows=[row._replace(step=at + row.step) for one, at in parts for row in one.rows],
        exposed=[each._replace(step=at + each.step) for one, at in parts for each in one.exposed],
    )


def _rows(
    rank: int, step: int, passes: Sequence[PassWindows], clock: PassClock, shapes: Shapes
) -> Iterator[Row]:
    """Records of everything that the rank does alone in a step."""
    work = {
        (one.chunk, one.microbatch): _work(shapes, one) for one in passes if one.op is Op.FORWARD
    }
    for one in passes:
        if one.op is Op.DATA:
            lasted_us = sum(window.stop_us - window.start_us for window in one.windows)
            yield Row(rank, step, -1, Op.DATA, lasted_us * 1e-3)
            continue
        own_us, wait_us = clock.time(one.windows)
        if own_us > 0:
            known = work.get((one.chunk, one.microbatch)) if one.microbatch >= 0 else None
            times = own_us * 1e-3, wait_us * 1e-3
            yield Row(rank, step, one.microbatch, one.op, *times, one.chunk, -1, *(known or ()))


def _untimed_ms(
    steps: Sequence[StepRange], rows: Sequence[Row], exposed: Sequence[Exposed]
) -> float:
    whole = np.array([step.stop_us - step.start_us for step in steps]) * 1e-3
    at = [row.step for row in rows]
    own = np.bincount(at, [row.compute_ms for row in rows], len(steps))
    waits = np.bincount(at, np.nan_to_num([row.wait_ms for row in rows]), len(steps))
    at, idle_us = [one.step for one in exposed], [one.exposed_us for one in exposed]
    talks = np.bincount(at, idle_us, len(steps)) * 1e-3  # in passes and between them
    known = np.isfinite(whole) & (own > 0)
    left = (whole - own - np.maximum(waits, talks))[known]
    return max(float(np.median(left)), 0.0) if left.size else float("nan")


def _work(shapes: Shapes, forward: PassWindows) -> tuple[int, int, int, int] | None:
    """Tokens, sequences, sum of squared lengths and longest sequence of a forward pass; None where
    no shapes were recorded. Tokens are the mean number of rows over the elements of all matrices of
    weights."""
    inside = np.zeros(shapes.start.size, bool)
    for window in forward.windows:
        inside |= (shapes.start >= window.start_us) & (shapes.start < window.stop_us)
    weights = shapes.weights[inside]
    if not weights.sum():
        return None
    tokens = round(float((shapes.rows[inside] * weights).sum() / weights.sum()))
    sized = np.flatnonzero(inside & (shapes.length > 0))
    if not sized.size:
        return tokens, 1, tokens * tokens, tokens
    said = sized[np.argmax(shapes.attention[sized])]
    sequences, length = int(shapes.sequences[said]), int(shapes.length[said])
    return tokens, sequences, sequences * length * length, length


def _exposed(
    steps: Sequence[StepRange], communications: Sequence[Communication], clock: PassClock
) -> Iterator[Exposed]:
    starts = [step.start_us for step in steps]
    for one in communications:
        at = int(np.searchsorted(starts, one.host_us, side="right")) - 1
        if at >= 0 and one.host_us < steps[at].stop_us:
            yield Exposed(at, one, clock.exposed_us(one.start_us, one.stop_us))
