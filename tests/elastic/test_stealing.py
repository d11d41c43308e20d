"""Stealing within a step: each microbatch once, whoever claims, stalls, dies or gets no answer."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import ContractError, Layout, Op, Plan, Replica, Schedule, Stage
from resihp.elastic.microbatches.assignment import assignments_by_work, full_assignments
from resihp.elastic.microbatches.stealing import (
    OWNER,
    THIEF,
    MicrobatchQueue,
    Progress,
    choose_victim,
)
from resihp.elastic.models import Packed
from resihp.elastic.rendezvous.claims import StoreClaims
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import StorePool
from resihp.elastic.step import Setup
from resihp.elastic.step.step_microbatches import ClaimedMicrobatches
from tests.elastic.test_models import ALONE, MODELS, OPTIMIZER, batch
from tests.elastic.threads import Run, train

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=5)


class MemoryClaims:
    """Counters in memory. Additions from number `lost_from` on are not answered, and the first of
    them is made nevertheless."""

    def __init__(self, lost_from: int = 1 << 60) -> None:
        self.counters: Counter[int] = Counter()
        self._left, self._lock = lost_from, threading.Lock()

    def add(self, replica: int, amount: int) -> Callable[[], int | None]:
        with self._lock:
            self._left -= 1
            if self._left >= -1:
                self.counters[replica] += amount
            value = self.counters[replica] if self._left >= 0 else None
        return lambda: value

    def read(self, replicas: Sequence[int]) -> Mapping[int, int]:
        with self._lock:
            return {r: self.counters[r] for r in replicas} if self._left > 0 else {}


def queues_of(sizes: Sequence[int]) -> dict[int, MicrobatchQueue]:
    """Queues of consecutive microbatches, one a replica."""
    starts = [sum(sizes[:replica]) for replica in range(len(sizes))]
    return {
        replica: MicrobatchQueue(tuple(range(start, start + size)))
        for replica, (start, size) in enumerate(zip(starts, sizes, strict=True))
    }


# The counter.


@given(st.integers(1, 8), st.lists(st.sampled_from([OWNER, THIEF]), max_size=20))
def test_a_counter_gives_each_microbatch_once(size: int, additions: list[int]) -> None:
    """In whatever order owner and thieves add; after enough additions all are claimed."""
    (queue,) = queues_of([size]).values()
    counter, claimed = 0, [0]
    for amount in additions:
        pending = queue.pending(counter)
        counter += amount
        found = queue.claimed(counter, amount)
        assert (found is None) == (not pending)
        if found is not None:
            assert found == pending[0 if amount == OWNER else -1]
            claimed.append(found)
        assert sorted([*claimed, *queue.pending(counter)]) == list(range(size))


# The choice of a victim.


def test_replicas_that_keep_pace_are_left_alone() -> None:
    """Before its last backward pass a replica sees others of its pace that have all claimed, also
    those that are behind by one microbatch."""
    queues, work = queues_of([8, 8]), [1.0] * 16
    own = Progress.before_backward(range(8), work)
    assert choose_victim(own, {1: queues[1]}, {1: 7}, work, ahead=0.0) is None
    assert choose_victim(own, {1: queues[1]}, {1: 6}, work, ahead=1.0) is None
    assert choose_victim(own, {1: queues[1]}, {1: 6}, work, ahead=0.5) == 1


@given(SIZES, st.data(), st.floats(0.0, 3.0))
def test_only_the_slowest_is_chosen_and_it_gains(
    sizes: list[int], data: st.DataObject, ahead: float
) -> None:
    """At the pace of this step, the thief ends what it takes before the victim would have ended."""
    queues = queues_of(sizes)
    work = [data.draw(st.floats(0.1, 10.0)) for _ in range(sum(sizes))]
    counters = {
        r: data.draw(st.integers(0, 4)) + THIEF * data.draw(st.integers(0, 4)) for r in queues
    }
    own = Progress(data.draw(st.floats(0.1, 50.0)), data.draw(st.floats(0.0, 5.0)))
    victim = choose_victim(own, queues, counters, work, ahead=ahead)
    left = {r: q.progress(counters[r], work) for r, q in queues.items() if q.pending(counters[r])}
    if victim is None:
        return
    end = left[victim].until_end
    assert end == max(progress.until_end for progress in left.values())
    taken = work[queues[victim].pending(counters[victim])[-1]]
    assert (own.left + taken) / own.done <= end
    assert choose_victim(own, queues, counters, work, ahead=0.0) == victim
    faster = replace(own, done=own.done * 2)
    assert choose_victim(faster, queues, counters, work, ahead=ahead) == victim


# The protocol: replicas as state machines, in any interleaving.


@given(SIZES, st.randoms(use_true_random=False), st.floats(0.0, 1.0), st.integers(0, 30))
def test_each_microbatch_is_computed_once_at_most(
    sizes: list[int], random: Any, ahead: float, lost_from: int
) -> None:
    """Replicas go on in random order; some may die, and the store may cease to answer.

    Without that nothing is left. What is left of a replica that lives is computed after the count.
    """
    is_answering = random.random() < 0.5
    claims = MemoryClaims() if is_answering else MemoryClaims(lost_from)
    queues, work = queues_of(sizes), [1.0] * sum(sizes)
    sources = {r: ClaimedMicrobatches(claims, r, queues, work, ahead=ahead) for r in queues}
    begun = {replica: [queue.order[0]] for replica, queue in queues.items()}
    dead = set[int]()
    while sources:
        replica = random.choice(sorted(sources))
        if random.random() > 0.5:
            sources[replica].ask()  # others may go on before the answer is used
            continue
        if random.random() < 0.05:
            dead.add(replica)
        found = None if replica in dead else sources[replica].next()
        if found is None:
            del sources[replica]
        else:
            begun[replica].append(found)
    computed = [index for replica in begun for index in begun[replica]]
    assert len(computed) == len(set(computed))
    if is_answering and not dead:
        assert sorted(computed) == list(range(sum(sizes)))


@given(st.integers(2, 8), st.integers(2, 8))
def test_a_stalled_replica_keeps_what_it_has_begun_alone(first: int, second: int) -> None:
    """A replica that does not come past its first microbatch loses all others to the other one."""
    claims, queues, work = MemoryClaims(), queues_of([first, second]), [1.0] * (first + second)
    thief = ClaimedMicrobatches(claims, 0, queues, work, ahead=0.5)
    taken = [0]
    while (found := thief.next()) is not None:
        taken.append(found)
    assert sorted(taken) == [*range(first), *range(first + 1, first + second)]
    assert taken[:first] == list(range(first)), "its own first"
    victim = ClaimedMicrobatches(claims, 1, queues, work, ahead=0.5)
    assert victim.next() is None


# The store.


class SlowStore:
    """A store whose additions wait for `opened`."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.store = dist.HashStore()

    def add(self, key: str, amount: int) -> int:
        assert self.opened.wait(60)
        return self.store.add(key, amount)

    def delete_key(self, key: str) -> bool:
        return self.store.delete_key(key)


