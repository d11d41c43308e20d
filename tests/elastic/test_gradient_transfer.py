"""Summed gradients move while backward still runs, each not before it is whole."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import pytest
import torch

from resihp.contracts import Layout, PeerLostError, Plan, Replica, Schedule, Stage, even_quotas
from resihp.elastic.models import Llama
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.reshard.gradient_transfer import GradientTransfer
from resihp.elastic.step import Engine, Setup
from resihp.elastic.step.gradient_allreduce import GradientAllReduce
from resihp.elastic.step.shard import Shard, initial_shard
from resihp.layout import Param, StateRange, moves, state_ranges
from tests.elastic.engine_job import ALONE, GRID, MICROBATCHES, OPTIMIZER, SHAPE, UNEVEN, batch
from tests.elastic.threads import LIMIT, exchange_of, on_ranks

MODEL = Llama(replace(SHAPE, tied_embeddings=True))
PARAMETERS = MODEL.parameters
PIPELINE = Layout.grid(dp=1, pp=2, tp=2, layers=4)


def engine_of(setup: Setup, plan: Plan, factory: ProcessGroupFactory) -> Engine:
    """The engine of one rank."""
    groups = build_layout_groups(
        factory, plan.layout, PARAMETERS, name="generation", copies=setup.state_copies
    )
    shard = initial_shard(setup.model, setup.optimizer, groups)
    return Engine(setup, groups, shard, plan, factory.waited)


def await_whole(engine: Engine, some: Sequence[StateRange]) -> dict[StateRange, torch.Tensor]:
    """The gradients of some rows, once all are whole."""
    deadline = time.monotonic() + LIMIT.total_seconds()
    while True:
        known = {held: engine.sum_of(held) for held in some}
        whole = {held: summed for held, summed in known.items() if summed is not None}
        if len(whole) == len(some):
            return whole
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("layout", "schedule"),
    [
        (PIPELINE, Schedule.ONE_F_ONE_B),
        (PIPELINE, Schedule.ZERO_BUBBLE),
        (Layout.grid(dp=1, pp=2, tp=1, layers=4, chunks=2), Schedule.INTERLEAVED),
        (GRID, Schedule.ONE_F_ONE_B),
        (UNEVEN, Schedule.ONE_F_ONE_B),
    ],
)
def test_what_is_given_before_the_end_of_a_step_is_what_its_update_uses(
    layout: Layout, schedule: Schedule
) -> None:
    """The same memory as well: a peer may read it until all ranks have voted."""
    quotas = even_quotas(MICROBATCHES, layout.dp)
    plan = Plan(version=0, layout=layout, quotas=quotas, schedule=schedule)
    barrier = threading.Barrier(len(layout.ranks))

    def work(factory: ProcessGroupFactory) -> None:
        engine = engine_of(Setup(MODEL, OPTIMIZER, batch), plan, factory)
        for step in range(2):
            assert not any(engine.sum_of(held) is not None for held in engine.shard.slices)
            engine.accumulate(step)
            assert engine._overlapped is not None
            engine._overlapped.start()
            is_shared = layout.dp > 1 and len(engine.groups.tp) > 1
            early = [h for h in engine.shard.slices if not (is_shared and h[0].dim is None)]
            given = await_whole(engine, early)
            barrier.wait(LIMIT.total_seconds())
            norm = engine.reduce(step, 0).norm
            assert engine.total is not None
            for held, tensor in given.items():
                assert engine.total[held].data_ptr() == tensor.data_ptr()
                assert engine.total[held].equal(tensor)
            engine.update(norm, step)

    on_ranks(layout.ranks, work)


@pytest.mark.parametrize("setting", [{"deterministic": True}, {"optimizer_replicas": 1}])
def test_sums_that_are_not_known_before_the_end_are_not_given(setting: dict[str, Any]) -> None:
    plan = Plan(version=0, layout=GRID, quotas=even_quotas(MICROBATCHES, GRID.dp))

    def work(factory: ProcessGroupFactory) -> None:
        engine = engine_of(Setup(MODEL, OPTIMIZER, batch, **setting), plan, factory)
        engine.accumulate(0)
        assert all(engine.sum_of(held) is None for held in engine.shard.slices)
        engine.reduce(0, 0)
        assert all(engine.sum_of(held) is not None for held in engine.shard.slices)

    on_ranks(GRID.ranks, work)


def test_sums_are_put_together_while_another_thread_takes_more() -> None:
    """Of a model whose parameters are made anew for each who asks."""
    names, before = [f"p{i}" for i in range(300)], sys.getswitchinterval()
    zeros, span = torch.zeros(2), (0, 2)
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(300):
            held = {Param(name, (2,)): zeros for name in names}
            summing = GradientAllReduce.__new__(GradientAllReduce)
            summing._given = {}
            summing._shard = cast(
                Shard,
                SimpleNamespace(
                    slices=dict.fromkeys((param, span) for param in held),
                    ranges=dict.fromkeys(held, span),
                ),
            )

            def take(given: dict[StateRange, torch.Tensor] = summing._given) -> None:
                for name in names:
                    given.setdefault((Param(name, (2,)), span), zeros)

            with (
                mock.patch.object(summing, "_whole", lambda held=held: held),
                ThreadPoolExecutor(1) as pool,
            ):
                taken = pool.submit(take)
                while not taken.done():
                    assert len(summing.finish()) == len(names)
    finally:
        sys.setswitchinterval(before)


class ScriptedEngine:
    """The engine of the only rank of a layout; its gradients become whole when the test says so."""

    def __init__(self) -> None:
        chosen = torch.Generator().manual_seed(0)
        self.held = state_ranges(ALONE, PARAMETERS, None)[0]
        self.total = {
            (param, span): torch.randn(param.shape, generator=chosen)
            for param, spans in self.held.items()
            for span in spans
        }
        self.shard = SimpleNamespace(state_ranges=self.held, slices={})
        self.is_ending = threading.Event()
        self.whole: set[StateRange] = set()

    def sum_of(self, held: StateRange) -> torch.Tensor | None:
        return self.total[held] if held in self.whole else None


def await_received(
    given: dict[StateRange, torch.Tensor], received: dict[StateRange, torch.Tensor]
) -> None:
    """Wait until all of it is there."""
    deadline = time.monotonic() + LIMIT.total_seconds()
    while not all(received[held].equal(tensor) for held, tensor in given.items()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


OTHER = Layout((Replica((Stage((1,), (0, 4), (4,)),)),))
"""As `ALONE`, on another rank."""


def test_each_part_moves_while_those_before_it_are_computed() -> None:
    planned = moves(ALONE, OTHER, PARAMETERS)
    giver = ScriptedEngine()
    received = {held: torch.zeros_like(tensor) for held, tensor in giver.total.items()}
    taker: Any = SimpleNamespace(shard=SimpleNamespace(slices=received), gradients=received)

    def run(factory: ProcessGroupFactory) -> dict[StateRange, torch.Tensor] | None:
        engine, pending = (cast(Engine, giver), None) if factory.rank == 0 else (None, taker)
        exchange = exchange_of(factory, planned, "step")
        moving = GradientTransfer(planned, PARAMETERS, exchange, engine, pending, early=True)
        moving.run(threading.Event())
        factory.group("end", (0, 1)).all_reduce(torch.zeros(1))  # as a vote would
        return moving.total()

    def script() -> None:
        giver.is_ending.set()
        for part in reversed(PARAMETERS.layers):
            giver.whole |= {held for held in giver.total if held[0] in part}
            split = [held for held in giver.whole if held[0].dim is not None]
            await_received({held: giver.total[held] for held in split}, received)
            for held, tensor in received.items():
                assert held in giver.whole or not tensor.any()
        giver.whole |= giver.total.keys()

    with ThreadPoolExecutor(1) as pool:
        told = pool.submit(script)
        found = on_ranks((0, 1), run)
        told.result()
    assert found[0] is None
    assert found[1] is not None
    assert all(found[1][held].equal(tensor) for held, tensor in giver.total.items())


def test_a_change_that_is_given_up_waits_for_no_gradient() -> None:
    planned = moves(ALONE, OTHER, PARAMETERS)

    def run(factory: ProcessGroupFactory) -> None:
        cancelled, engine = threading.Event(), cast(Engine, ScriptedEngine())
        exchange = exchange_of(factory, planned, "step")
        if factory.rank == 1:
            return
        moving = GradientTransfer(planned, PARAMETERS, exchange, engine, None, early=True)
        threading.Timer(0.05, cancelled.set).start()
        with pytest.raises(PeerLostError, match="given up"):
            moving.run(cancelled)

    on_ranks((0, 1), run)
