"""The groups of a user's loop are built anew at each loss, and leave nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from resihp.contracts import PeerLostError
from resihp.elastic.ddp.groups import connect_replica_groups
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, announce_death, connect
from resihp.testing.local_ranks import LocalRanks

TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=5))


def test_connections_to_the_store_are_used_again(tmp_path: Path) -> None:
    openers: list[str] = []  # the rendezvous' watcher opens its own when its thread comes to it
    with LocalRanks("peers", tmp_path) as ranks:
        host, port = ranks.address

        def open_store() -> dist.Store:
            openers.append(threading.current_thread().name)
            return connect(host, port, "peers", TIMEOUTS)

        rendezvous = Rendezvous(open_store, 0, (0,), TIMEOUTS)
        rendezvous.start()
        for _ in range(3):
            peers = connect_replica_groups(rendezvous, ((0,), (0,), (0,)), is_starting=True)
            assert len(peers.groups) == 3
        assert openers.count("resihp-replica-groups") == 1
        rendezvous.close()


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Rendezvous]:
    """Of the first of two ranks, as the job starts; the other one does not run."""
    timeouts = Timeouts(heartbeat=timedelta(seconds=1), connect=timedelta(seconds=1.5))
    with LocalRanks("peers", tmp_path) as ranks:
        host, port = ranks.address
        one = Rendezvous(lambda: connect(host, port, "peers", timeouts), 0, (0, 1), timeouts)
        one.start()
        yield one
        one.close()


def test_a_peer_that_dies_while_the_job_starts_is_not_waited_for(first: Rendezvous) -> None:
    announce_death(first.stores.store, 1)
    with pytest.raises(PeerLostError, match=r"ranks \[1\] do not answer"):
        connect_replica_groups(first, ((0, 1), (0, 1), ()), is_starting=True)
    assert first.is_broken


def test_a_peer_that_has_not_come_yet_as_the_job_starts_is_waited_for(
    first: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For longer than it would be in a job that runs."""
    start, limit_s = time.monotonic(), 2 * first.timeouts.connect.total_seconds()
    has_come, ask = threading.Event(), first.lost

    def lost(ranks: Collection[int], waited_s: float) -> list[int]:
        if time.monotonic() > start + limit_s:
            has_come.set()
        return ask(ranks, waited_s)

    monkeypatch.setattr(first, "lost", lost)
    connecting = threading.Thread(target=has_come.wait, daemon=True)
    connecting.start()
    first.join(connecting, (0, 1), is_starting=True)
    assert not first.is_broken
