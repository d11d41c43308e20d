"""The groups of a user's loop are built anew at each loss, and leave nothing behind."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from resihp.elastic.ddp.groups import connect_replica_groups
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
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
