"""What is said of ranks beside their own slowness: why nobody can tell, whom they wait for, and
what their hosts, links and probes show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .base.arrays import Bools, Floats, Ints, State
from .base.places import Places
from .evidence.judge import FAIL_SLOW, HEALTHY, INCONCLUSIVE, Book
from .probes import ProbeResult
from .surroundings.collectives import touching
from .surroundings.links import LinkVerdict

SILENT = "sends no records"
REPLICA = (
    "its whole replica computes longer, and the records carry no lengths: "
    "more work and slower devices look the same"
)
_EXPLAINED = (
    "more work for its whole replica would look much the same, and the records carry no lengths"
)


class Remarks:
    """Of the ranks on one layout, by their positions on it.

    notes      why a rank is inconclusive, or whom it waits for
    asides     what was seen elsewhere, and changes no status
    explained  ranks whose excess more work for their replica would explain, over ranks
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self.notes: dict[int, tuple[str, ...]] = {}
        self.asides: dict[int, str] = {}
        self.explained = np.zeros(places.size, bool)

    @property
    def noted(self) -> Bools:
        """Ranks with a note."""
        return np.isin(np.arange(self._places.size), list(self.notes))

    def mark(self, reason: str, ranks: Bools, book: Book, step: int) -> None:
        """Healthy ranks become inconclusive for a reason, and healthy again when it is over."""
        for at in np.flatnonzero(ranks & (book.status == HEALTHY)).tolist():
            book.status[at], book.since[at] = INCONCLUSIVE, step
            self.notes[at] = (reason,)
        over = [at for at, note in self.notes.items() if note == (reason,) and not ranks[at]]
        for at in over:
            del self.notes[at]
            if book.status[at] == INCONCLUSIVE:
                book.status[at], book.since[at] = HEALTHY, step

    def blame(self, blames: Ints) -> None:
        """Ranks that wait for the one at the position given, over ranks; -1: for nobody."""
        for at in [at for at, note in self.notes.items() if note[0].startswith("waits for")]:
            del self.notes[at]
        for at in np.flatnonzero(blames >= 0).tolist():
            slow = int(self._places.ranks[blames[at]])
            self.notes[at] = (f"waits for rank {slow}, which waits least in their group",)

    def tell_hosts(self, slow: Bools, factor: Floats) -> None:
        """Ranks whose hosts are slow, and by how much; of the others nothing of that is left."""
        for at in np.flatnonzero(slow).tolist():
            times = float(factor[at])
            self.asides[at] = f"its host spends {times:.1f} times as long on data as its peers'"
        told = [at for at, words in self.asides.items() if words.startswith("its host")]
        for at in [at for at in told if not slow[at]]:
            del self.asides[at]

    def tell_probe(self, at: int, result: ProbeResult) -> None:
        """What a probe of a rank has shown."""
        self.asides[at] = result.words

    def words(self, at: int, book: Book, slow_links: Sequence[LinkVerdict]) -> tuple[str, ...]:
        """All that is to be told of the rank at a position."""
        rank = int(self._places.ranks[at])
        links = [f"its {link.evidence[0]}" for link in touching(slow_links, rank)]
        aside = [self.asides[at]] if at in self.asides else []
        if book.status[at] == INCONCLUSIVE and self.explained[at] and not self.notes.get(at):
            aside.append(_EXPLAINED)
        if book.turns[at] and book.status[at] == FAIL_SLOW:
            slow, of = book.slow_steps[at].tolist()
            aside.append(f"slow by turns: in {slow} of the last {of} steps")
        return (*self.notes.get(at, ()), *aside, *links)

    def state(self) -> State:
        """What `load` needs."""
        return {
            "notes": {str(at): list(note) for at, note in self.notes.items()},
            "asides": {str(at): words for at, words in self.asides.items()},
            "explained": self.explained,
        }

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        self.notes = {int(at): tuple(note) for at, note in state["notes"].items()}
        self.asides = {int(at): words for at, words in state["asides"].items()}
        self.explained = state["explained"]