def claims_on(store: Any, **options: Any) -> StoreClaims:
    pool = StorePool(lambda: store)
    return StoreClaims(cast(Rendezvous, SimpleNamespace(stores=pool, recovery=0)), **options)


def test_counters_of_a_step_are_in_the_store_until_the_next_one() -> None:
    store = dist.HashStore()
    claims = claims_on(store, patience_s=60.0)
    claims.begin(0, 7, own=1)
    assert claims.add(1, OWNER)() == OWNER
    assert claims.add(1, THIEF)() == THIEF + OWNER
    assert claims.read([0, 1]) == {0: 0, 1: THIEF + OWNER}
    claims.begin(0, 8, own=1)
    assert claims.add(1, OWNER)() == OWNER
    assert not store.check(["claims/0.0/7/1"])
    claims.close()


def test_a_replica_computes_while_its_claim_is_answered() -> None:
    store = SlowStore()
    claims = claims_on(store, patience_s=60.0)
    claims.begin(0, 0, own=0)
    answer = claims.add(0, OWNER)
    assert not claims.is_answering, "nothing was waited for"
    store.opened.set()
    assert answer() == OWNER
    claims.close()


def test_an_answer_that_does_not_come_is_unknown_and_so_are_later_ones() -> None:
    store = SlowStore()
    claims = claims_on(store, patience_s=0.05)
    claims.begin(0, 0, own=0)
    assert claims.add(0, OWNER)() is None
    assert not claims.is_answering
    assert claims.add(0, OWNER)() is None
    assert claims.read([0, 1]) == {}
    store.opened.set()
    deadline = time.monotonic() + 60
    while not claims.is_answering and time.monotonic() < deadline:
        time.sleep(0.01)
    assert claims.is_answering
    assert store.store.add("claims/0.0/0/0", 0) == OWNER, "only the first was ever sent"
    claims.close()


