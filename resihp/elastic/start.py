"""Train a model elastically: the one call of a training script, under torchrun or our launcher.

The environment says who this process is, in the variables that torchrun sets: `RANK`,
`WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`. The launcher's store is used where it has one
(`TORCHELASTIC_USE_AGENT_STORE`); without one, rank 0 hosts it, and the job depends on that rank.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

import torch.distributed as dist

from resihp.client import Client
from resihp.contracts import ContractError, Job, Plan

from .engine import Setup
from .events import Hooks
from .membership.local_plans import LocalPlans
from .membership.plans import PlanSource, ServicePlans
from .membership.rendezvous import Rendezvous
from .membership.store import Timeouts, address_towards, connect
from .trainer import Trainer


@dataclass(frozen=True)
class Environment:
    """Who this process is, and where the others are to be found.

    prefix        of all keys in the store; another one for each restart
    hosts_store   this process has to host the store itself
    joins         the job is running already
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
        """From environment variables. Raises `ContractError` that names the one that is wrong."""
        rank = _number(given, "RANK")
        is_hosted = given.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() in ("1", "true")
        run, restart = given.get("TORCHELASTIC_RUN_ID"), given.get("TORCHELASTIC_RESTART_COUNT")
        joins = given.get("RESIHP_JOIN") == "1"
        return cls(
            rank=rank,
            world_size=_number(given, "WORLD_SIZE"),
            host=given.get("MASTER_ADDR", "127.0.0.1"),
            port=_number(given, "MASTER_PORT"),
            prefix=store_prefix(run or "none", restart or "0"),
            hosts_store=rank == 0 and not is_hosted and not joins,
            joins=joins,
        )


def store_prefix(run: str, restart: str) -> str:
    """Under which the keys of one run stand, so that its launcher can tell who has died."""
    return f"resihp/{run}/{restart}"


def train(
    setup: Setup,
    job: Job,
    steps: int,
    *,
    url: str | None = None,
    hooks: Hooks | None = None,
    timeouts: Timeouts | None = None,
    limit_bytes: int = 256 << 20,
    interface: str | None = None,
) -> Trainer:
    """Train until `steps` updates have been made; every process of the job calls this.

    url        of the sidecar (default: `RESIHP_URL`); without one the scheduler plans in-process
    interface  address by which other hosts reach this one; default: the one towards the store

    On SIGTERM this rank hands over and returns. Raises as `Trainer.run` does, and `ContractError`
    if the environment does not fit the job.
    """
    environment, timeouts = Environment.read(os.environ), timeouts or Timeouts()
    working = set(job.layout.ranks)
    if not environment.joins and not working <= set(range(environment.world_size)):
        raise ContractError("WORLD_SIZE", f"the layout needs {len(working)} ranks")
    server = _host(environment, timeouts) if environment.hosts_store else None
    url = url or os.environ.get("RESIHP_URL")
    plans: PlanSource = LocalPlans(job)
    if url:
        plans = ServicePlans(Client(url), job, patience=timeouts.plan)
    host, port, prefix = environment.host, environment.port, environment.prefix
    members = [environment.rank] if environment.joins else range(environment.world_size)
    rendezvous = Rendezvous(
        lambda: connect(host, port, prefix, timeouts),
        environment.rank,
        members,
        timeouts,
        host=interface or address_towards(host, port),
    )
    first = Plan(version=0, layout=job.layout, quotas=job.quotas)
    trainer = Trainer(setup, first, rendezvous, plans, hooks=hooks, limit_bytes=limit_bytes)
    _leave_on_sigterm(trainer)
    (trainer.join if environment.joins else trainer.run)(steps)
    del server  # not before the last step
    return trainer


def _host(environment: Environment, timeouts: Timeouts) -> dist.Store:
    return dist.TCPStore(
        environment.host,
        environment.port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeouts.connect,
    )


def _leave_on_sigterm(trainer: Trainer) -> None:
    def told(number: int, frame: FrameType | None) -> None:
        trainer.leave()

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, told)


def _number(given: Mapping[str, str], name: str) -> int:
    value = given.get(name)
    if value is None or not value.isdigit():
        raise ContractError(name, f"must be a number, as torchrun sets it, not {value!r}")
    return int(value)
