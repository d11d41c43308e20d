"""Which checkpoints belong to the training that lives on, and which to a past that was given up.

A job that goes back to an older step and trains on from there begins a new lineage. Checkpoints of
older lineages from its first step on are abandoned; those before are its own past.
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
    """Training without a break, in one run of a job.

    run    the same text on all ranks, another one for each lineage
    born   nanoseconds since 1970, later than of every lineage known then; ranks may differ
    first  step at which it could first have been saved
    """

    run: str
    born: int = 0
    first: int = 0


@dataclass(frozen=True)
class StoredCheckpoint:
    """A complete checkpoint at some level."""

    step: int
    lineage: Lineage


UNKNOWN = Lineage("")
"""Of a checkpoint that does not tell: the last to be chosen, but never abandoned."""


class RunHistory:
    """The lineage of what a process saves.

    run    common text of all ranks
    clock  nanoseconds since 1970
    """

    def __init__(self, run: str, clock: Callable[[], int]) -> None:
        self._run, self._clock = run, clock
        self._count = self._born = 0
        self._last: int | None = None
        self._lineage = Lineage(run)

    def at(self, step: int) -> Lineage:
        """The lineage of a state at this step; a new one where it does not go on from the last."""
        if self._last is None or step <= self._last:
            self._born = max(self._clock(), self._born + 1)
            suffix = f"-{self._count}" if self._count else ""
            self._lineage = Lineage(self._run + suffix, self._born, step)
            self._count += 1
        self._last = step
        return self._lineage

    def branch(self, newest_born: int) -> None:
        """What is saved next is of a new lineage, born after those known."""
        self._last, self._born = None, max(self._born, newest_born)


def valid_step(step: object) -> int:
    """A step as a number. Raises `ContractError` for what names no checkpoint."""
    try:
        number = operator.index(step)  # type: ignore[arg-type]
    except TypeError:
        raise ContractError("step", f"{step!r} is no whole number") from None
    if not 0 <= number < 1 << 63:
        raise ContractError("step", f"{number} is not from 0 to 2**63 - 1")
    return number


def lineage_json(lineage: Lineage) -> bytes:
    """What stands beside a checkpoint."""
    told = asdict(lineage)
    return json.dumps({**told, "crc": _crc(told)}).encode()


def read_lineage(content: bytes) -> Lineage | None:
    """What `lineage_json` gave; None where it is damaged."""
    try:
        told = json.loads(content)
        crc = told.pop("crc", None)  # not there in checkpoints of before
        return Lineage(**told) if crc in (None, _crc(told)) else None
    except (ValueError, TypeError, AttributeError):
        return None


def _crc(told: dict[str, object]) -> int:
    return zlib.crc32(json.dumps(told, sort_keys=True).encode())


def merged_lineage(lineages: Iterable[Lineage]) -> Lineage:
    """What the ranks of one checkpoint say together; `UNKNOWN` where they do not tell."""
    each = list(lineages)
    if not each:
        return UNKNOWN
    born, first = max(one.born for one in each), min(one.first for one in each)
    return Lineage(each[0].run, born, first) if born else UNKNOWN


def best_first(found: Iterable[StoredCheckpoint]) -> list[StoredCheckpoint]:
    """Those that are not abandoned, best first: the newest lineage's newest step, and so on back.

    >>> old, new = Lineage("a", 1, 0), Lineage("b", 2, 101)
    >>> [f.step for f in living([Found(100, old), Found(120, old), Found(102, new)])]
    [102, 100]
    """
    by_run: dict[str, set[StoredCheckpoint]] = defaultdict(set)
    for one in found:
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


def expired(found: Iterable[StoredCheckpoint], keep: int) -> set[int]:
    """Steps to be retired where the best `keep` stay.

    What does not tell its lineage, as torch's own writer leaves it, goes by its number alone: once
    all that stay are later.
    """
    each = list(found)
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