class LostStore:
    """A store that is gone."""

    def add(self, key: str, amount: int) -> int:
        raise dist.DistNetworkError("gone")

    def check(self, keys: list[str]) -> bool:
        raise dist.DistNetworkError("gone")


def test_a_store_that_is_gone_is_not_asked_again() -> None:
    claims = claims_on(LostStore(), patience_s=60.0)
    claims.begin(0, 0, own=0)
    assert claims.add(0, OWNER)() is None
    assert not claims.is_answering
    claims.close()


# The engine.

STEPS, MICROBATCHES = 2, 8
TWO = Layout.grid(dp=2, pp=1, tp=1, layers=4)
GROUPS = Layout.grid(dp=2, pp=1, tp=2, layers=4)
MIXED = Layout(
    (
        Replica((Stage((0,), (0, 4)),)),
        Replica((Stage((1,), (0, 2)), Stage((2,), (2, 4)))),
        Replica((Stage((3,), (0, 4)),)),
    )
)


class StalledJob:
    """Microbatch `stalled` of each step cannot be loaded before others have been stolen.

    claims  of each step, for all ranks
    """

    def __init__(self, victim: int, stalled: int, stolen: int) -> None:
        self._victim, self._stalled, self._stolen = victim, stalled, stolen
        self.claims = [MemoryClaims() for _ in range(STEPS)]
        self.passes: list[tuple[int, int]] = []

    def of(self, rank: int, step: int) -> MemoryClaims:
        return self.claims[step]

    def data(self, step: int, index: int) -> Packed:
        deadline = time.monotonic() + 60
        while index == self._stalled and time.monotonic() < deadline:
            if self.claims[step].counters[self._victim] >= self._stolen * THIEF:
                break
            time.sleep(0.001)
        return batch(step, index)

    def record(self, **seen: Any) -> None:
        if seen["op"] is Op.BACKWARD:
            self.passes.append((seen["step"], seen["microbatch"]))


def plan_of(layout: Layout, quotas: tuple[int, ...], **more: Any) -> Plan:
    return Plan(version=0, layout=layout, quotas=quotas, **more)


def assert_same(run: Run, other: Run) -> None:
    assert (run.losses, run.norms) == (other.losses, other.norms)
    for param, tensors in other.state.items():
        assert all(map(torch.equal, run.state[param], tensors)), param.key


def work(step: int) -> list[float]:
    """Work of each microbatch of a step: the longest are the last."""
    return [1.0 + index for index in range(MICROBATCHES)]


