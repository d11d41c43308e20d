"""Records of collectives and transfers between ranks.

A collective ends everywhere at once, so that it takes as long as on the rank with the shortest
wait: what it takes longer on the others is their waiting. Only the part during which a rank does no
work of its own counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from resihp.contracts import Op

from ._rank_profile import Communication
from ._rank_records import Exposed, RankRecords, Row

_Key = tuple[Any, ...]


def shared_rows(
    ranks: Sequence[RankRecords], numbers: Sequence[Mapping[int, int]]
) -> Iterator[Row]:
    """The records in the steps that all ranks recorded; `numbers` has the numbers of these by their
    index on each rank. The waiting is unknown unless it follows from peers. A transfer whose other
    end is unknown tells nothing."""
    durations: dict[_Key, list[float]] = defaultdict(list)
    found: list[tuple[int, int, Exposed, _Key]] = []
    for rank, number in zip(ranks, numbers, strict=True):
        counts: dict[_Key, int] = defaultdict(int)
        for one in rank.exposed:
            if one.step not in number:
                continue
            step, talk = number[one.step], one.communication
            if talk.is_p2p and talk.peer < 0:
                continue
            what = (step, talk.is_p2p, *_participants(rank.rank, talk))
            key = (*what, counts[what])
            counts[what] += 1
            durations[key].append(talk.stop_us - talk.start_us)
            found.append((rank.rank, step, one, key))
    for own_rank, step, one, key in found:
        talk = one.communication
        is_alone = len(durations[key]) == 1
        wait_us = 0.0 if is_alone else max(one.exposed_us - min(durations[key]), 0.0)
        yield Row(
            own_rank,
            step,
            -1,
            Op.P2P if talk.is_p2p else Op.COLLECTIVE,
            (one.exposed_us - wait_us) * 1e-3,
            float("nan") if is_alone else wait_us * 1e-3,
            peer=talk.peer,
        )


def _participants(rank: int, one: Communication) -> _Key:
    """Group and name of a collective; ends of a transfer, the sender first where that is known."""
    if not one.is_p2p:
        return one.group, one.name
    sends, receives = ("send" in one.name.lower()), ("recv" in one.name.lower())
    if sends != receives:
        return (rank, one.peer) if sends else (one.peer, rank)
    return min(rank, one.peer), max(rank, one.peer), one.name
