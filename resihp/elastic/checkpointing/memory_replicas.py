"""In-memory checkpoint replication: each rank's state in its own memory and in a peer's."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch.distributed as dist

from resihp.checkpoint import HostMemory, Level, PeerMemory
from resihp.checkpoint.levels.host_memory import ImageStore
from resihp.checkpoint.levels.peer_server import Address, PeerServer

from ..rendezvous import keys

_log = logging.getLogger("resihp.elastic")
_SILENCE_S = 10.0
"""Longest wait on a peer, which may have been lost."""


class MemoryReplicas:
    """In-memory checkpoints that one rank holds, its own and those of peers, over all layouts.

    A layout's writer sends to a peer of that layout; what was sent before stays until enough of the
    new has come, so that a loss soon after a change finds something whole.

    host     by which peers reach this rank
    store    shares a token and the addresses of all ranks
    own      level in the memory of this rank
    address  of its server
    """

    def __init__(self, keep: int, rank: int, host: str, store: dist.Store) -> None:
        self._rank, self._store = rank, store
        self.own = HostMemory(keep=keep)
        secret = secrets.token_hex(16)
        token = store.compare_set(keys.CHECKPOINT_TOKEN, "", secret).decode()
        self._server = PeerServer(
            ImageStore(keep), self.own.store, (host, 0), token, 1000 * _SILENCE_S
        )
        self.address: Address = self._server.address
        store.set(keys.checkpoint_server(rank), json.dumps(self.address))

    def peer(self) -> PeerMemory:
        """Return a level in the memory of a peer, to be connected to it."""
        silence = timedelta(seconds=_SILENCE_S)
        return PeerMemory(self.own, server=self._server, timeout=silence)

    def connect(self, peer: PeerMemory, ranks: Sequence[int]) -> None:
        """Choose a peer among the ranks of a layout, one on another host where there is any."""
        try:
            told = {
                rank: json.loads(self._store.get(keys.checkpoint_server(rank))) for rank in ranks
            }
        except dist.DistError as error:
            _log.warning("the store does not tell where peers are; no copies there: %s", error)
            return
        addresses: dict[int, Address] = {rank: (host, port) for rank, (host, port) in told.items()}
        peer.connect(self._rank, addresses, distance=distance(self._rank, addresses))

    def reader(self, addresses: Mapping[int, Address]) -> Level:
        """Return a level that reads the images of all `addresses`."""
        reader = self.peer()
        reader.connect(self._rank, addresses)
        return reader

    def close(self) -> None:
        """Release all images and stop the server."""
        self._server.close()
        self.own.store.clear()


def distance(rank: int, addresses: Mapping[int, Address]) -> int:
    """Return the distance to the next rank on another host; 1 where all are on one host.

    >>> distance(1, {0: ("a", 1), 1: ("a", 2), 2: ("a", 3), 3: ("b", 1)})
    2
    """
    ranks = sorted(addresses)
    turned = ranks[ranks.index(rank) + 1 :] + ranks[: ranks.index(rank)]
    hosts = [addresses[other][0] != addresses[rank][0] for other in turned]
    return hosts.index(True) + 1 if True in hosts else 1
