"""The groups of a user's loop are built anew at each loss, and leave nothing behind."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from resihp.elastic.ddp.groups import connect_replica_groups
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.testing.local_ranks import LocalRanks

TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=5))


def test_connections_to_the_store_are_used_again(tmp_path: Path) -> None:
    opened: list[dist.Store] = []
    with LocalRanks("peers", tmp_path) as ranks:
        host, port = ranks.address

        def open_store() -> dist.Store:
            opened.append(connect(host, port, "peers", TIMEOUTS))
            return opened[-1]

        rendezvous = Rendezvous(open_store, 0, (0,), TIMEOUTS)
        rendezvous.start()
        counts = []
        for _ in range(3):
            peers = connect_replica_groups(rendezvous, ((0,), (0,), (0,)), is_starting=True)
            assert len(peers.groups) == 3
            counts.append(len(opened))
        assert counts[0] == counts[-1]
        rendezvous.close()
