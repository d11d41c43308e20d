"""A copy that is longer than a step is cut into parts that ranks agree on."""

from __future__ import annotations

from collections import Counter
from math import inf
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Layout
from resihp.elastic.process_groups.abortable import AbortableProcessGroup, ProcessGroupFactory
from resihp.elastic.reshard.shared_memory import probe_peer_memory
from resihp.elastic.reshard.spreading import CopyPace, copy_seconds, segments, time_links
from resihp.layout import Param, moves
from tests.elastic.engine_job import GRID, SHIFTED, UNEVEN
from tests.elastic.test_gradient_transfer import PARAMETERS
from tests.elastic.threads import on_ranks


class Maxima:
    """A group whose other ranks have told their own values."""

    device = torch.device("cpu")

    def __init__(self, *others: CopyPace) -> None:
        self._others = [[one.copy_s, -one.step_s, -one.most_steps] for one in others]

    def all_reduce_max(self, own: torch.Tensor) -> torch.Tensor:
        told = torch.tensor([own.tolist(), *self._others], dtype=own.dtype)
        return told.max(dim=0).values


def agreed(own: CopyPace, *others: CopyPace) -> int:
    return own.agree(cast(AbortableProcessGroup, Maxima(*others)))


@pytest.mark.parametrize(
    ("own", "others", "steps"),
    [
        (CopyPace(0.1, 1.0, 50), (), 1),
        (CopyPace(1.1, 1.0, 50), (), 3),
        (CopyPace(0.1, 1.0, 50), (CopyPace(2.0, 0.5, 50),), 8),
        (CopyPace(9.0, 1.0, 50), (CopyPace(0.1, 1.0, 4),), 4),
        (CopyPace(9.0, 1.0, 50), (CopyPace(0.1, 1.0, 0),), 1),
        (CopyPace(9.0, inf, 50), (CopyPace(),), 1),
        (CopyPace(9.0, 0.0, 50), (), 1),
        (CopyPace(2.0), (CopyPace(0.0, 1.0, 50),), 4),
    ],
)
def test_the_slowest_copy_and_the_shortest_step_decide(
    own: CopyPace, others: tuple[CopyPace, ...], steps: int
) -> None:
    """The last one is a rank that comes, whose steps nobody knows."""
    assert agreed(own, *others) == steps
    for first, *rest in ([other, own] for other in others):
        assert agreed(first, *rest) == steps


@given(st.sampled_from([(GRID, SHIFTED), (GRID, UNEVEN), (UNEVEN, GRID)]), st.integers(1, 60))
def test_parts_hold_each_parameter_once_and_about_as_much_each(
    change: tuple[Layout, Layout], count: int
) -> None:
    planned = moves(*change, PARAMETERS)
    parts = segments(planned, PARAMETERS, count)
    assert 1 <= len(parts) <= count
    assert sorted(param.key for part in parts for param in part) == sorted(
        param.key for param in PARAMETERS.all
    )
    moved = Counter[Param]()
    for move in planned:
        moved[move.param] += move.numel
    most = moved.total() / count + max(moved.values())
    assert all(sum(moved[param] for param in part) <= most for part in parts)


def test_a_rank_times_what_it_receives() -> None:
    planned = moves(GRID, SHIFTED, PARAMETERS)
    target = planned[0].target
    due = {move.source: 0 for move in planned}
    for move in planned:
        due[move.source] += move.numel * (move.target == target)
    seconds_of = {source: 1.0 + source for source in due}
    expected = sum(12.0 * numel * seconds_of[source] for source, numel in due.items())
    assert copy_seconds(planned, 3, target, seconds_of) == pytest.approx(expected)


@pytest.mark.parametrize("attach", [True, False])
def test_links_are_timed_in_both_directions(attach: bool) -> None:
    pairs = [(0, 1), (0, 2), (1, 2)]

    def work(factory: ProcessGroupFactory) -> Any:
        own = [pair for pair in pairs if factory.rank in pair]
        links = {
            pair: probe_peer_memory(factory.group("pair", pair), factory.rank, attach=attach)
            for pair in own
        }
        return time_links(links, factory.rank)

    for rank, seconds in on_ranks((0, 1, 2), work).items():
        assert seconds.keys() == {0, 1, 2} - {rank}
        assert all(one > 0.0 for one in seconds.values())
