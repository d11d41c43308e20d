"""Own time and waiting of a pass. Times are in microseconds.

On a device, a pass takes as long as the device was busy with what was launched in it; it waited
while the device did nothing else and communication ran. On the host, a pass lasts from its first to
its last operator; it waited in each gap between operators in which communication ended, until then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from ._autograd import Window
from ._intervals import Intervals
from ._rank_profile import OperatorKind, Operators, RankProfile


class PassTime(NamedTuple):
    """Own time and waiting of a pass."""

    own_us: float
    wait_us: float


class PassClock(Protocol):
    """Clock of what one rank did."""

    def time(self, windows: Sequence[Window]) -> PassTime:
        """Own time and waiting in the windows of a pass."""

    def exposed_us(self, start_us: float, stop_us: float) -> float:
        """Part of a stretch of time in which the rank did no work of its own."""


def clock_of(profile: RankProfile) -> PassClock:
    """The clock for a profile."""
    return _DeviceClock(profile) if profile.on_device else _HostClock(profile)


class _DeviceClock:
    def __init__(self, profile: RankProfile) -> None:
        self._start, self._stop, self._launched = profile.kernels
        self._busy = Intervals(self._start, self._stop)
        self._communication = _union(profile)

    def time(self, windows: Sequence[Window]) -> PassTime:
        inside = [
            np.arange(*np.searchsorted(self._launched, (window.start_us, window.stop_us)))
            for window in windows
        ]
        rows = np.unique(np.concatenate(inside))
        if not rows.size:
            return PassTime(0.0, 0.0)
        busy = Intervals(self._start[rows], self._stop[rows])
        first, last = float(busy.start[0]), float(busy.stop[-1])
        of_others = self._communication.within(first, last)
        hidden = self._communication.within(busy.start, busy.stop)
        return PassTime(busy.length, of_others - hidden)

    def exposed_us(self, start_us: float, stop_us: float) -> float:
        return stop_us - start_us - self._busy.within(start_us, stop_us)


class _HostClock:
    def __init__(self, profile: RankProfile) -> None:
        operators = profile.operators
        threads = np.unique(operators.thread).tolist()
        own = {thread: _own_work(operators, thread) for thread in threads}
        self._waiting = {thread: _waiting(profile, thread, own[thread]) for thread in threads}
        self._own, self._span = Intervals(*_NONE), (0.0, 0.0)
        if operators.start.size:
            self._span = float(operators.start[0]), float(operators.stop.max())
            busiest = max(threads, key=lambda thread: own[thread].length)
            self._own, self._waiting[-1] = own[busiest], self._waiting[busiest]

    def time(self, windows: Sequence[Window]) -> PassTime:
        own = wait = 0.0
        for window in windows:
            waiting = self._waiting.get(window.thread)
            if waiting is not None:
                start, stop = np.clip([window.start_us, window.stop_us], *self._span).tolist()
                part = waiting.within(start, stop)
                wait += part
                own += stop - start - part
        return PassTime(own, wait)

    def exposed_us(self, start_us: float, stop_us: float) -> float:
        return stop_us - start_us - self._own.within(start_us, stop_us)


_NONE = np.empty(0), np.empty(0)


def _union(profile: RankProfile) -> Intervals:
    times = [(one.start_us, one.stop_us) for one in profile.communications]
    return Intervals(*np.array(times, np.float64).reshape(-1, 2).T)


def _own_work(operators: Operators, thread: int) -> Intervals:
    """Time in operators of a thread that neither communicate nor hold one that does."""
    here = operators.select(operators.thread == thread)
    talking = here.start[here.kind == OperatorKind.COMMUNICATION]
    low, high = np.searchsorted(talking, here.start), np.searchsorted(talking, here.stop)
    own = (here.kind == OperatorKind.COMPUTE) & (low == high)
    return Intervals(here.start[own], here.stop[own])


def _waiting(profile: RankProfile, thread: int, own: Intervals) -> Intervals:
    """Waiting in the gaps of a thread's own work.

    It begins when the thread issued communication in the gap, or with the gap if that was issued
    before. It ends with the first thing that the thread does after the communication has ended: a
    busy host may wake it up late.
    """
    here = profile.operators.select(profile.operators.thread == thread)
    talk = here.select(here.kind == OperatorKind.COMMUNICATION)
    marks = [edge for m in profile.marks if m.thread == thread for edge in (m.start_us, m.stop_us)]
    edges = np.sort(np.concatenate([here.start, here.stop, marks]))
    other = [(one.start_us, one.stop_us) for one in profile.communications]
    times = np.concatenate([[talk.start, talk.stop], np.array(other).reshape(-1, 2).T], axis=1)
    before, after = own.gap(times[1])
    in_gap = ~np.isnan(before)
    (start, stop), before, after = times[:, in_gap], before[in_gap], after[in_gap]
    next_edge = np.append(edges, np.inf)[np.searchsorted(edges, stop)]
    stop = np.where(np.isfinite(np.minimum(next_edge, after)), np.minimum(next_edge, after), stop)
    # From the first in a gap to the last: the thread waited for one after the other.
    _, gap = np.unique(before, return_inverse=True)
    first = np.full(gap.max(initial=-1) + 1, np.inf)
    last = np.full(first.size, -np.inf)
    np.minimum.at(first, gap, np.maximum(start, before))
    np.maximum.at(last, gap, stop)
    return Intervals(first, last)
