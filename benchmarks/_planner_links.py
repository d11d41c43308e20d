"""Plans for slow links in small jobs: next to those of a planner that does not know the link, and
to the best of all places.

Jobs and network are simulated by the cost model, no transfer is run. One device of those without
tensor-parallel groups is slow too (0.8). The best plan is found by trying all places of the ranks,
all layers and all quotas, with all ranks at work and equal shares in a group.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations, pairwise, product
from statistics import geometric_mean
from typing import Any

import numpy as np

from benchmarks._report import print_table
from resihp.contracts import (
    Job,
    LayerCost,
    Layout,
    Links,
    LinkVerdict,
    Memory,
    ModelShape,
    Replica,
    Schedule,
    Stage,
    Status,
)
from scheduler import make_plan, policy_outcome, simulate
from scheduler.link_costs import LinkSlowdowns
from scheduler.memory import fits
from scheduler.step_time import ReplicaTimes

LAYERS, UNITS = 8, 8
FACTORS = (1.5, 3.0)
SHAPE = ModelShape(layers=LAYERS, hidden=4096, heads=32, kv_heads=UNITS, ffn=14336, vocab=32000)


@dataclass(frozen=True)
class Case:
    """A kind of slow link, and the job in which it is: replicas, stages, ranks of a group and of a
    node."""

    name: str
    dp: int
    pp: int
    tp: int
    per_node: int

    def job(self, microbatches: int) -> Job:
        """A transfer between nodes takes about a third of the forward of a layer."""
        return Job(
            name="links",
            layout=Layout.grid(dp=self.dp, pp=self.pp, tp=self.tp, layers=LAYERS, units=UNITS),
            microbatches=microbatches,
            model=SHAPE,
            tokens_per_microbatch=4096,
            cost=LayerCost(forward_ms=4.0, backward_ms=8.0),
            links=Links(ranks_per_node=self.per_node, inter_gbytes_per_s=25.0),
            schedules=(Schedule.ONE_F_ONE_B,),
        )

    def slow(self, factor: float, random: np.random.Generator) -> list[LinkVerdict]:
        """Verdicts on a link, a group or all links between two nodes that the first layout uses."""
        stages = self.job(1).layout.replicas[int(random.integers(self.dp))].stages
        size = self.per_node
        pairs = [(a.ranks, b.ranks) for a, b in pairwise(stages)]
        if size == 2:
            pairs = [(a, b) for a, b in pairs if a[0] // size != b[0] // size]
        one, other = pairs[int(random.integers(len(pairs)))]
        if self.tp > 1:
            return [_verdict(factor, one[0], -1, one)]
        if size > 2:
            return [_verdict(factor, one[0], other[0])]
        nodes = [rank - rank % size for rank in (one[0], other[0])]
        return [_verdict(factor, nodes[0] + i, nodes[1] + i) for i in range(size)]


CASES = (
    Case("between stages, 1 x 4 x 1", 1, 4, 1, 8),
    Case("between stages, 2 x 2 x 1", 2, 2, 1, 8),
    Case("in a group, 2 x 2 x 2", 2, 2, 2, 8),
    Case("between hosts, 2 x 3 x 1", 2, 3, 1, 2),
    Case("between hosts, 1 x 4 x 1", 1, 4, 1, 2),  # the only two: no plan avoids the link
)


@dataclass
class Found:
    """Step times in ms, by seed; planning in CPU ms.

    healthy  the plan made without the slow link, without it
    initial  the initial layout with the slow link: nothing is done
    greyhound, adaptra  what these policies make of the initial layout
    unaware  the plan made without the slow link, with it
    aware    the plan made for it
    ordered  that of a job that permits eager 1F1B too, as Adaptra's rule does by itself
    best     the best of all places, layers and quotas with it
    """

    healthy: list[float] = field(default_factory=list)
    initial: list[float] = field(default_factory=list)
    greyhound: list[float] = field(default_factory=list)
    adaptra: list[float] = field(default_factory=list)
    unaware: list[float] = field(default_factory=list)
    aware: list[float] = field(default_factory=list)
    ordered: list[float] = field(default_factory=list)
    best: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def over(self, name: str, base: str) -> list[float]:
        """Ratios of two of them."""
        return [a / b for a, b in zip(getattr(self, name), getattr(self, base), strict=True)]

    @property
    def won_back(self) -> float:
        """Part of the time lost to the slow link that the plan made for it wins back.

        Lost is what the unaware plan takes longer with the link. A plan that becomes quicker than
        it was without the link counts as no quicker.
        """
        lost = sum(self.unaware) - sum(self.healthy)
        still = sum(max(a - b, 0.0) for a, b in zip(self.aware, self.healthy, strict=True))
        return 1.0 - still / lost


def print_links(seeds: int) -> dict[str, Any]:
    """Print the table of slow links and return its figures."""
    found = {(case, factor): _found(case, factor, seeds) for case in CASES for factor in FACTORS}
    shown = ("initial", "greyhound", "adaptra", "unaware", "aware", "best", "ordered")
    print_table(
        "Slow links: step time over that of the unaware plan without the slow link "
        f"(simulated, {seeds} seeds)",
        ("slow link", "factor", *shown, "won back", "aware / best, worst", "CPU ms, most"),
        [
            (
                case.name,
                f"{factor:g}x",
                *(f"{geometric_mean(row.over(name, 'healthy')):.4f}" for name in shown),
                f"{row.won_back:.0%}",
                f"{max(row.over('aware', 'best')):.4f}",
                f"{max(row.cpu_ms):.0f}",
            )
            for (case, factor), row in found.items()
        ],
    )
    return {f"{case.name}; {factor:g}x": asdict(row) for (case, factor), row in found.items()}


def _found(case: Case, factor: float, seeds: int) -> Found:
    row = Found()
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        job = case.job(int(random.choice([4, 8, 16])))
        links = case.slow(factor, random)
        speeds = {} if case.tp > 1 else {int(random.integers(case.dp * case.pp)): 0.8}
        before = make_plan(job, speeds)
        begin = time.process_time()
        plan = make_plan(job, speeds, before.layout, links=links)
        row.cpu_ms.append(1e3 * (time.process_time() - begin))
        row.healthy.append(before.step_ms)
        row.initial.append(simulate(job, job.layout, speeds=speeds, links=links).step_ms)
        for name in ("greyhound", "adaptra"):
            getattr(row, name).append(policy_outcome(name, job, speeds, links).step_ms)
        row.unaware.append(simulate(job, before, speeds=speeds, links=links).step_ms)
        row.aware.append(plan.step_ms)
        both = replace(job, schedules=(Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B))
        row.ordered.append(make_plan(both, speeds, before.layout, links=links).step_ms)
        row.best.append(_best_ms(job, case, speeds, links))
    return row


def _best_ms(
    job: Job, case: Case, speeds: Mapping[int, float], links: Sequence[LinkVerdict]
) -> float:
    """Step time of the best places, layers and quotas."""
    chains = list(_chains(tuple(range(case.dp * case.pp * case.tp)), case.pp, case.tp))
    cuts = combinations(range(1, LAYERS), case.pp - 1)
    spans = [tuple(pairwise((0, *cut, LAYERS))) for cut in cuts]
    shares = (UNITS // case.tp,) * case.tp
    replicas = [
        Replica(tuple(Stage(g, span, shares) for g, span in zip(chain, cut, strict=True)))
        for chain in chains
        for cut in spans
    ]
    slow = LinkSlowdowns.of(job, links)
    times = ReplicaTimes(job, replicas, Schedule.ONE_F_ONE_B, speeds, slow)
    if case.dp == 1:
        return min(times.makespans([job.microbatches] * len(replicas)))
    counts = range(1, job.microbatches)
    ends = np.array([times.makespans([count] * len(replicas)) for count in counts])
    best: dict[frozenset[int], Any] = {}
    for replica, column in zip(replicas, ends.T, strict=True):
        ranks = frozenset(replica.ranks)
        best[ranks] = np.minimum(best.get(ranks, column), column)
    whole = frozenset(range(case.dp * case.pp * case.tp))
    return min(float(np.maximum(best[a], best[whole - a][::-1]).min()) for a in best)


def _chains(ranks: tuple[int, ...], stages: int, tp: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Stages of a replica: all ordered choices of disjoint groups."""
    if not stages:
        yield ()
        return
    for group in combinations(ranks, tp):
        left = tuple(rank for rank in ranks if rank not in group)
        for rest in _chains(left, stages - 1, tp):
            yield group, *rest


