"""Verdicts in the words of the contract, with evidence that a person can read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass

import numpy as np

from resihp.contracts import LinkVerdict, Status, Verdict

from .arrays import Bools, Floats, Ints
from .evidence.status import (
    CODES,
    FAIL_SLOW,
    FAIL_STOP,
    HEALTHY,
    INCONCLUSIVE,
    SUSPECT,
    StatusTable,
    beliefs,
)
from .persistence import Persistent
from .rank_table import RankTable

SILENT = "sends no records"
REPLICA = (
    "its whole replica computes longer, and the records carry no lengths: "
    "more work and slower devices look the same"
)
_EXPLAINED = (
    "more work for its whole replica would look much the same, and the records carry no lengths"
)


@dataclass(frozen=True)
class VerdictSummary:
    """The verdicts on all ranks of a job, those on ordinary healthy ranks in short.

    healthy     ranks in the layout that are healthy, without any evidence; sorted
    since       step from which each of them has been so; -1 where it was from the start
    confidence  lowest confidence of these verdicts
    step        last step that was taken into account; None where none was
    others      the verdicts on all other ranks, sorted by rank
    """

    healthy: Ints
    since: Ints
    confidence: float
    step: int | None
    others: list[Verdict]

    def outside(self, layout: Set[int]) -> list[Verdict]:
        """The verdicts on ranks that are not in a layout."""
        pairs = zip(self.healthy.tolist(), self.since.tolist(), strict=True)
        healthy = [
            Verdict(
                rank=rank,
                status=Status.HEALTHY,
                since_step=None if since < 0 else since,
                confidence=self.confidence,
                step=self.step,
            )
            for rank, since in pairs
            if rank not in layout
        ]
        return [*healthy, *(verdict for verdict in self.others if verdict.rank not in layout)]


def verdict_of(
    rank: int, at: int, table: StatusTable, step: int | None, notes: tuple[str, ...]
) -> Verdict:
    """The verdict on the rank at position `at` of the table, as of `step`."""
    code, slowdown = int(table.status[at]), float(table.factor[at])
    belief = float(beliefs(table.evidence[at]))
    stopped, healthy = code == FAIL_STOP, code == HEALTHY
    interval = (round(float(table.low[at]), 4), round(float(table.high[at]), 4))
    return Verdict(
        rank=rank,
        status=CODES[code],
        slowdown=1.0 if healthy or stopped else slowdown,
        since_step=None if table.since[at] < 0 else int(table.since[at]),
        confidence={HEALTHY: 1.0 - belief, FAIL_STOP: 1.0, INCONCLUSIVE: 0.5}.get(code, belief),
        evidence=notes if healthy or stopped else (*_sentences(table, at, code), *notes),
        interval=interval if slowdown > 1.0 and not (healthy or stopped) else None,
        step=step,
    )


def _sentences(table: StatusTable, at: int, code: int) -> tuple[str, ...]:
    if table.factor[at] <= 1.0:
        return ()
    source = "its own past" if table.by_past[at] else "its peers on the same stage"
    extra = (table.factor[at] - 1.0) * 100
    low, high = (table.low[at] - 1.0) * 100, (table.high[at] - 1.0) * 100
    since = f"since step {table.since[at]}" if table.since[at] >= 0 else "since the first step seen"
    lines = [
        f"computes {extra:.1f}% longer than expected from {source} {since} "
        f"(95% interval {low:.1f}% to {high:.1f}%)"
    ]
    if code in (SUSPECT, FAIL_SLOW) and table.evidence[at] > 0:
        lines.append(f"odds of that by chance: 1 in {_odds(float(table.evidence[at]))}")
    if code == FAIL_SLOW and table.carried[at]:
        lines.append("known from the layout before; not yet measured on this one")
    return tuple(lines)


def _odds(evidence: float) -> str:
    """The exponential of the evidence, to two digits.

    >>> _odds(16.0), _odds(9.3), _odds(50.0)
    ('8,900,000', '11,000', 'more than a billion')
    """
    if evidence > math.log(1e9):
        return "more than a billion"
    return f"{float(f'{math.exp(evidence):.2g}'):,.0f}"


class Annotations(Persistent):
    """Evidence on ranks other than their own slowness; by their positions in the layout.

    notes      why a rank is inconclusive, or which rank it waits for
    hosts      what its host shows; changes no status
    probes     what its last probes show, by their kind; change no status
    explained  ranks whose excess could be more work for their replica, over ranks
    """

    _saved = ("notes", "hosts", "probes", "explained")
    notes: dict[int, tuple[str, ...]]
    hosts: dict[int, str]
    probes: dict[int, dict[str, str]]

    def __init__(self, places: RankTable, table: StatusTable) -> None:
        self._places, self._table = places, table
        self.notes = {}
        self.hosts, self.probes = {}, {}
        self.explained = np.zeros(places.size, bool)

    @property
    def annotated(self) -> Bools:
        """Ranks with a note."""
        return self._mask(self.notes)

    def remarkable(self, slow_links: Sequence[LinkVerdict]) -> Bools:
        """Ranks of which `notes_of` has something to say while they are healthy."""
        ends = {rank for link in slow_links for rank in (link.rank, *link.group)}
        at = self._places.index(np.array(sorted(ends), np.int64))
        return self._mask([*self.notes, *self.hosts, *self.probes, *at[at >= 0].tolist()])

    def _mask(self, positions: Iterable[int]) -> Bools:
        mask = np.zeros(self._places.size, bool)
        mask[list(positions)] = True
        return mask

    def mark(self, reason: str, ranks: Bools, step: int) -> None:
        """Makes healthy ranks inconclusive for a reason, and others healthy again for which the
        reason no longer holds."""
        table = self._table
        for at in np.flatnonzero(ranks & (table.status == HEALTHY)).tolist():
            table.status[at], table.since[at] = INCONCLUSIVE, step
            self.notes[at] = (reason,)
        over = [at for at, note in self.notes.items() if note == (reason,) and not ranks[at]]
        for at in over:
            del self.notes[at]
            if table.status[at] == INCONCLUSIVE:
                table.status[at], table.since[at] = HEALTHY, step

    def note_waiting(self, waits_for: Ints) -> None:
        """Notes the position of the rank that each rank waits for, over ranks; -1 for none."""
        for at in [at for at, note in self.notes.items() if note[0].startswith("waits for")]:
            del self.notes[at]
        for at in np.flatnonzero(waits_for >= 0).tolist():
            slow = int(self._places.ranks[waits_for[at]])
            self.notes[at] = (f"waits for rank {slow}, which waits least in their group",)

    def note_hosts(self, slow: Bools, factor: Floats) -> None:
        """Notes the ranks whose hosts are slow, and by how much."""
        self.hosts = {
            at: f"its host spends {factor[at]:.1f} times as long on data as its peers'"
            for at in np.flatnonzero(slow).tolist()
        }

    def note_probe(self, at: int, kind: str, words: str) -> None:
        """Notes what a probe shows of the rank at a position."""
        self.probes.setdefault(at, {})[kind] = words

    def forget_probes(self, over: Bools) -> None:
        """Drops what probes showed of ranks of which it holds no longer."""
        for at in [at for at in self.probes if over[at]]:
            del self.probes[at]

    def notes_of(self, at: int, slow_links: Sequence[LinkVerdict]) -> tuple[str, ...]:
        """All sentences on the rank at a position."""
        table, rank = self._table, int(self._places.ranks[at])
        links = [
            f"its {link.evidence[0]}"
            for link in slow_links
            if link.rank == rank or rank in link.group
        ]
        observed = [self.hosts[at]] if at in self.hosts else []
        observed += [words for _, words in sorted(self.probes.get(at, {}).items())]
        if table.status[at] == INCONCLUSIVE and self.explained[at] and not self.notes.get(at):
            observed.append(_EXPLAINED)
        if table.turns[at] and table.status[at] == FAIL_SLOW:
            slow, of = table.slow_steps[at].tolist()
            observed.append(f"slow by turns: in {slow} of the last {of} steps")
        return (*self.notes.get(at, ()), *observed, *links)
