"""Kept sums find their heirs whatever shape the survivors take: random layouts, one loss or two."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from resihp.contracts import Layout, Plan, Replica, Stage
from resihp.elastic.microbatches.assignment import full_assignments, remaining_assignments
from resihp.elastic.microbatches.ledger import SurvivingSum
from resihp.elastic.models import Llama, Model
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.reshard.gradient_migration import GradientMigration, moves_of_sums
from resihp.elastic.step import Engine, Setup
from resihp.elastic.step.gradient_allreduce import SummedGradients
from resihp.elastic.step.shard import initial_shard
from tests.elastic.test_models import ALONE, OPTIMIZER, SHAPE, TIED, batch
from tests.elastic.threads import exchange_of, on_ranks

MICROBATCHES, RANKS = 4, tuple(range(8))


@dataclass(frozen=True)
class Part:
    """What one rank holds of the summed gradients of a step."""

    loss: float
    norm: float
    total: SummedGradients


@dataclass(frozen=True)
class Act:
    """Ranks that are alive, their plan, and what they keep of what the act before has summed."""

    alive: tuple[int, ...]
    plan: Plan
    kept: tuple[SurvivingSum, ...] = ()


def random_plan(chosen: random.Random, ranks: tuple[int, ...], *, widest: int) -> Plan:
    """One to three replicas of uneven stages over some of `ranks`, with uneven quotas."""
    free, replicas = chosen.sample(ranks, len(ranks)), []
    while free and len(replicas) < chosen.randint(1, 3):
        stages = []
        cuts = sorted(chosen.sample(range(1, 4), min(chosen.randint(0, 2), len(free) - 1)))
        for left, (start, stop) in enumerate(zip([0, *cuts], [*cuts, 4], strict=True)):
            degree = max(1, min(chosen.randint(1, widest), len(free) - (len(cuts) - left)))
            members, free = tuple(free[:degree]), free[degree:]
            stages.append(Stage(members, (start, stop), (2, 1, 1)[:degree]))
        replicas.append(Replica(tuple(stages)))
    owners = [chosen.randrange(len(replicas)) for _ in range(MICROBATCHES)]
    quotas = tuple(owners.count(index) for index in range(len(replicas)))
    return Plan(version=0, layout=Layout(tuple(replicas)), quotas=quotas)


def random_acts(chosen: random.Random, *, losses: int, widest: int) -> list[Act]:
    """A step that is begun under one plan and ended under another, after as many losses."""
    acts = [Act(RANKS, random_plan(chosen, RANKS, widest=widest))]
    shares = full_assignments(acts[0].plan)
    for _ in range(losses):
        before = acts[-1]
        dead = chosen.choice(before.plan.layout.ranks)
        alive = tuple(rank for rank in before.alive if rank != dead)
        kept = tuple(
            SurvivingSum(index, share.whole)
            for index, share in enumerate(shares)
            if dead not in before.plan.layout.replicas[index].ranks and share.whole
        )
        plan = random_plan(chosen, alive, widest=widest)
        acts.append(Act(alive, plan, kept))
        shares = remaining_assignments(plan, before.plan.layout, kept)
    return acts


def play(setup: Setup, acts: list[Act]) -> list[Part]:
    """The summed gradients of the last act, as its ranks hold them."""

    def run_rank(factory: ProcessGroupFactory) -> Part | None:
        engine, rank = None, factory.rank
        for number, act in enumerate(acts):
            if rank not in act.alive:
                return None
            groups = shard = rest = None
            if rank in act.plan.layout.ranks:
                parameters = setup.model.parameters
                groups = build_layout_groups(
                    factory, act.plan.layout, parameters, name=f"generation{number}"
                )
                shard = initial_shard(setup.model, setup.optimizer, groups)
            if number:
                transit = factory.group(f"transit{number}", act.alive)
                before = acts[number - 1].plan
                sums = moves_of_sums(setup.model.parameters, before, act.plan, act.kept)
                exchange = exchange_of(factory, sums, f"sums{number}")
                migration = GradientMigration(setup, transit, exchange, before, act.plan)
                rest = migration.run(act.kept, engine, shard)
            engine = None
            if groups is not None and shard is not None:
                engine = Engine(setup, groups, shard, act.plan, factory.waited, rest)
                engine.accumulate(0)
        if engine is None:
            return None
        reduced = engine.reduce(0, 0)
        assert engine.total is not None
        return Part(reduced.loss, reduced.norm, engine.total)

    return [part for part in on_ranks(RANKS, run_rank).values() if part is not None]


def undisturbed(setup: Setup) -> Part:
    """The same step on one rank."""
    return play(setup, [Act(RANKS, Plan(version=0, layout=ALONE, quotas=(MICROBATCHES,)))])[0]


def assert_same_step(parts: list[Part], whole: Part, *, exact: bool) -> None:
    for part in parts:
        for (param, (start, stop)), total in part.total.items():
            expected = whole.total[param, (0, param.size)].narrow(
                param.dim or 0, start, stop - start
            )
            if exact:
                assert torch.equal(total, expected), param.key
            else:
                torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-6)
        if exact:
            assert (part.loss, part.norm) == (whole.loss, whole.norm)
        assert part.loss == pytest.approx(whole.loss, rel=1e-5)
        assert part.norm == pytest.approx(whole.norm, rel=1e-4)


@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("model", [Llama(SHAPE), Llama(TIED)], ids=["untied", "tied"])
@pytest.mark.parametrize("seed", range(3))
def test_the_step_is_the_undisturbed_one(seed: int, model: Model, losses: int) -> None:
    setup = Setup(model, OPTIMIZER, batch)
    whole = undisturbed(setup)
    for round_ in range(2):
        chosen = random.Random(8 * seed + round_)
        acts = random_acts(chosen, losses=losses, widest=3)
        assert_same_step(play(setup, acts), whole, exact=False)


@pytest.mark.parametrize("seed", range(3))
def test_in_a_fixed_order_it_is_so_to_the_last_bit(seed: int) -> None:
    """Wherever layers, replicas and quotas are cut; a wider group would add up in other order."""
    setup = Setup(Llama(SHAPE), OPTIMIZER, batch, deterministic=True)
    whole = undisturbed(setup)
    for round_ in range(2):
        chosen = random.Random(8 * seed + round_)
        acts = random_acts(chosen, losses=1 + round_, widest=1)
        assert_same_step(play(setup, acts), whole, exact=True)