CROSSED = (  # stages, ranks of a node, microbatches: all plans cross the link between two nodes
    (4, 2, 8),
    (4, 2, 32),
    (8, 4, 32),
)
CROSSED_FACTORS = (3.0, 10.0, 30.0)
ORDERS = ("1F1B", "eager 1F1B", "adaptra", "joint")


def print_orders() -> dict[str, Any]:
    """Print the table of slow links that every plan crosses, and return its figures.

    The jobs have memory for twice the activations of 1F1B, or for 40% more.
    """
    figures: dict[str, Any] = {}
    rows = []
    for (stages, per_node, microbatches), factor in product(CROSSED, CROSSED_FACTORS):
        for room in (2.0, 1.4):
            name = f"1 x {stages} x 1, {microbatches} microbatches, {factor:g}x, memory {room:g}x"
            figures[name] = found = _crossed(stages, per_node, microbatches, factor, room)
            steps = ["-" if found[o] is None else f"{found[o]:.3f}" for o in ORDERS]
            rows.append((name, *steps, found["in flight"], f"{found['gap']:.1%}"))
    print_table(
        "Slow links that every plan crosses: step time over that of the plan without (simulated)",
        ("job, slow by", *ORDERS, "in flight", "gap"),
        rows,
    )
    return figures


def _crossed(
    stages: int, per_node: int, microbatches: int, factor: float, room: float
) -> dict[str, Any]:
    case = Case("", 1, stages, 1, per_node)
    activation = 34 * 4096 * SHAPE.hidden
    held = 16 * (2 * SHAPE.layer_params + SHAPE.embedding_params)  # two layers, and an end
    shape = replace(SHAPE, layers=2 * stages)
    job = replace(
        case.job(microbatches),
        layout=Layout.grid(dp=1, pp=stages, tp=1, layers=2 * stages, units=UNITS),
        model=shape,
        memory=Memory(
            budget_bytes=int(held + room * stages * 2 * activation),
            activation_bytes_per_layer=activation,
        ),
        schedules=(),
    )
    links = [_verdict(factor, i, per_node + i) for i in range(2)]
    healthy_ms = make_plan(job, {}).step_ms
    plan = make_plan(job, {}, links=links)
    one, eager = (
        simulate(job, job.layout, schedule=schedule, links=links).step_ms / healthy_ms
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B)
    )
    counts = plan.layout.replicas[0].in_flight
    return {
        "1F1B": one,
        "eager 1F1B": eager if fits(job, job.layout, job.quotas, Schedule.EAGER_1F1B) else None,
        "adaptra": policy_outcome("adaptra", job, {}, links).step_ms / healthy_ms,
        "joint": plan.step_ms / healthy_ms,
        "in flight": ", ".join(map(str, counts)) or plan.schedule.value,
        "gap": plan.gap,
    }


def _verdict(factor: float, rank: int, peer: int, group: Sequence[int] = ()) -> LinkVerdict:
    return LinkVerdict(
        rank=rank, peer=peer, group=tuple(group), status=Status.FAIL_SLOW, slowdown=factor
    )
