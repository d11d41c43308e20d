"""Verdicts in the words of the contract, with evidence that a person can read."""

from __future__ import annotations

import math

import numpy as np

from resihp.contracts import Status, Verdict

from .evidence.judge import CODES, FAIL_SLOW, FAIL_STOP, HEALTHY, INCONCLUSIVE, SUSPECT, Book


def verdict_of(
    rank: int, at: int, book: Book, suspect_at: float, step: int | None, notes: tuple[str, ...]
) -> Verdict:
    """The verdict on the rank at position `at` of the book."""
    code = int(book.status[at])
    since = None if book.since[at] < 0 else int(book.since[at])
    if code == HEALTHY:
        return Verdict(
            rank=rank,
            status=Status.HEALTHY,
            since_step=since,
            confidence=1.0 - _belief(float(book.evidence[at]), suspect_at),
            evidence=notes,
            step=step,
        )
    if code == FAIL_STOP:
        return Verdict(
            rank=rank, status=Status.FAIL_STOP, since_step=since, evidence=notes, step=step
        )
    interval = (round(float(book.low[at]), 4), round(float(book.high[at]), 4))
    slowdown = float(book.factor[at])
    measured = slowdown > 1.0
    belief = _belief(float(book.evidence[at]), suspect_at)
    return Verdict(
        rank=rank,
        status=CODES[code],
        slowdown=slowdown,
        since_step=since,
        confidence=0.5 if code == INCONCLUSIVE else belief,
        evidence=(*_sentences(book, at, code), *notes),
        interval=interval if measured else None,
        step=step,
    )


def _belief(evidence: float, suspect_at: float) -> float:
    return 1.0 / (1.0 + math.exp(-float(np.clip(evidence - suspect_at, -50.0, 50.0))))


def _sentences(book: Book, at: int, code: int) -> tuple[str, ...]:
    if book.factor[at] <= 1.0:
        return ()
    source = "its own past" if book.by_past[at] else "its peers on the same stage"
    extra = (book.factor[at] - 1.0) * 100
    low, high = (book.low[at] - 1.0) * 100, (book.high[at] - 1.0) * 100
    since = f"since step {book.since[at]}" if book.since[at] >= 0 else "since the first step seen"
    lines = [
        f"computes {extra:.1f}% longer than expected from {source} {since} "
        f"(95% interval {low:.1f}% to {high:.1f}%)"
    ]
    if code in (SUSPECT, FAIL_SLOW) and book.evidence[at] > 0:
        lines.append(f"odds of that by chance: 1 in {_odds(float(book.evidence[at]))}")
    if code == FAIL_SLOW and book.carried[at]:
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
