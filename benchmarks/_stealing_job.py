"""A job of four replicas on real text whose devices are emulated and stall now and then."""

from __future__ import annotations

import heapq
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from time import perf_counter, sleep

import torch

from resihp.contracts import Layout, ModelShape, Plan, even_quotas
from resihp.demo.training.dataset import documents
from resihp.elastic import Callbacks, Llama, NoPlans, Optimizer, Pacer, Packed, Setup, Timeouts
from resihp.elastic.microbatches.assignment import assignments_by_work, full_assignments
from resihp.elastic.microbatches.balancing import assign_by_work, last_end, microbatch_flops
from resihp.elastic.microbatches.stealing import MicrobatchQueue
from resihp.elastic.process_groups.abortable import WaitClock
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.rendezvous.claims import StoreClaims
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import connect
from resihp.elastic.step import Engine, ReducedStep
from resihp.elastic.step.shard import initial_shard
from resihp.elastic.step.step_microbatches import (
    AssignedMicrobatches,
    ClaimedMicrobatches,
    MicrobatchSource,
)
from resihp.elastic.trainer import Trainer

SHAPE = ModelShape(layers=1, hidden=32, heads=2, kv_heads=2, ffn=64, vocab=256)
REPLICAS, QUOTA = 4, 16
LAYOUT = Layout.grid(dp=REPLICAS, pp=1, tp=1, layers=1)
MICROBATCHES = REPLICAS * QUOTA
TOKENS, SHORTEST, LONGEST = 192, 48, 512
AHEAD = 0.5
STALL_S, PASSES_PER_STALL = 1.0, 200
PATIENT = timedelta(minutes=5)
TIMEOUTS = Timeouts(heartbeat=PATIENT, connect=PATIENT, exchange=PATIENT)


@dataclass(frozen=True)
class Case:
    """A job to run.

    uneven   microbatches hold one document each, of any length, instead of 192 tokens each
    stalls   devices stall for a second in one of 200 passes
    by_work  microbatches are assigned by their work, else by quotas
    steals   replicas take pending microbatches from each other
    ms       mean time of a microbatch on a device
    """

    name: str
    steps: int
    uneven: bool = True
    stalls: bool = True
    by_work: bool = False
    steals: bool = False
    deterministic: bool = True
    ms: float = 100.0


@lru_cache(maxsize=1)
def _texts() -> tuple[bytes, ...]:
    return tuple(text for text in documents() if len(text) > SHORTEST)


@lru_cache(maxsize=1)
def _mean_flops() -> float:
    """Work of a microbatch of the uneven job, in the mean over many."""
    lengths = [min(len(text) - 1, LONGEST) for text in _texts()]
    return sum(microbatch_flops([length], SHAPE) for length in lengths) / len(lengths)


def batch(case: Case, step: int, index: int) -> Packed:
    """Real text: one document, or as many as have 192 bytes together."""
    chosen = random.Random(f"{step}/{index}")
    text = chosen.choice(_texts())[: LONGEST + 1] if case.uneven else b""
    while not case.uneven and len(text) <= TOKENS:
        text += chosen.choice(_texts())
    ids = torch.tensor(list(text if case.uneven else text[: TOKENS + 1]))
    return Packed(ids[:-1], ids[1:], (len(ids) - 1,))


@lru_cache(maxsize=1024)
def work_ms(case: Case, step: int) -> list[float]:
    """Time of each microbatch of a step on a device that does not stall."""
    if not case.uneven:
        return [case.ms] * MICROBATCHES
    return [
        case.ms * microbatch_flops(batch(case, step, index).seq_lens, SHAPE) / _mean_flops()
        for index in range(MICROBATCHES)
    ]


def stalled_passes(case: Case, step: int, replica: int) -> set[int]:
    """Numbers of the passes of a replica in a step in which its device stalls."""
    if not case.stalls:
        return set()
    drawn = random.Random(f"stalls {step}/{replica}")
    return {n for n in range(2 * MICROBATCHES) if drawn.random() < 1.0 / PASSES_PER_STALL}


@dataclass
class StallingDevice(Pacer):
    """A device that takes a time given for each microbatch, and stalls in some passes."""

    case: Case = field(kw_only=True)
    replica: int = field(kw_only=True)
    number: tuple[int, int] = (-1, 0)
    times: dict[int, list[float]] = field(default_factory=dict)

    def hold(self, flops: float, step: int, spent_s: float) -> float:
        """Sleep until the pass has taken its time, which is returned; `flops` is it in ms."""
        self.number = (step, self.number[1] + 1 if self.number[0] == step else 0)
        took_s = super().hold(flops, step, spent_s)
        if self.number[1] in stalled_passes(self.case, step, self.replica):
            sleep(STALL_S)
            took_s += STALL_S
        return took_s


