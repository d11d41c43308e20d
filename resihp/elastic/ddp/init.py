"""torch's default process group for the processes of one replica, not of the whole job."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist

from resihp.contracts import ContractError

from ..rendezvous import keys
from ..rendezvous.environment import Environment
from ..rendezvous.store import Timeouts
from .step import ReplicaRank


def init_replica_group(
    members: int,
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    environment: Environment | None = None,
) -> None:
    """In place of `dist.init_process_group`: FSDP2 and DDP then stay within this replica.

    members      processes of a replica: consecutive ranks
    backend      as torch takes it
    timeout      of the group's exchanges
    environment  who this process is; default: what torchrun or our launcher says

    The processes of a replica start, and come back, together.
    """
    environment = environment or Environment.read(os.environ)
    if environment.hosts_store:
        raise ContractError("store", "no launcher hosts it, and the groups of replicas need it now")
    seat = ReplicaRank.of(environment, members)
    store = environment.connect(Timeouts())
    life = store.add(
        keys.replica_group_starts(seat.rank), 1
    )  # a replica that comes back finds old keys there
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(keys.replica_group_prefix(seat.replica, life), store),
        rank=seat.index,
        world_size=members,
        timeout=timeout,
    )
