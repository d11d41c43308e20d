"""Advice to the person who runs a job that cannot leave ranks out by itself."""

from __future__ import annotations

from dataclasses import dataclass

from resihp.formatting import listed, noun_for, rank_list, ratio

from ._numbers import make_plain, number, whole_numbers


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Ranks to leave out of a job at its next start, or to replace, and the gain.

    Step times are predicted, in milliseconds above 0, for the work of one step of the job as it is.

    ranks        slow and stopped ranks to leave out, or to replace by healthy ones
    stopped      those of them that have stopped
    others       healthy ranks that go with them: the rest of their replicas
    nodes        the nodes to leave out, where these are all the ranks that the job has on them
    step_ms      with these ranks; None where one has stopped: the job cannot go on
    without_ms   without them; None where that is no gain, or no replica is left
    replaced_ms  with healthy devices in their places
    """

    ranks: tuple[int, ...]
    stopped: tuple[int, ...] = ()
    others: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    step_ms: float | None
    without_ms: float | None
    replaced_ms: float

    def __post_init__(self) -> None:
        make_plain(self, whole_numbers, "ranks", "stopped", "others", "nodes", least=0)
        make_plain(self, number, "step_ms", "without_ms", above=0.0, optional=True)
        make_plain(self, number, "replaced_ms", above=0.0)

    @property
    def gain(self) -> float | None:
        """Speed-up by leaving the ranks out, as a fraction; None where it is not known."""
        if self.step_ms is None or self.without_ms is None:
            return None
        return self.step_ms / self.without_ms - 1.0

    @property
    def replaced_gain(self) -> float | None:
        """Speed-up by replacing the ranks, as a fraction; None where one has stopped."""
        return None if self.step_ms is None else self.step_ms / self.replaced_ms - 1.0

    @property
    def summary(self) -> str:
        """Advice and gain in one clause.

        >>> Advice(ranks=(5,), step_ms=150.0, without_ms=110.0, replaced_ms=100.0).summary
        'leave rank 5 out: steps 1.36x faster for the same work; replace it: 1.50x'
        >>> Advice(ranks=(5,), step_ms=150.0, without_ms=None, replaced_ms=100.0).summary
        'replace rank 5: steps 1.50x faster'
        >>> Advice(ranks=(3,), stopped=(3,), step_ms=None, without_ms=None, replaced_ms=9.0).summary
        'rank 3 has stopped: replace it'
        """
        it = "it" if len(self.ranks) == 1 else "them"
        if self.step_ms is None:
            return f"{self._stopped}: {self._way_on(it)}"
        replaced = ratio(self.step_ms / self.replaced_ms)
        if self.without_ms is None:
            return f"replace {rank_list(self.ranks)}: steps {replaced} faster"
        gain = f"steps {ratio(self.step_ms / self.without_ms)} faster for the same work"
        return f"{self._leave_out}: {gain}; replace {it}: {replaced}"

    @property
    def _stopped(self) -> str:
        return f"{rank_list(self.stopped)} {'has' if len(self.stopped) == 1 else 'have'} stopped"

    def _way_on(self, it: str) -> str:
        """Choices of a job that cannot go on."""
        if self.without_ms is None:
            return f"replace {it if self.ranks == self.stopped else rank_list(self.ranks)}"
        longer = ratio(self.without_ms / self.replaced_ms)
        return f"{self._leave_out} (steps take {longer} as long for the same work) or replace {it}"

    @property
    def _leave_out(self) -> str:
        if self.nodes:
            nodes = f"{noun_for(len(self.nodes), 'node')} {listed(self.nodes)}"
            return f"leave {nodes} out ({rank_list({*self.ranks, *self.others})})"
        whose = "its replica" if len(self.ranks) == 1 else "their replicas"
        others = f", with {rank_list(self.others)} of {whose}" if self.others else ""
        return f"leave {rank_list(self.ranks)} out{others}"