@pytest.mark.parametrize("model", ["llama", "tied"])
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.ZERO_BUBBLE])
def test_a_fixed_order_makes_stealing_change_no_bit(model: str, schedule: Schedule) -> None:
    job = StalledJob(victim=1, stalled=4, stolen=2)
    setup = Setup(
        MODELS[model], OPTIMIZER, job.data, job.record, deterministic=True, steal_ahead=0.5
    )
    run = train(setup, plan_of(TWO, (4, 4), schedule=schedule), STEPS, job.of)
    assert all(stolen >= 2 for stolen in run.stolen)
    assert sorted(job.passes) == [(s, i) for s in range(STEPS) for i in range(MICROBATCHES)]
    alone = Setup(MODELS[model], OPTIMIZER, batch, deterministic=True)
    assert_same(run, train(alone, plan_of(ALONE, (MICROBATCHES,)), STEPS))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    ("layout", "quotas", "victim"),
    [(TWO, (4, 4), 1), (GROUPS, (4, 4), 1), (MIXED, (3, 2, 3), 2)],
    ids=["one rank", "tensor parallel", "beside a pipeline"],
)
def test_others_compute_what_a_stalled_replica_does_not_come_to(
    layout: Layout, quotas: tuple[int, ...], victim: int, deterministic: bool
) -> None:
    """By work, the microbatch that the victim begins with is the longest of its own."""
    setup = Setup(MODELS["llama"], OPTIMIZER, batch, deterministic=deterministic)
    expected = train(setup, plan_of(layout, quotas), STEPS)
    first = sum(quotas[:victim])
    job = StalledJob(victim, stalled=first, stolen=quotas[victim] - 1)
    run = train(
        replace(setup, data=job.data, record=job.record, steal_ahead=0.5),
        plan_of(layout, quotas),
        STEPS,
        job.of,
    )
    assert run.stolen == [quotas[victim] - 1] * STEPS
    if deterministic:
        assert_same(run, expected)
    assert run.losses == pytest.approx(expected.losses, abs=2e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("lost_from", [0, 1, 3])
def test_what_nobody_could_claim_is_computed_after_the_count(
    lost_from: int, deterministic: bool
) -> None:
    """Answers are lost from some claim on, the first of which was made nevertheless."""
    claims = MemoryClaims(lost_from)
    passes: list[tuple[int, int]] = []

    def record(**seen: Any) -> None:
        if seen["op"] is Op.BACKWARD:
            passes.append((seen["step"], seen["microbatch"]))

    setup = Setup(MODELS["llama"], OPTIMIZER, batch, record, deterministic=deterministic)
    setup = replace(setup, steal_ahead=0.5)
    run = train(setup, plan_of(TWO, (4, 4)), STEPS, lambda rank, step: claims)
    assert sorted(passes) == [(s, i) for s in range(STEPS) for i in range(MICROBATCHES)]
    expected = train(replace(setup, steal_ahead=None), plan_of(TWO, (4, 4)), STEPS)
    assert run.losses == pytest.approx(expected.losses, abs=2e-5)
    if deterministic:
        assert_same(run, expected)


def test_microbatches_are_assigned_by_their_work() -> None:
    """Each once, to replicas as fast as their quotas say, in pipelines too; no bit changes."""
    loaded: dict[int, set[int]] = defaultdict(set)

    def data(step: int, index: int) -> Packed:
        loaded[threading.get_ident()].add(index)
        return batch(step, index)

    plan = plan_of(MIXED, (2, 2, 4))
    setup = Setup(MODELS["llama"], OPTIMIZER, data, deterministic=True, work=work)
    run = train(setup, plan, STEPS)
    shares = assignments_by_work(full_assignments(plan), plan.quotas, work(0))
    held = [set(share.todo) for share in shares]
    assert held != [{0, 1}, {2, 3}, {4, 5, 6, 7}]
    assert sorted(loaded.values(), key=sorted) == sorted([*held, held[1]], key=sorted)
    by_count = train(Setup(MODELS["llama"], OPTIMIZER, batch, deterministic=True), plan, STEPS)
    assert_same(run, by_count)


def test_bad_settings_are_refused() -> None:
    with pytest.raises(ContractError, match="steal_ahead"):
        Setup(MODELS["llama"], OPTIMIZER, batch, steal_ahead=-1.0)
    setup = Setup(MODELS["llama"], OPTIMIZER, batch, work=lambda step: [1.0])
    with pytest.raises(ContractError, match="work"):
        train(setup, plan_of(TWO, (4, 4)), 1)