class TimedLlama(Llama):
    """A decoder whose passes have the work of the case in ms in place of operations."""

    def __init__(self, case: Case) -> None:
        super().__init__(SHAPE)
        self._case, self._steps = case, dict[int, list[float]]()

    def flops(self, part: str, ranges: object, packed: Packed) -> float:
        """Return the time of a forward pass: a third of a microbatch's."""
        if packed.step not in self._steps:
            self._steps = {packed.step: work_ms(self._case, packed.step)}
        return self._steps[packed.step][packed.index] / 3.0 if part == "last" else 0.0


def plan_of_quotas() -> Plan:
    """Return the plan of equal quotas."""
    return Plan(version=0, layout=LAYOUT, quotas=even_quotas(MICROBATCHES, REPLICAS))


def setup_of(case: Case, rank: int) -> Setup:
    """Return what one rank trains."""
    work = [work_ms(case, step) for step in range(case.steps)]
    batches = {
        (step, index): batch(case, step, index)
        for step, index in itertools.product(range(case.steps), range(MICROBATCHES))
    }
    return Setup(
        TimedLlama(case),
        Optimizer(torch.optim.AdamW, lr=1e-3),
        lambda step, index: batches[step, index],
        pacer=StallingDevice(1.0, case=case, replica=rank),
        deterministic=case.deterministic,
        work=work.__getitem__ if case.by_work else None,
        steal_ahead=AHEAD if case.steals else None,
    )


def run_rank(rank: int, host: str, port: int, case: Case, folder: Path) -> None:
    """Train as one rank; the first one writes a line for each step."""
    torch.set_num_threads(1)
    lines = []

    def on_step(reduced: ReducedStep, ms: float, plan: Plan) -> None:
        lines.append({"ms": ms, "loss": reduced.loss.hex(), "stolen": reduced.stolen})

    trainer = Trainer(
        setup_of(case, rank),
        plan_of_quotas(),
        Rendezvous(lambda: connect(host, port, "stealing", TIMEOUTS), rank, range(4), TIMEOUTS),
        NoPlans(),
        callbacks=Callbacks(on_step=on_step),
    )
    trainer.run(case.steps)
    if rank == 0:
        (folder / "steps.json").write_text(json.dumps(lines))


class TimedClaims(StoreClaims):
    """Claims with the time that the training waits for them."""

    spent_s = 0.0

    def add(self, replica: int, amount: int) -> Callable[[], int | None]:
        """Begin to add, and count the time of that and of the wait."""
        start = perf_counter()
        answer = super().add(replica, amount)
        self.spent_s += perf_counter() - start

        def waited() -> int | None:
            start = perf_counter()
            found = answer()
            self.spent_s += perf_counter() - start
            return found

        return waited

    def read(self, replicas: object) -> dict[int, int]:
        """Read, and count the time."""
        start = perf_counter()
        found = dict(super().read(replicas))  # type: ignore[arg-type]
        self.spent_s += perf_counter() - start
        return found


def run_turns(rank: int, host: str, port: int, case: Case, folder: Path) -> None:
    """Steps with claims and without, turn and turn about, on the same engine."""
    torch.set_num_threads(1)
    rendezvous = Rendezvous(
        lambda: connect(host, port, "stealing", TIMEOUTS), rank, range(REPLICAS), TIMEOUTS
    )
    rendezvous.start()
    setup = setup_of(case, rank)
    plan = plan_of_quotas()
    with rendezvous.group_factory(WaitClock()) as factory:
        groups = build_layout_groups(factory, LAYOUT, setup.model.parameters, name="stealing")
    shard = initial_shard(setup.model, setup.optimizer, groups)
    engine = Engine(setup, groups, shard, plan, WaitClock())
    claims, lines = TimedClaims(rendezvous), []
    for step in range(case.steps):
        has_claims = step // 2 % 2 == step % 2  # with, without, without, with
        claims.spent_s = 0.0
        claims.begin(0, step, rank)
        start = perf_counter()
        engine.accumulate(step, claims=claims if has_claims else None)
        reduced = engine.reduce(step, 0, can_claim=True)
        engine.update(reduced.norm, step)
        ms = (perf_counter() - start) * 1e3
        lines.append([has_claims, ms, claims.spent_s * 1e3, reduced.stolen])
    if rank == 0:
        (folder / "turns.json").write_text(json.dumps(lines))
    rendezvous.close()


