"""Point-to-point transfers apart from waiting, from the records of both ends.

A transfer begins when both ends are ready for it. The end that came first waits for the other one,
which is no matter of the link: a slow device makes its neighbours wait. Where both ends time the
whole transfer, the shorter time is the transfer's, whatever their clocks. Where the sender says
only when it started, as it does not wait for the end, the transfer lasts from then until the
receiver's end, which takes the difference of the two clocks. That is estimated from transfers in
both directions (Mills, RFC 5905, with the bounds of several steps).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from resihp.contracts import Op, TelemetryBatch
from resihp.contracts.telemetry import MOST_MS

from .arrays import Bools, Floats, Ints, group_median, positions
from .persistence import Persistent
from .rank_table import RankTable

DRIFT = 1e-4
"""Largest rate at which two clocks drift apart; those of hosts by some 10 millionths."""


@dataclass(frozen=True, eq=False)
class PairedTransfers:
    """Transfers of which both ends have a record; arrays over transfers.

    link         number of the pair of ranks: `lower position << 32 | higher position`
    rows         [2, transfers] row of the record at the lower and the higher end
    starts, ends [2, transfers] of these records, in ms of the clock of each end
    """

    link: Ints
    rows: Ints
    starts: Floats
    ends: Floats

    @property
    def sends(self) -> Bools:
        """[2, transfers] ends that only started to send."""
        result: Bools = self.ends <= self.starts
        return result


def paired(step: TelemetryBatch, rows: Ints, own: Ints, peer: Ints) -> PairedTransfers:
    """The transfers in those rows of a step whose records have a start; `own` and `peer` are the
    positions of the ranks at its two ends.

    Several transfers of one microbatch and chunk between two ranks are paired in their order, if
    both ends have equally many records of them.
    """
    low, high = np.minimum(own, peer), np.maximum(own, peer)
    side = (own > peer).astype(np.int64)
    link = (low << 32) | high
    place = (step.microbatch[rows].astype(np.int64) << 16) | step.chunk[rows]
    order = np.lexsort((step.start_ms[rows], side, place, link))
    link, place, side = link[order], place[order], side[order]
    begins = np.flatnonzero(np.diff(link, prepend=-1) | np.diff(place, prepend=place[:1] - 1))
    count = np.diff(begins, append=link.size)
    lower = np.add.reduceat(1 - side, begins) if link.size else count
    even = np.repeat(2 * lower == count, count)
    nth = np.arange(link.size) - np.repeat(begins, count)
    first = np.flatnonzero(even & (nth < np.repeat(lower, count)))
    second = first + np.repeat(lower, count)[first]
    ends = rows[order[np.stack([first, second])]]
    starts = step.start_ms[ends]
    spent = step.compute_ms[ends] + np.nan_to_num(step.wait_ms[ends])
    return PairedTransfers(link[first], ends, starts, starts + spent)


@dataclass(frozen=True, eq=False)
class ClockBounds:
    """Bounds of the difference between two clocks, in ms; arrays over pairs of ranks.

    links   numbers of the pairs, sorted
    low, high
            least and largest difference of the clock of the higher rank from that of the lower
            one; infinite where no transfer bounds it
    at_ms   time of the lower rank's clock as of which they hold
    """

    links: Ints
    low: Floats
    high: Floats
    at_ms: Floats

    @classmethod
    def of(cls, transfers: PairedTransfers) -> ClockBounds:
        """The bounds by the transfers of one step: nothing arrives before it was sent."""
        links, at = np.unique(transfers.link, return_inverse=True)
        low, high = np.full(links.size, -np.inf), np.full(links.size, np.inf)
        starts, ends, (down, up) = transfers.starts, transfers.ends, transfers.sends
        sent = down & ~up
        np.minimum.at(high, at[sent], (ends[1] - starts[0])[sent])
        sent = up & ~down
        np.maximum.at(low, at[sent], (starts[1] - ends[0])[sent])
        latest = np.full(links.size, -np.inf)
        np.maximum.at(latest, at, transfers.ends[0])
        return cls(links, low, high, latest)

    def later(self, new: ClockBounds) -> ClockBounds:
        """Bounds after those of another step: the tighter ones, the old ones widened by the drift
        since; the new ones alone where the two contradict each other, as after the restart of a
        host."""
        links = np.union1d(self.links, new.links)
        old_low, old_high, old_at = self._aligned(links)
        low, high, at_ms = new._aligned(links)
        at_ms = np.maximum(at_ms, old_at)
        with np.errstate(invalid="ignore"):
            apart = np.nan_to_num(DRIFT * (at_ms - old_at), nan=0.0, posinf=0.0)
        both_low = np.maximum(low, old_low - apart)
        both_high = np.minimum(high, old_high + apart)
        agree = both_low <= both_high
        return ClockBounds(
            links, np.where(agree, both_low, low), np.where(agree, both_high, high), at_ms
        )

    def differences(self, links: Ints) -> Floats:
        """Middle of the bounds of each of these pairs; NaN without a bound on either side.

        It is right where the fastest transfers take as long in both directions, and off by half of
        their difference where not.
        """
        low, high, _ = self._aligned(links)
        known = np.isfinite(low) & np.isfinite(high)
        return np.where(known, 0.5 * (np.where(known, low, 0) + np.where(known, high, 0)), np.nan)

    def _aligned(self, links: Ints) -> tuple[Floats, Floats, Floats]:
        """Bounds and times of some pairs; unbounded where they are not known."""
        if not self.links.size:
            unknown = np.full(links.size, np.inf)
            return -unknown, unknown, -unknown
        at = positions(self.links, links)
        known = at >= 0
        return (
            np.where(known, self.low[at], -np.inf),
            np.where(known, self.high[at], np.inf),
            np.where(known, self.at_ms[at], -np.inf),
        )


def transfer_times(transfers: PairedTransfers, differences: Floats) -> Floats:
    """Time of each transfer in ms, without waiting; NaN where it cannot be told. `differences`:
    of the clock of the higher end from that of the lower one.

    Of a sender that does not wait, only transfers count for which the receiver waited already:
    before a later receiver came, a buffering transport may have moved a part.
    """
    spent = transfers.ends - transfers.starts
    lower_sends, higher_sends = transfers.sends
    begun = np.where(lower_sends, 1.0, -1.0) * differences + np.where(
        lower_sends, transfers.starts[0], transfers.starts[1]
    )
    received = np.where(lower_sends, transfers.ends[1], transfers.ends[0])
    posted = np.where(lower_sends, transfers.starts[1], transfers.starts[0])
    alone = np.where(begun >= posted, received - begun, np.nan)
    times = np.where(lower_sends | higher_sends, alone, spent.min(axis=0, initial=np.inf))
    return np.where((lower_sends & higher_sends) | ~(times > 0), np.nan, times)


def balanced(transfers: PairedTransfers, times: Floats) -> Floats:
    """Times of a step in which the two directions of a link have the same median, their mean; NaN
    where one direction has none. Only those of transfers whose sender did not wait.

    An error of the clocks' difference makes one direction shorter and the other longer by as much.
    Behind a slow device no transfer of one direction may be measured for many steps: the bounds
    then widen, and the other direction seems to become slower.
    """
    lower_sends, higher_sends = transfers.sends
    links, at = np.unique(transfers.link, return_inverse=True)
    use = np.isfinite(times) & (lower_sends ^ higher_sends)
    middle = group_median(times[use], 2 * at[use] + higher_sends[use], 2 * links.size)
    half = (0.5 * (middle[1::2] - middle[::2]))[at]
    shifted = times + np.where(lower_sends, half, -half)
    return np.where(use, np.where(shifted > 0, shifted, np.nan), times)


class TransferTimes(Persistent):
    """Separates the transfers of each step of a layout from the waiting."""

    _saved = ("_bounds",)
    _bounds: ClockBounds

    def __init__(self, places: RankTable) -> None:
        self._places = places
        none = np.empty(0)
        self._bounds = ClockBounds(np.empty(0, np.int64), none, none, none)

    def separated(self, step: TelemetryBatch) -> TelemetryBatch:
        """The records of a step, with one record of each transfer that both ends stamped: at the
        lower rank, what the transfer took as `compute_ms` and the waiting of both ends as
        `wait_ms`.

        A stamped record whose other end is missing is left out, as nobody can tell its waiting.
        P2P records without a start are left as they are: who times a transfer alone, as traces of
        engines and profiles do, has told the waiting apart.
        """
        stamped = (step.op == Op.P2P) & np.isfinite(step.start_ms) & (step.peer >= 0)
        if not stamped.any():
            return step
        rows = np.flatnonzero(stamped)
        own, peer = self._places.index(step.rank[rows]), self._places.index(step.peer[rows])
        known = (peer >= 0) & (own >= 0) & (peer != own)
        transfers = paired(step, rows[known], own[known], peer[known])
        self._bounds = self._bounds.later(ClockBounds.of(transfers))
        times = transfer_times(transfers, self._bounds.differences(transfers.link))
        times = balanced(transfers, times)
        told = times <= MOST_MS  # not where they are NaN
        spent = (transfers.ends - transfers.starts)[:, told]
        waited = np.maximum(spent - times[told], 0.0).sum(axis=0)
        sent = replace(
            step.select(transfers.rows[0][told]),
            compute_ms=times[told],
            wait_ms=np.minimum(waited, MOST_MS),
            dropped=0,
        )
        return TelemetryBatch.concat([step.select(~stamped), sent])
