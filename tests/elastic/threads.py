"""Ranks as threads of the test's own process, over the runtime's real communication.

Much faster to start than processes; for what concerns the arithmetic and not the loss of ranks.
They hold one interpreter lock by turns, and hand it over with a third less work on one core.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TypeVar

import pytest
import torch
import torch.distributed as dist

from resihp.contracts import Plan
from resihp.elastic.microbatches.stealing import Claims
from resihp.elastic.process_groups.abortable import ProcessGroupFactory, WaitClock
from resihp.elastic.process_groups.communicators import Communicators
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.reshard.exchange import TensorExchange, pairs_of
from resihp.elastic.reshard.shared_memory import probe_peer_memory
from resihp.elastic.step import Engine, ReducedStep, Setup
from resihp.elastic.step.shard import Shard, initial_shard
from resihp.layout import Move, Param, Range, shards

LIMIT = timedelta(minutes=1)
T = TypeVar("T")
State = dict[Param, list[torch.Tensor]]


@dataclass(frozen=True)
class Run:
    """Loss and gradient norm of each step, how many microbatches were stolen, and what each rank
    holds in the end."""

    losses: list[float]
    norms: list[float]
    shards: dict[int, Shard]
    stolen: list[int] = field(default_factory=list)

    @cached_property
    def state(self) -> State:
        """The whole state; ranks that hold the same must agree to the last bit."""
        return gathered(self.shards)


def train(
    setup: Setup,
    plan: Plan,
    steps: int,
    claims: Callable[[int, int], Claims] | None = None,
    maker: type[Communicators] | None = None,
) -> Run:
    """Train `steps` steps, a thread for each rank of the plan.

    `claims`, by rank and step, as far as the engine may use them; `maker` of communicators.
    """

    def run_rank(factory: ProcessGroupFactory) -> tuple[Shard, list[ReducedStep]]:
        groups = build_layout_groups(
            factory,
            plan.layout,
            setup.model.parameters,
            name="generation",
            copies=setup.state_copies,
        )
        shard = initial_shard(setup.model, setup.optimizer, groups)
        engine = Engine(setup, groups, shard, plan, factory.waited)
        done = []
        for step in range(steps):
            may_claim = claims is not None and engine.can_claim
            engine.accumulate(
                step, claims=claims(factory.rank, step) if claims and may_claim else None
            )
            done.append(engine.reduce(step, 0, can_claim=may_claim))
            engine.update(done[-1].norm, step)
            engine.gather()
        return engine.shard, done

    found = on_ranks(plan.layout.ranks, run_rank, maker)
    done, *others = (steps_of_rank for _, steps_of_rank in found.values())
    assert all(other == done for other in others), "ranks disagree on the losses"
    return Run(
        [one.loss for one in done],
        [one.norm for one in done],
        {rank: shard for rank, (shard, _) in found.items()},
        [one.stolen for one in done],
    )


def on_ranks(
    ranks: tuple[int, ...],
    work: Callable[[ProcessGroupFactory], T],
    maker: type[Communicators] | None = None,
) -> dict[int, T]:
    """What `work` returns for each rank, given its network; the first error of any of them."""
    store, failed = dist.HashStore(), threading.Event()

    def gone(others: object, seconds: float) -> str | None:
        return "another rank failed" if failed.is_set() or seconds > LIMIT.total_seconds() else None

    networks = {
        rank: ProcessGroupFactory(
            store, rank, broken=gone, timeout=LIMIT, waited=WaitClock(), maker=maker
        )
        for rank in ranks
    }

    def run_rank(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            return work(networks[rank])
        except BaseException:
            failed.set()
            raise

    with _one_core(), ThreadPoolExecutor(len(ranks)) as pool:
        futures = {rank: pool.submit(run_rank, rank) for rank in ranks}
    errors = [e for f in futures.values() if (e := f.exception()) is not None]
    if errors:
        raise min(errors, key=lambda error: "another rank failed" in str(error))
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(_close, networks.values()))
    return {rank: future.result() for rank, future in futures.items()}


@contextmanager
def _one_core() -> Iterator[None]:
    """Threads that are started meanwhile run on one core, not the same one in each process."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {sorted(cores)[os.getpid() % len(cores)]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def _close(factory: ProcessGroupFactory) -> None:
    """Let its groups go now: left to the garbage collector, hundreds go at once, in mid-test.

    gloo lets go of each connection at the next tick of its loop, up to 10 ms later.
    """
    for group in factory.groups:
        group.close()


def exchange_of(factory: ProcessGroupFactory, planned: Sequence[Move], name: str) -> TensorExchange:
    """One rank's end of `planned` moves, with groups of their own and small buffers."""
    groups = {p: factory.group(f"{name}/pair", p) for p in pairs_of(planned, factory.rank)}
    pairs = {p: probe_peer_memory(group, factory.rank, attach=True) for p, group in groups.items()}
    return TensorExchange(pairs, factory.rank, buffer_bytes=4096, on_transfer=lambda number: None)


def gathered(shards: dict[int, Shard]) -> State:
    """The whole state from the shards of all ranks; what several hold must be equal."""
    full: State = {}
    for shard in shards.values():
        for param, span, tensors in held_by(shard):
            copies = 1 + len(shard.settings.form.moments)
            empty = [torch.full(param.shape, torch.nan) for _ in range(copies)]
            for target, tensor in zip(full.setdefault(param, empty), tensors, strict=False):
                view = target.narrow(param.dim or 0, span[0], span[1] - span[0])
                held = ~view.isnan()
                assert torch.equal(view[held], tensor[held]), f"holders of {param.key} differ"
                view.copy_(tensor.detach())
    assert not any(t.isnan().any() for tensors in full.values() for t in tensors)
    return full


def held_by(shard: Shard) -> Iterator[tuple[Param, Range, tuple[torch.Tensor, ...]]]:
    """The parameters that a rank holds, and the rows with moments, if it has not those of all."""
    for param, span in shard.ranges.items():
        if (param, span) not in shard.slices:
            yield param, span, (shard.tensors[param].data,)
    for param, span in shard.slices:
        yield param, span, shard.state((param, span))


def cut_small_blocks(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Cut optimizer state that is sharded over replicas into blocks of a few rows.

    Without `monkeypatch` for the life of this process.
    """
    (monkeypatch or pytest.MonkeyPatch()).setattr(shards, "_BLOCK_NUMEL", 64)
