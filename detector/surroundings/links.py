"""Slow links between two ranks: told beside the verdicts, they name no device."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resihp.contracts import Op, Status, TelemetryBatch

from ..base.arrays import Ints, State
from ..base.places import Places
from ..base.robust import group_median
from ..evidence.level import LevelTest
from ..settings import DetectorSettings


@dataclass(frozen=True, kw_only=True)
class LinkVerdict:
    """What is said of the transfers that `rank` records with `peer`, or of a group's collectives.

    peer        -1 for a group, of which `rank` is the first
    group       ranks whose collectives are slow; empty for a link between two
    slowdown    transfer time over that of the links between the same two stages
    since_step  first slow step; None while healthy
    """

    rank: int
    peer: int
    status: Status
    group: tuple[int, ...] = ()
    slowdown: float = 1.0
    since_step: int | None = None
    evidence: tuple[str, ...] = ()


class Links:
    """Whether the transfers between two ranks take longer than those of the same stages.

    The links are those of the first two steps with point-to-point records; a link that shows up
    later makes the comparison start again with it.
    """

    def __init__(self, places: Places, settings: DetectorSettings) -> None:
        self._places, self._settings = places, settings
        self._keys = np.empty(0, np.int64)
        self._classes = np.empty(0, np.int64)
        self._test: LevelTest | None = None

    def observe(self, step: TelemetryBatch, index: Ints, number: int) -> None:
        """Takes all records of a step."""
        rows = (step.op == Op.P2P) & (step.peer >= 0) & (step.compute_ms > 0)
        if not rows.any():
            return
        peer = self._places.index(step.peer[rows].astype(np.int64))
        known = peer >= 0
        own, peer, times = index[rows][known], peer[known], step.compute_ms[rows][known]
        keys = (own << 32) | peer
        found = np.unique(keys)
        test = self._test
        if test is None or not np.isin(found, self._keys).all():
            test = self._begin(np.union1d(self._keys, found))
        at = np.searchsorted(self._keys, keys)
        value = group_median(np.log(times), at, self._keys.size)
        test.observe(number, value)

    def _begin(self, keys: Ints) -> LevelTest:
        self._keys = keys
        places = self._places
        own, peer = keys >> 32, keys & 0xFFFF_FFFF
        kind = np.stack([places.peers[own], places.peers[peer]], axis=1)
        _, classes = np.unique(kind, axis=0, return_inverse=True)
        self._classes = classes.reshape(-1).astype(np.int64)
        self._test = LevelTest(self._classes, self._settings, least=1.25, error=0.02)
        return self._test

    @property
    def any_slow(self) -> bool:
        """Whether any link is slow."""
        return self._test is not None and bool(self._test.slow.any())

    def verdicts(self) -> list[LinkVerdict]:
        """The slow links, in the order of their ranks."""
        test = self._test
        if test is None:
            return []
        found = []
        for at in np.flatnonzero(test.slow).tolist():
            rank = int(self._places.ranks[int(self._keys[at]) >> 32])
            peer = int(self._places.ranks[int(self._keys[at]) & 0xFFFF_FFFF])
            factor = float(test.factor[at])
            words = f"transfers with rank {peer} take {factor:.2f} times as long as their like"
            found.append(
                LinkVerdict(
                    rank=rank,
                    peer=peer,
                    status=Status.FAIL_SLOW,
                    slowdown=factor,
                    since_step=int(test.since[at]),
                    evidence=(words,),
                )
            )
        return found

    def like(self, link: LinkVerdict) -> tuple[int, int] | None:
        """Ends of a healthy link of the same kind; None where there is none."""
        test, ranks = self._test, self._places.ranks
        if test is None:
            return None
        own, peer = ranks[self._keys >> 32], ranks[self._keys & 0xFFFF_FFFF]
        here = np.flatnonzero((own == link.rank) & (peer == link.peer))[0]
        healthy = np.flatnonzero((self._classes == self._classes[here]) & ~test.slow)
        return (int(own[healthy[0]]), int(peer[healthy[0]])) if healthy.size else None

    def state(self) -> State:
        """What `load` needs."""
        return {"keys": self._keys, "test": None if self._test is None else self._test.state()}

    def load(self, state: State) -> None:
        """Takes up what `state` returned."""
        if state["test"] is not None:
            self._begin(state["keys"]).load(state["test"])
