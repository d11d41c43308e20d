"""Groups of old generations are closed at once, whatever refers to them or is under way in them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch
import torch.distributed as dist

from resihp.elastic.process_groups.abortable import (
    AbortableProcessGroup,
    ProcessGroupFactory,
    WaitClock,
    close_groups,
)
from tests.elastic.held import native_threads

PATIENCE_S = 30.0


def groups(ranks: int) -> list[AbortableProcessGroup]:
    """One group, seen from each of its ranks; an exchange in it may last for ever."""
    store = dist.HashStore()

    def one(rank: int) -> AbortableProcessGroup:
        factory = ProcessGroupFactory(
            store,
            rank,
            broken=lambda *_: None,
            timeout=timedelta(hours=1),
            waited=WaitClock(),
        )
        return factory.group("group", tuple(range(ranks)))

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(one, range(ranks)))


def await_disposal() -> None:
    for thread in threading.enumerate():
        if thread.name == "resihp-close":
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a group is not let go"


def loops() -> set[str]:
    """Threads in which groups run, by their ids: those of earlier tests may end at any time."""
    return {task for task, name in native_threads().items() if name == "pt_gloo_runloop"}


def test_a_group_that_is_referred_to_is_closed_all_the_same() -> None:
    before = loops()
    ends = groups(2)
    for work in [end.start_all_reduce(torch.zeros(1)) for end in ends]:
        work.wait(timedelta(seconds=PATIENCE_S))  # so that their threads have begun, and have names
    own = loops() - before
    assert len(own) == 2
    close_groups(ends)
    await_disposal()
    deadline = time.monotonic() + PATIENCE_S
    while own & loops() and time.monotonic() < deadline:
        time.sleep(0.01)  # the system lists a thread a little longer than others wait for its end
    assert not own & loops()
    assert [end.ranks for end in ends] == [(0, 1)] * 2


def test_ranks_that_all_let_go_set_each_other_free() -> None:
    """Each waits in one group for another rank, which has left without joining in."""
    trio, pair = groups(3), groups(2)
    works = [
        trio[0].start_all_reduce(torch.zeros(8)),
        trio[1].start_all_reduce(torch.zeros(8)),
        pair[1].start_broadcast(torch.zeros(8), 0),
    ]
    assert not pair[1].is_idle
    for ends in zip(trio, pair, strict=False):
        close_groups(ends)
    close_groups([trio[2]])
    await_disposal()
    assert all(work.is_completed() for work in works)
