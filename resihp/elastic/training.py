"""Elastic training in one call, under torchrun or `resihp run`."""

from __future__ import annotations

import os
import signal
from dataclasses import replace

from resihp._preemption import PreemptionNotice
from resihp.client import Client
from resihp.contracts import ContractError, Job, Plan

from .checkpointing.settings import Checkpoints
from .monitoring import TrainingMonitor, attach_monitor
from .planning.sources import LocalPlans, PlanSource, ServicePlans
from .rendezvous import keys
from .rendezvous.environment import Environment
from .rendezvous.store import Timeouts
from .reshard.buffers import ReshardBudget
from .state.events import Callbacks
from .step import Setup
from .trainer import Trainer

_trained: set[Environment] = set()
"""Of the jobs that this process has trained."""


def train(
    setup: Setup,
    job: Job,
    steps: int,
    *,
    url: str | None = None,
    token: str | None = None,
    monitor: TrainingMonitor | None = None,
    callbacks: Callbacks | None = None,
    timeouts: Timeouts | None = None,
    memory: ReshardBudget | None = None,
    checkpoints: Checkpoints | None = None,
    interface: str | None = None,
) -> Trainer:
    """Train until `steps` updates have been made; every process of the job calls this, once.

    url, token   of the sidecar (default: `RESIHP_URL`, `RESIHP_TOKEN`); without a url the scheduler
                 plans in this process
    monitor      takes the records of this rank, e.g. `resihp.Monitor(job=job)`; without one no slow
                 device is detected
    callbacks    called during training
    timeouts     for waits on other ranks
    memory       budget of a change of layout
    checkpoints  that the job writes, and restores where state is lost; default: none
    interface    address under which other hosts reach this one; default: the one towards the store

    On a notice that it is taken away this rank hands over and returns, or raises `PreemptedError`
    where there is no time for that. A notice is SIGTERM, the file that `RESIHP_PREEMPTION_FILE`
    names, or an answer of `RESIHP_PREEMPTION_URL`; one that names no time leaves
    `RESIHP_PREEMPTION_SECONDS`, else as much time as is needed. A launcher sets these variables by
    its options. Raises as `Trainer.run` does, and `ContractError` if the environment does not fit,
    or if the job that it names has ended in this process before.
    """
    environment, timeouts = Environment.read(os.environ), timeouts or Timeouts()
    notice = PreemptionNotice.of_environment(os.environ)
    missing = set(job.layout.ranks) - set(range(environment.world_size))
    if missing and not environment.joins:
        held = f"is {environment.world_size}: there is no rank"
        raise ContractError("WORLD_SIZE", f"{held} {min(missing)}, which the layout needs")
    server = environment.host_store(timeouts)
    _require_unended(environment, timeouts)
    members = range(environment.world_size)
    callbacks = callbacks or Callbacks()
    setup = replace(setup, max_in_flight=job.max_in_flight, ranks_per_node=job.links.ranks_per_node)
    if monitor is not None:
        setup, callbacks = attach_monitor(monitor, setup, callbacks)
    first = Plan(version=0, layout=job.layout, quotas=job.quotas, schedule=job.schedule)
    trainer = Trainer(
        setup,
        first,
        environment.rendezvous(members, timeouts, interface=interface),
        _plans(job, url, token, timeouts),
        callbacks=callbacks,
        checkpoints=checkpoints,
        memory=memory,
    )
    notice.start(trainer.leave, signals=(signal.SIGTERM,))
    try:
        (trainer.join if environment.joins else trainer.run)(steps)
    finally:
        notice.close()
    del server  # not before the last step
    return trainer


def _require_unended(environment: Environment, timeouts: Timeouts) -> None:
    """Raise `ContractError` where the store of the launcher still has the end of the job before."""
    if environment in _trained and environment.connect(timeouts).check([keys.FINISHED]):
        raise ContractError(
            "job",
            "that of this process has ended: a process trains one elastic job, so start another "
            "for the next",
        )
    _trained.add(environment)


def _plans(job: Job, url: str | None, token: str | None, timeouts: Timeouts) -> PlanSource:
    """The sidecar of the arguments or the environment, else the scheduler in this process."""
    url = url or os.environ.get("RESIHP_URL")
    if not url:
        return LocalPlans(job)
    client = Client(url, token or os.environ.get("RESIHP_TOKEN"))
    return ServicePlans(client, job, patience=timeouts.plan)
