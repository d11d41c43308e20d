"""Environment of a process of the job: the variables that torchrun sets.

`RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`. `TORCHELASTIC_USE_AGENT_STORE` says that the
launcher hosts the store; otherwise rank 0 hosts it, and the job depends on that rank.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch.distributed as dist

from resihp.contracts import ContractError

from . import exit_status
from .membership import Rendezvous
from .store import Timeouts, address_towards, await_store, connect, host_store


@dataclass(frozen=True)
class Environment:
    """Rank of this process, and address of the store.

    prefix       of all keys in the store; differs between restarts
    hosts_store  this process has to host the store
    joins        this process joins a running job
    """

    rank: int
    world_size: int
    host: str
    port: int
    prefix: str
    hosts_store: bool
    joins: bool

    @classmethod
    def read(cls, given: Mapping[str, str]) -> Environment:
        """Read environment variables. Raises `ContractError` with the name of an invalid one."""
        rank = _number(given, "RANK")
        is_hosted = given.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true")
        run, restart = given.get("TORCHELASTIC_RUN_ID"), given.get("TORCHELASTIC_RESTART_COUNT")
        joins = given.get("RESIHP_JOIN") == "1"
        world_size = _number(given, "WORLD_SIZE")
        if rank >= world_size and not joins:
            raise ContractError("RANK", f"must be below WORLD_SIZE, {world_size}, not {rank}")
        return cls(
            rank=rank,
            world_size=world_size,
            host=given.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(given, "MASTER_PORT"),
            prefix=store_prefix(run or "none", restart or "0"),
            hosts_store=rank == 0 and not is_hosted and not joins,
            joins=joins,
        )

    def connect(self, timeouts: Timeouts) -> dist.Store:
        """Open a connection to the store."""
        return connect(self.host, self.port, self.prefix, timeouts)

    def rendezvous(
        self, members: Collection[int], timeouts: Timeouts, *, interface: str | None = None
    ) -> Rendezvous:
        """Return the rendezvous of the `members`; without members if this process is a joiner.

        Unhandled errors of ResiHP then end the process as `exit_status` describes.

        interface  address by which other hosts reach this one; default: that of its route to the
                   store
        """
        exit_status.install(self.rank)
        if self.joins:
            await_store(self.host, self.port, timeouts.connect)
        return Rendezvous(
            lambda: self.connect(timeouts),
            self.rank,
            () if self.joins else members,
            timeouts,
            host=interface or address_towards(self.host, self.port),
        )

    def host_store(self, timeouts: Timeouts) -> dist.Store | None:
        """The store, if this process has to host it; keep it until the job has ended."""
        if not self.hosts_store:
            return None
        return host_store(self.host, self.port, timeouts.connect)


def store_prefix(run: str, restart: str) -> str:
    """Prefix of all keys of one run; the launcher writes death notices below it."""
    return f"resihp/{run}/{restart}"


def _number(given: Mapping[str, str], name: str) -> int:
    value = given.get(name)
    if value is None or not value.isdigit():
        raise ContractError(name, f"must be a number, as torchrun sets it, not {value!r}")
    return int(value)
