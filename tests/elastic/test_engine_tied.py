"""Tied parameters when a step goes on in another layout: each half of their sum counts once."""

from __future__ import annotations

import pytest

from resihp.contracts import Layout, Plan, Replica, Stage
from resihp.elastic.microbatches.ledger import SurvivingSum
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.reshard.gradient_migration import GradientMigration, moves_of_sums
from resihp.elastic.step import Engine, Setup
from resihp.elastic.step.shard import initial_shard
from tests.elastic.test_models import ALONE, MODELS, OPTIMIZER, batch
from tests.elastic.threads import exchange_of, on_ranks, train

MICROBATCHES = 5
ONE, TWO = Stage((2,), (0, 4)), (Stage((0,), (0, 3)), Stage((1,), (3, 4)))
BEFORE = Plan(version=0, layout=Layout((Replica(TWO), Replica((ONE,)))), quotas=(3, 2))
AFTER = {
    "one group": Layout((Replica((Stage((1, 0), (0, 4), (1, 3)),)),)),
    "ends swapped": Layout((Replica((Stage((1,), (0, 2)), Stage((0,), (2, 4)))),)),
    "ends swapped, another replica": Layout(
        (Replica((Stage((1,), (0, 2)), Stage((0,), (2, 4)))), Replica((ONE,)))
    ),
}


@pytest.mark.parametrize(
    ("summed", "deterministic"),
    [(False, False), (False, True), (True, False)],
    ids=["local sum", "local sums in order", "sum over replicas"],
)
@pytest.mark.parametrize("layout", AFTER.values(), ids=AFTER)
def test_a_step_goes_on_elsewhere(layout: Layout, summed: bool, deterministic: bool) -> None:
    setup = Setup(MODELS["tied"], OPTIMIZER, batch, deterministic=deterministic)
    quotas = (MICROBATCHES,) if layout.dp == 1 else (4, 1)
    after = Plan(version=1, layout=layout, quotas=quotas)

    def run_rank(factory: ProcessGroupFactory) -> tuple[float, float]:
        parameters, waited = setup.model.parameters, factory.waited
        everyone = factory.group("transit", BEFORE.layout.ranks)
        groups = build_layout_groups(factory, BEFORE.layout, parameters, name="before")
        shard = initial_shard(setup.model, setup.optimizer, groups)
        engine = Engine(setup, groups, shard, BEFORE, waited)
        engine.accumulate(0)
        kept = SurvivingSum(0, ((0, 3),))
        if summed:
            engine.reduce(0, 0)
            kept = SurvivingSum(0, ((0, MICROBATCHES),), total=True)
        exchange = exchange_of(factory, moves_of_sums(parameters, BEFORE, after, [kept]), "sums")
        migration = GradientMigration(setup, everyone, exchange, BEFORE, after)
        if factory.rank not in layout.ranks:
            migration.run([kept], engine, None)
            return found
        groups = build_layout_groups(factory, layout, parameters, name="after")
        shard = initial_shard(setup.model, setup.optimizer, groups)
        rest = migration.run([kept], engine, shard)
        engine = Engine(setup, groups, shard, after, waited, rest)
        engine.accumulate(0)
        reduced = engine.reduce(0, 0)
        return reduced.loss, reduced.norm

    alone = train(setup, Plan(version=0, layout=ALONE, quotas=(MICROBATCHES,)), 1)
    found = alone.losses[0], alone.norms[0]
    for loss, norm in on_ranks(BEFORE.layout.ranks, run_rank).values():
        assert loss == pytest.approx(found[0], abs=2e-6)
        assert norm == pytest.approx(found[1], rel=1e-5)


def test_a_fixed_order_of_sums_does_not_see_who_computed_what() -> None:
    """As long as the two ends stand apart in all layouts, as a replica's loss leaves them."""
    setup = Setup(MODELS["tied"], OPTIMIZER, batch, deterministic=True)
    one, two = Replica(TWO), Replica((Stage((2,), (0, 1)), Stage((3,), (1, 4))))
    alone = train(setup, Plan(version=0, layout=Layout((one,)), quotas=(MICROBATCHES,)), 3)
    for quotas in ((3, 2), (1, 4)):
        found = train(setup, Plan(version=0, layout=Layout((one, two)), quotas=quotas), 3)
        assert (found.losses, found.norms) == (alone.losses, alone.norms)
