"""Run history: lineages of checkpoints, and their order after a job has gone back.

A job that goes back to an older step and trains on from there begins a new lineage. Checkpoints of
older lineages at or after its first step are abandoned; earlier ones belong to its own past.
"""

from __future__ import annotations

import json
import operator
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from resihp.contracts import ContractError


@dataclass(frozen=True)
class Lineage:
    """An uninterrupted sequence of training steps in one run of a job.

    run    identifier of the lineage, the same on all ranks
    born   nanoseconds since 1970, later than any lineage known at that time; may differ by rank
    first  first step that could have been saved
    """

    run: str
    born: int = 0
    first: int = 0


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint on a level."""

    step: int
    lineage: Lineage


UNKNOWN = Lineage("")
"""Lineage of a checkpoint without one: chosen last, and never abandoned."""


class RunHistory:
    """Assigns lineages to the states that a process saves.

    run     identifier of this start of the job, the same on all ranks
    clock   nanoseconds since 1970
    stored  `born` of the newest lineage that is stored; 0 for none
    """

    def __init__(
        self, run: str, clock: Callable[[], int], stored: Callable[[], int] = lambda: 0
    ) -> None:
        self._run, self._clock, self._stored = run, clock, stored
        self._count = self._born = 0
        self._last: int | None = None
        self._restored: int | None = None
        self._lineage = Lineage(run)

    def at(self, step: int) -> Lineage:
        """Return the lineage of a state at `step`; a new one unless the step is a later one."""
        if self._last is None or step <= self._last:
            self._born = max(self._clock(), self._born + 1, self._stored() + 1)
            suffix = f"-{self._count}" if self._count else ""
            first = step if self._restored is None else min(step, self._restored + 1)
            self._lineage = Lineage(self._run + suffix, self._born, first)
            self._count, self._restored = self._count + 1, None
        self._last = step
        return self._lineage

    def branch(self, restored: int, newest_born: int) -> None:
        """Begin a new lineage with the next save, younger than `newest_born`.

        It trains from the step `restored` on: later ones of the past are abandoned, whichever of
        its own it saves first.
        """
        self._last, self._restored = None, restored
        self._born = max(self._born, newest_born)


def valid_step(step: object) -> int:
    """Convert a step to an integer. Raises `ContractError` if it is not from 0 to 2**63 - 1."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ContractError("step", f"{step!r} is not an integer") from None
    if not 0 <= number < 1 << 63:
        raise ContractError("step", f"{number} is not from 0 to 2**63 - 1")
    return number


def lineage_json(lineage: Lineage) -> bytes:
    """Content of the lineage file of a checkpoint."""
    fields = asdict(lineage)
    return json.dumps({**fields, "crc": _crc(fields)}).encode()


def read_lineage(content: bytes) -> Lineage | None:
    """Parse the output of `lineage_json`; None if it is damaged."""
    try:
        fields = json.loads(content)
        return Lineage(**fields) if fields.pop("crc") == _crc(fields) else None
    except (ValueError, TypeError, AttributeError, LookupError):
        return None


def _crc(fields: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(fields, sort_keys=True).encode())


def merged_lineage(lineages: Iterable[Lineage]) -> Lineage:
    """Merge the lineages that the ranks of one checkpoint recorded; `UNKNOWN` if there are none."""
    each = list(lineages)
    if not each:
        return UNKNOWN
    born, first = max(one.born for one in each), min(one.first for one in each)
    return Lineage(each[0].run, born, first) if born else UNKNOWN


def best_first(stored: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Sort checkpoints by newest lineage, then newest step; abandoned ones are left out.

    >>> old, new = Lineage("a", 1, 0), Lineage("b", 2, 101)
    >>> stored = [StoredCheckpoint(*each) for each in ((100, old), (120, old), (102, new))]
    >>> [one.step for one in best_first(stored)]
    [102, 100]
    """
    by_run: dict[str, set[StoredCheckpoint]] = defaultdict(set)
    for one in stored:
        by_run[one.lineage.run].add(one)
    best: list[StoredCheckpoint] = []
    limit: int | None = None
    for members in sorted(by_run.values(), key=_age, reverse=True):
        lineage = merged_lineage(one.lineage for one in members)
        is_known = lineage.born > 0
        kept = [m for m in members if limit is None or m.step < limit or not is_known]
        best += sorted(kept, key=lambda one: -one.step)
        if is_known:
            limit = lineage.first if limit is None else min(limit, lineage.first)
    return best


def expired(stored: Iterable[StoredCheckpoint], keep: int) -> set[int]:
    """Steps to delete so that the best `keep` checkpoints stay.

    A checkpoint without lineage, as torch's own writer leaves it, expires once all that stay have
    later steps.
    """
    each = list(stored)
    kept = {one.step for one in best_first(each)[:keep]}
    oldest = min(kept, default=0)
    return {
        one.step
        for one in each
        if one.step not in kept and (one.lineage.born > 0 or one.step < oldest)
    }


def _age(members: Iterable[StoredCheckpoint]) -> tuple[int, str]:
    lineage = merged_lineage(one.lineage for one in members)
    return lineage.born, lineage.run