class VirtualClaims:
    """Counters of claims in this process."""

    def __init__(self) -> None:
        self.counters: Counter[int] = Counter()

    def add(self, replica: int, amount: int) -> Callable[[], int]:
        """Add; the result is the new value."""
        self.counters[replica] += amount
        value = self.counters[replica]
        return lambda: value

    def read(self, replicas: Sequence[int]) -> dict[int, int]:
        """Return the counters of `replicas`."""
        return {replica: self.counters[replica] for replica in replicas}


def simulated_ms(case: Case, step: int) -> float:
    """End of a step on devices that cost no more than their passes, with the product's own claims.

    Replicas go on in the order of their clocks; each asks before its forward pass, and takes from
    others before its backward pass.
    """
    work = work_ms(case, step)
    shares = full_assignments(plan_of_quotas())
    if case.by_work:
        shares = assignments_by_work(shares, plan_of_quotas().quotas, work)
    known = work if case.by_work else [1.0] * MICROBATCHES  # what the runtime is told
    queues = {
        replica: MicrobatchQueue(tuple(sorted(share.todo, key=lambda i: (-known[i], i))))
        for replica, share in enumerate(shares)
    }
    claims, ends = VirtualClaims(), [0.0] * REPLICAS
    sources: dict[int, MicrobatchSource] = {}
    for replica, queue in queues.items():
        sources[replica] = AssignedMicrobatches(queue.order[1:])
        if case.steals:
            sources[replica] = ClaimedMicrobatches(claims, replica, queues, known, ahead=AHEAD)
    stalls = [stalled_passes(case, step, replica) for replica in range(REPLICAS)]
    events = [(0.0, replica, 0, queue.order[0]) for replica, queue in queues.items()]
    while events:  # (clock, replica, number of its next pass, microbatch)
        heapq.heapify(events)
        now, replica, number, index = heapq.heappop(events)
        if number % 2 == 0:
            sources[replica].ask()
        following = sources[replica].next() if number % 2 else index
        now += work[index] * (2.0 if number % 2 else 1.0) / 3.0
        now += 1e3 * STALL_S * (number in stalls[replica])
        ends[replica] = now
        if following is not None:
            events.append((now, replica, number + 1, following))
    return max(ends)


def clairvoyant_ms(case: Case, step: int) -> float:
    """Least end of a step found by an assignment that knows all work and all stalls before.

    Longest first, each to the replica that would end it first, for each choice of the replicas that
    end before their first stall; without stalls also by the product's assignment by work.
    """
    work = sorted(work_ms(case, step), reverse=True)
    stalls = [sorted(stalled_passes(case, step, replica)) for replica in range(REPLICAS)]
    found = min(_longest_first(work, stalls, evading) for evading in _subsets(stalls))
    if any(stalls):
        return found
    speeds, quotas = [1.0] * REPLICAS, even_quotas(MICROBATCHES, REPLICAS)
    return min(found, last_end(assign_by_work(work, speeds, quotas), work, speeds))


def _subsets(stalls: list[list[int]]) -> Iterator[set[int]]:
    hit = [replica for replica, passes in enumerate(stalls) if passes]
    for size in range(len(hit) + 1):
        yield from map(set, itertools.combinations(hit, size))


def _longest_first(work: list[float], stalls: list[list[int]], evading: set[int]) -> float:
    loads, counts = [0.0] * REPLICAS, [0] * REPLICAS

    def end(replica: int, ms: float) -> float:
        passes = 2 * (counts[replica] + 1)
        hits = sum(number < passes for number in stalls[replica])
        if replica in evading and hits:
            return float("inf")
        return loads[replica] + ms + 1e3 * STALL_S * hits

    for ms in work:
        replica = min(range(REPLICAS), key=lambda one: end(one, ms))
        loads[replica] += ms
        counts[replica] += 1
    return max(
        load + 1e3 * STALL_S * sum(number < 2 * count for number in stalls[replica])
        for replica, (load, count) in enumerate(zip(loads, counts, strict=True))
    )


def unforeseen_ms(case: Case, step: int) -> float:
    """Least end of a step for a runtime that learns of a stall when it begins.

    No earlier than the end of each stall, with the rest of the microbatch that it interrupts, of
    replicas that begin with their longest microbatches of an assignment by work; nor than the
    clairvoyant one.
    """
    work = sorted(work_ms(case, step), reverse=True)
    ends = [clairvoyant_ms(case, step)]
    for replica in range(REPLICAS):
        own = work[replica::REPLICAS]
        passes = [part for ms in own for part in (ms / 3.0, ms * 2.0 / 3.0)]
        hits = sorted(n for n in stalled_passes(case, step, replica) if n < len(passes))
        for order, number in enumerate(hits):
            rest = passes[number + 1] if number % 2 == 0 else 0.0
            ends.append(sum(passes[: number + 1]) + 1e3 * STALL_S * (order + 1) + rest)
    return max(ends)
