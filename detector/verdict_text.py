"""Verdicts in the words of the contract, with evidence that a person can read."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from resihp.contracts import Status, Verdict

from .arrays import Bools, Floats, Ints
from .evidence.status import (
    CODES,
    FAIL_SLOW,
    FAIL_STOP,
    HEALTHY,
    INCONCLUSIVE,
    SUSPECT,
    StatusTable,
)
from .links_and_hosts import LinkVerdict, touching
from .persistence import Persistent
from .probes import ProbeResult
from .rank_table import RankTable


def verdict_of(
    rank: int,
    at: int,
    status_table: StatusTable,
    suspect_at: float,
    step: int | None,
    notes: tuple[str, ...],
) -> Verdict:
    """The verdict on the rank at position `at` of the book."""
    code = int(status_table.status[at])
    since = None if status_table.since[at] < 0 else int(status_table.since[at])
    if code == HEALTHY:
        return Verdict(
            rank=rank,
            status=Status.HEALTHY,
            since_step=since,
            confidence=1.0 - _belief(float(status_table.evidence[at]), suspect_at),
            evidence=notes,
            step=step,
        )
    if code == FAIL_STOP:
        return Verdict(
            rank=rank, status=Status.FAIL_STOP, since_step=since, evidence=notes, step=step
        )
    interval = (round(float(status_table.low[at]), 4), round(float(status_table.high[at]), 4))
    slowdown = float(status_table.factor[at])
    measured = slowdown > 1.0
    belief = _belief(float(status_table.evidence[at]), suspect_at)
    return Verdict(
        rank=rank,
        status=CODES[code],
        slowdown=slowdown,
        since_step=since,
        confidence=0.5 if code == INCONCLUSIVE else belief,
        evidence=(*_sentences(status_table, at, code), *notes),
        interval=interval if measured else None,
        step=step,
    )


def _belief(evidence: float, suspect_at: float) -> float:
    return 1.0 / (1.0 + math.exp(-float(np.clip(evidence - suspect_at, -50.0, 50.0))))


def _sentences(status_table: StatusTable, at: int, code: int) -> tuple[str, ...]:
    if status_table.factor[at] <= 1.0:
        return ()
    source = "its own past" if status_table.by_past[at] else "its peers on the same stage"
    extra = (status_table.factor[at] - 1.0) * 100
    low, high = (status_table.low[at] - 1.0) * 100, (status_table.high[at] - 1.0) * 100
    since = (
        f"since step {status_table.since[at]}"
        if status_table.since[at] >= 0
        else "since the first step seen"
    )
    lines = [
        f"computes {extra:.1f}% longer than expected from {source} {since} "
        f"(95% interval {low:.1f}% to {high:.1f}%)"
    ]
    if code in (SUSPECT, FAIL_SLOW) and status_table.evidence[at] > 0:
        lines.append(f"odds of that by chance: 1 in {_odds(float(status_table.evidence[at]))}")
    if code == FAIL_SLOW and status_table.carried[at]:
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


SILENT = "sends no records"
REPLICA = (
    "its whole replica computes longer, and the records carry no lengths: "
    "more work and slower devices look the same"
)
_EXPLAINED = (
    "more work for its whole replica would look much the same, and the records carry no lengths"
)


class Annotations(Persistent):
    """Of the ranks on one layout, by their positions on it.

    notes      why a rank is inconclusive, or whom it waits for
    asides     what was seen elsewhere, and changes no status
    explained  ranks whose excess more work for their replica would explain, over ranks
    """

    _saved = ("notes", "observations", "explained")
    notes: dict[int, tuple[str, ...]]
    observations: dict[int, str]

    def __init__(self, places: RankTable) -> None:
        self._places = places
        self.notes = {}
        self.observations = {}
        self.explained = np.zeros(places.size, bool)

    @property
    def annotated(self) -> Bools:
        """Ranks with a note."""
        return np.isin(np.arange(self._places.size), list(self.notes))

    def mark(self, reason: str, ranks: Bools, status_table: StatusTable, step: int) -> None:
        """Healthy ranks become inconclusive for a reason, and healthy again when it is over."""
        for at in np.flatnonzero(ranks & (status_table.status == HEALTHY)).tolist():
            status_table.status[at], status_table.since[at] = INCONCLUSIVE, step
            self.notes[at] = (reason,)
        over = [at for at, note in self.notes.items() if note == (reason,) and not ranks[at]]
        for at in over:
            del self.notes[at]
            if status_table.status[at] == INCONCLUSIVE:
                status_table.status[at], status_table.since[at] = HEALTHY, step

    def note_waiting(self, waits_for: Ints) -> None:
        """Ranks that wait for the one at the position given, over ranks; -1: for nobody."""
        for at in [at for at, note in self.notes.items() if note[0].startswith("waits for")]:
            del self.notes[at]
        for at in np.flatnonzero(waits_for >= 0).tolist():
            slow = int(self._places.ranks[waits_for[at]])
            self.notes[at] = (f"waits for rank {slow}, which waits least in their group",)

    def note_hosts(self, slow: Bools, factor: Floats) -> None:
        """Ranks whose hosts are slow, and by how much; of the others nothing of that is left."""
        for at in np.flatnonzero(slow).tolist():
            times = float(factor[at])
            self.observations[at] = (
                f"its host spends {times:.1f} times as long on data as its peers'"
            )
        told = [at for at, words in self.observations.items() if words.startswith("its host")]
        for at in [at for at in told if not slow[at]]:
            del self.observations[at]

    def note_probe(self, at: int, result: ProbeResult) -> None:
        """What a probe of a rank has shown."""
        self.observations[at] = result.words

    def words(
        self, at: int, status_table: StatusTable, slow_links: Sequence[LinkVerdict]
    ) -> tuple[str, ...]:
        """All that is to be told of the rank at a position."""
        rank = int(self._places.ranks[at])
        links = [f"its {link.evidence[0]}" for link in touching(slow_links, rank)]
        observed = [self.observations[at]] if at in self.observations else []
        if (
            status_table.status[at] == INCONCLUSIVE
            and self.explained[at]
            and not self.notes.get(at)
        ):
            observed.append(_EXPLAINED)
        if status_table.turns[at] and status_table.status[at] == FAIL_SLOW:
            slow, of = status_table.slow_steps[at].tolist()
            observed.append(f"slow by turns: in {slow} of the last {of} steps")
        return (*self.notes.get(at, ()), *observed, *links)
