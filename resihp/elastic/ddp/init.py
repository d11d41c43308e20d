"""Default process group of torch over the processes of one replica instead of the whole job."""

from __future__ import annotations

import os
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from resihp.contracts import ContractError

from ..rendezvous import keys
from ..rendezvous.environment import Environment
from ..rendezvous.store import Timeouts
from .step import ReplicaCoordinates


def init_replica_group(
    members: int,
    backend: str | None = None,
    *,
    timeout: timedelta | None = None,
    environment: Environment | None = None,
) -> None:
    """Replace `dist.init_process_group`, so that FSDP2 and DDP stay within this replica.

    members      processes of a replica: consecutive ranks
    backend      as torch takes it
    timeout      of the group's exchanges, and of its requests to the store
    environment  rank and store of this process; default: the variables of the launcher

    The processes of a replica start, and restart, together. Raises `ContractError`.
    """
    environment = environment or Environment.read(os.environ)
    if environment.hosts_store:
        raise ContractError("store", "no launcher hosts it, and the groups of replicas need it now")
    coordinates = ReplicaCoordinates.of(environment, members)
    store = environment.connect(Timeouts())
    # torch waits in it at the first exchange of a group, to which processes may come late.
    store.set_timeout(timeout or default_pg_timeout)
    # A replica that restarts finds the keys of its predecessor in the store.
    start = store.add(keys.replica_group_starts(coordinates.rank), 1)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(keys.replica_group_prefix(coordinates.replica, start), store),
        rank=coordinates.index,
        world_size=members,
        timeout=timeout,
    )
