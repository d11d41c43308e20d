"""Steps of a profile, and the passes of microbatches in them.

Steps are the profiler's own (`ProfilerStep#N`), else they end with each optimizer step. Passes are,
in this order: the ranges that the job named forward and backward, the actions of a pipeline
schedule of PyTorch, and what autograd's sequence numbers tell apart. Without any a step is one
forward pass.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from resihp.contracts import Op

from ._autograd import Window, autograd_passes
from ._rank_profile import Mark, RankProfile

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_MICROBATCH = re.compile(
    r"(?:microbatch|micro_batch|mb|#|forward|backward)\s*[=_:# ]?\s*(\d+)", re.IGNORECASE
)
_ACTION = re.compile(r"PP:(\d+)([FBIW])(\d+)")
_OF_TORCH = re.compile(
    r"FSDP::|FullyShardedDataParallel|DistributedDataParallel|PP:|Torch-Compiled|Optimizer\."
)
"""Ranges of PyTorch itself, which are not whole passes."""
_OPTIMIZER = re.compile(r"^Optimizer\.step#", re.IGNORECASE)
_OWN_OPTIMIZER = re.compile(r"optimizer[._ ]?step", re.IGNORECASE)
_DATA = re.compile(r"dataloader|data[_ ]?load|get_batch|garbage|gc\.collect", re.IGNORECASE)
_PASS = (
    (re.compile(r"backward", re.IGNORECASE), Op.BACKWARD),
    (re.compile(r"forward", re.IGNORECASE), Op.FORWARD),
)


class StepRange(NamedTuple):
    """A step of one rank."""

    start_us: float
    stop_us: float
    number: int


@dataclass(frozen=True)
class PassWindows:
    """A forward or backward pass, or another part of a step: the windows in which it ran.

    is_split  one of the two halves of a backward pass
    """

    op: Op
    microbatch: int
    windows: tuple[Window, ...]
    chunk: int = 0
    is_split: bool = False


def find_steps(profile: RankProfile) -> tuple[list[StepRange], bool]:
    """The steps of a profile, and whether their numbers are those of the profiler."""
    found = [
        StepRange(mark.start_us, mark.stop_us, int(match.group(1)))
        for mark in profile.marks
        if (match := _STEP.search(mark.name))
    ]
    if found:
        return sorted(found), True
    ends = sorted(mark.stop_us for mark in _updates(profile.marks))
    edges = [-np.inf, *ends[:-1], np.inf]
    return [StepRange(*edge, number) for number, edge in enumerate(pairwise(edges))], False


def find_passes(profile: RankProfile, steps: Sequence[StepRange]) -> list[list[PassWindows]]:
    """The passes, optimizer steps and loads of data in each step."""
    starts = [step.start_us for step in steps]
    marks: list[list[Mark]] = [[] for _ in steps]
    for mark in profile.marks:
        at = int(np.searchsorted(starts, mark.start_us, side="right")) - 1
        if at >= 0 and mark.start_us < steps[at].stop_us:
            marks[at].append(mark)
    recorded: list[list[tuple[Window | None, list[Window]]]] = [[] for _ in steps]
    for forward, backward in autograd_passes(profile.operators):
        at = int(np.searchsorted(starts, backward[0].start_us, side="right")) - 1
        if at >= 0 and backward[0].start_us < steps[at].stop_us:
            recorded[at].append((forward, backward))
    stages = _stages(profile.marks)
    return _from_zero(
        [list(_passes_of(step, marks[at], recorded[at], stages)) for at, step in enumerate(steps)]
    )


def _from_zero(steps: Sequence[list[PassWindows]]) -> list[list[PassWindows]]:
    """The passes of each step with its microbatches numbered from 0, which some jobs number through
    all steps. As they are where all numbers are below that of the microbatches in a step."""
    numbers = [sorted({one.microbatch for one in each if one.microbatch >= 0}) for each in steps]
    usual = max(map(len, numbers), default=0)
    return [
        each
        if not number or number[-1] < usual
        else [
            one
            if one.microbatch < 0
            else replace(one, microbatch=bisect_left(number, one.microbatch))
            for one in each
        ]
        for each, number in zip(steps, numbers, strict=True)
    ]


def _passes_of(
    step: StepRange,
    marks: Sequence[Mark],
    recorded: Sequence[tuple[Window | None, list[Window]]],
    stages: Sequence[int],
) -> Iterator[PassWindows]:
    loads = [PassWindows(Op.DATA, -1, (_window(m),)) for m in marks if _DATA.search(m.name)]
    updates = [_window(mark) for mark in _updates(marks)]
    passes = _named(marks) or _actions(marks, stages)
    if not passes:
        for number, (forward, backward) in enumerate(recorded):
            if forward is not None:
                passes.append(PassWindows(Op.FORWARD, number, (forward,)))
            passes.append(PassWindows(Op.BACKWARD, number, tuple(backward)))
    inner = [window for one in passes for window in one.windows]
    # A closure that is given to the optimizer runs the passes within its step; a range named
    # backward may hold the whole optimizer step.
    for update in updates:
        if windows := tuple(_outside(update, inner)):
            yield PassWindows(Op.OPTIMIZER, -1, windows)
    yield from loads
    yield from passes
    if not passes:
        whole = Window(step.start_us, step.stop_us, -1)
        others = [*updates, *(window for one in loads for window in one.windows)]
        if windows := tuple(_outside(whole, others)):
            yield PassWindows(Op.FORWARD, 0, windows)


def _updates(marks: Sequence[Mark]) -> list[Mark]:
    """Optimizer steps as PyTorch marks them, else as the job does."""
    found = [[m for m in marks if p.search(m.name)] for p in (_OPTIMIZER, _OWN_OPTIMIZER)]
    return found[0] or found[1]


def _window(mark: Mark) -> Window:
    return Window(mark.start_us, mark.stop_us, mark.thread)


def _named(marks: Sequence[Mark]) -> list[PassWindows]:
    """Ranges that the job named; none unless both kinds are there. The outermost of one kind
    counts, and none that holds both kinds."""
    kinds = [
        (mark, next((op for pattern, op in _PASS if pattern.search(mark.name)), None))
        for mark in marks
        if not _OF_TORCH.match(mark.name)
    ]
    passes = [(mark, op) for mark, op in kinds if op is not None]
    passes.sort(key=lambda one: (one[0].start_us, -one[0].stop_us, one[0].thread))
    counts: dict[Op, int] = defaultdict(int)
    reach: dict[tuple[int, Op], float] = {}
    found = []
    for mark, op in _of_one_kind(passes):
        if mark.stop_us <= reach.get((mark.thread, op), -np.inf):
            continue
        reach[mark.thread, op] = mark.stop_us
        number = _MICROBATCH.search(mark.name)
        at = int(number.group(1)) if number else counts[op]
        counts[op] += 1
        found.append(PassWindows(op, at, (_window(mark),)))
    return found if len(counts) == 2 else []


def _of_one_kind(passes: Sequence[tuple[Mark, Op]]) -> list[tuple[Mark, Op]]:
    """The passes, in the order of their start, that hold none of the other kind on their thread."""
    ends: dict[tuple[int, Op], float] = {}  # the first end of those that start later
    kept = []
    for mark, op in reversed(passes):
        other = Op.BACKWARD if op is Op.FORWARD else Op.FORWARD
        if ends.get((mark.thread, other), np.inf) > mark.stop_us:
            kept.append((mark, op))
        ends[mark.thread, op] = min(ends.get((mark.thread, op), np.inf), mark.stop_us)
    return kept[::-1]


def _stages(marks: Sequence[Mark]) -> list[int]:
    """Numbers of the pipeline stages that the rank holds."""
    return sorted({int(found.group(1)) for m in marks if (found := _ACTION.fullmatch(m.name))})


def _actions(marks: Sequence[Mark], stages: Sequence[int]) -> list[PassWindows]:
    """Actions of a pipeline schedule; the two halves of a backward pass are one."""
    found: dict[tuple[Op, int, int], PassWindows] = {}
    for mark in marks:
        action = _ACTION.fullmatch(mark.name)
        if action is None:
            continue
        op = Op.FORWARD if action.group(2) == "F" else Op.BACKWARD
        key = op, stages.index(int(action.group(1))), int(action.group(3))
        windows = found[key].windows if key in found else ()
        found[key] = PassWindows(
            op, key[2], (*windows, _window(mark)), key[1], is_split=action.group(2) in "IW"
        )
    return list(found.values())


def _outside(whole: Window, parts: Sequence[Window]) -> Iterator[Window]:
    """The rest of a window without its parts."""
    at = whole.start_us
    for part in sorted(parts, key=lambda window: window.start_us):
        if part.start_us >= whole.stop_us or part.stop_us <= whole.start_us:
            continue
        if part.start_us > at:
            yield Window(at, part.start_us, whole.thread)
        at = max(at, part.stop_us)
    if at < whole.stop_us:
        yield Window(at, whole.stop_us, whole.thread)
