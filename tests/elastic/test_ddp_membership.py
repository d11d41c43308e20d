"""Who takes part in a user's loop and what it counts: no processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from resihp.contracts import ContractError, FencedOutError, MiscountError, StateLostError
from resihp.elastic.ddp.membership import ReplicaMembership
from resihp.elastic.ddp.state_sync import (
    StateBroadcast,
    Stateful,
    empties,
    pack,
    receive_state,
    unpack,
)
from resihp.elastic.ddp.step import ReplicaCoordinates, Step
from resihp.elastic.microbatches.counts import MicrobatchReport, count_rows, read_counts
from resihp.elastic.microbatches.ledger import SurvivingSum, indices
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.transport import ProcessGroupTransport
from resihp.elastic.rendezvous.consensus import RecoveryDecision
from tests.elastic.threads import on_ranks


def decision(
    survivors: tuple[int, ...],
    *,
    completed: int = 3,
    stateless: tuple[int, ...] = (),
    kept: tuple[SurvivingSum, ...] = (),
) -> RecoveryDecision:
    return RecoveryDecision(survivors, 0, completed, 0.0, 1, kept, stateless)


def test_a_replica_without_one_of_its_members_is_left_out() -> None:
    membership = ReplicaMembership(ReplicaCoordinates(0, 3, members=2), 6)
    membership.apply(decision((0, 1, 2, 4, 5)))
    assert membership.alive == [0, 2]
    assert [share.todo for share in membership.shares] == [(0, 1, 2), (3, 4, 5)]


def test_a_process_whose_replica_is_left_out_ends() -> None:
    membership = ReplicaMembership(ReplicaCoordinates(1, 3, members=2), 6)
    with pytest.raises(FencedOutError, match="replica 1 has lost a member"):
        membership.apply(decision((0, 1, 2, 4, 5)))


def test_buckets_that_travel_again_are_those_that_a_peer_has_not_summed() -> None:
    """Peers are the processes with the same part of the model, in replicas that are whole."""
    for index, buckets in ((0, 4), (1, 2)):
        membership = ReplicaMembership(ReplicaCoordinates(0, 3, index, members=2), 6)
        survivors = replace(decision((0, 1, 2, 4, 5)), buckets=(4, 3, 0, 5, 2))
        membership.apply(survivors)
        assert membership.summed_buckets == buckets
        membership.apply(decision((0, 1, 4, 5)))
        assert membership.summed_buckets == 0


def test_a_newcomer_computes_nothing_before_it_has_the_state() -> None:
    membership = ReplicaMembership(ReplicaCoordinates(2, 3), 6)
    membership.apply(decision((0, 2)))
    membership.apply(decision((0, 1, 2), stateless=(1,)))
    assert (membership.alive, membership.without_state, membership.state_source) == (
        [0, 1, 2],
        [1],
        0,
    )
    assert [len(share.todo) for share in membership.shares] == [3, 0, 3]
    membership.next_step()
    assert [len(share.todo) for share in membership.shares] == [2, 2, 2]


def test_state_that_nobody_holds_stops_the_job_but_not_before_its_first_step() -> None:
    membership = ReplicaMembership(ReplicaCoordinates(2, 3), 6)
    with pytest.raises(StateLostError):
        membership.apply(decision((1, 2), stateless=(1, 2)))
    membership.apply(decision((1, 2), stateless=(1, 2), completed=0))
    assert (membership.state_source, membership.without_state) == (1, [2])


@given(
    st.integers(1, 20),
    st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=4),
    st.booleans(),
    st.data(),
)
def test_each_microbatch_is_kept_or_redone_once(
    microbatches: int, worlds: list[set[int]], is_by_work: bool, data: st.DataObject
) -> None:
    """Whoever is lost or comes, and whatever each replica of those before has finished."""
    work = [1.0 + index * index % 7 for index in range(microbatches)]
    by_work = (lambda step: work) if is_by_work else None
    seen = ReplicaMembership(ReplicaCoordinates(0, 6), microbatches, by_work)
    for world in worlds:
        finished: list[SurvivingSum] = []
        for place, share in enumerate(seen.shares):
            done = data.draw(st.integers(0, len(share.todo)))
            mine = sorted({*indices(share.begun), *share.todo[:done]})
            spans = tuple((index, index + 1) for index in mine)
            if mine and seen.alive[place] in world:
                finished.append(SurvivingSum(place, spans))
        here = tuple(sorted(world | {0}))
        finished = [one for one in finished if seen.alive[one.replica] in here]
        seen.apply(
            decision(here, stateless=tuple(set(here) - set(seen.alive)), kept=tuple(finished))
        )
        covered = sorted(index for share in seen.shares for index in indices(share.whole))
        assert covered == list(range(microbatches))


def test_quotas_hold_a_step_after_the_vote_that_told_them() -> None:
    membership = ReplicaMembership(ReplicaCoordinates(0, 3), 12)
    membership.learn(5, (6, 4, 2))
    membership.next_step()
    assert membership.plan.quotas == (4, 4, 4)
    membership.learn(5, (6, 4, 2))  # the first process proposes until they hold
    membership.next_step()
    assert (membership.plan.version, membership.plan.quotas) == (5, (6, 4, 2))
    assert [len(share.todo) for share in membership.shares] == [6, 4, 2]
    membership.next_step()
    assert (membership.plan.version, membership.plan.quotas) == (5, (6, 4, 2))


def test_quotas_keep_their_ratio_over_losses_and_returns() -> None:
    membership = ReplicaMembership(ReplicaCoordinates(1, 4), 16)
    membership.learn(1, (5, 5, 4, 2))
    membership.next_step()
    membership.next_step()
    membership.apply(decision((1, 2, 3)))
    assert membership.plan.quotas == (7, 6, 3)
    membership.apply(decision((0, 1, 2, 3), stateless=(0,)))
    assert [len(share.todo) for share in membership.shares] == [0, 7, 6, 3]
    membership.next_step()
    assert membership.plan.quotas == (5, 5, 4, 2)  # who comes back counts as fast as the fastest
    assert membership.plan.version == 1


def test_work_is_assigned_by_the_speeds_of_a_vote() -> None:
    """A replica that joins makes all forget them: it has not heard the vote."""
    work = [4.0, 4.0, 2.0, 2.0, 2.0, 2.0, 1.0, 1.0]
    steps: list[int] = []

    def work_of(step: int) -> list[float]:
        steps.append(step)
        return work

    def loads() -> list[float]:
        return [sum(work[index] for index in share.todo) for share in membership.shares]

    membership = ReplicaMembership(ReplicaCoordinates(0, 3), 8, work_of)
    assert max(loads()) == 6.0
    membership.learn(1, (3, 3, 2), (1.0, 1.0, 0.5))
    membership.next_step()
    membership.next_step()
    assert max(loads()[:2]) <= 8.0
    assert loads()[2] <= 4.0
    membership.apply(decision((0, 2), completed=2))
    assert loads() == [12.0, 6.0]
    membership.apply(decision((0, 1, 2), completed=2, stateless=(1,)))
    assert loads()[1] == 0.0
    membership.next_step()
    assert len(membership.shares) == 3
    membership.next_step()  # the last one: its work is never asked for
    assert set(steps) == {0, 2, 3}


@pytest.mark.parametrize("work", [[1.0], [1.0, 0.0], [1.0, float("inf")]])
def test_work_that_cannot_be(work: list[float]) -> None:
    membership = ReplicaMembership(ReplicaCoordinates(0, 2), 2, lambda step: work)
    with pytest.raises(ContractError, match="2 numbers above 0"):
        assert membership.share


@given(st.data())
def test_replicas_have_the_same_quotas_whatever_is_lost_when(data: st.DataObject) -> None:
    """A vote that a loss breaks off is completed on some replicas; the others learn from these
    that the step is, but not what was voted."""

    def work(step: int) -> list[float]:
        return [1.0 + (step + index) % 4 for index in range(20)]

    memberships = {r: ReplicaMembership(ReplicaCoordinates(r, 5), 20, work) for r in range(5)}
    for one in memberships.values():
        one.without_state = []
    for version in range(1, 9):
        alive = sorted(memberships)
        quotas = data.draw(st.permutations([20 - len(alive) + 1, *[1] * (len(alive) - 1)]))
        lost = data.draw(st.sampled_from([None, None, *alive[1:]])) if len(alive) > 2 else None
        voted = alive if lost is None else sorted(data.draw(st.sets(st.sampled_from(alive))))
        for replica in voted:
            memberships[replica].learn(version, quotas, [1.0 / quota for quota in quotas])
            memberships[replica].next_step()
        memberships.pop(lost, None)
        if lost is not None:
            left = tuple(sorted(memberships))
            is_committed = any(replica in memberships for replica in voted)
            for replica, one in memberships.items():
                if is_committed and replica not in voted:
                    one.next_step()
                one.apply(decision(left, completed=one.step))
        plans = [one.plan for one in memberships.values()]
        assert all(plan == plans[0] for plan in plans)
        shares = [one.shares for one in memberships.values()]
        assert all(share == shares[0] for share in shares)


def test_losses_and_weights_of_all() -> None:
    reports = {0: MicrobatchReport(torch.tensor(2.0), 3.0), 2: MicrobatchReport(4.0, 0.0)}
    first = count_rows(reports, 3, members=1)
    second = count_rows({1: MicrobatchReport(6.0, 5.0)}, 3, members=1)
    account = read_counts(first + second)
    assert (account.losses, account.weight, account.loss) == ((2.0, 6.0, 4.0), 8.0, 1.5)
    assert account.reports()[1] == MicrobatchReport(6.0, 5.0)


def test_who_has_a_loss_gives_it() -> None:
    """Of a pipeline the last stage does; of sharded processes all do, each that of its part."""
    pipeline = count_rows({0: MicrobatchReport()}, 2, members=2)
    pipeline += count_rows({0: MicrobatchReport(3.0, 5.0)}, 2, members=2)
    for part in (1.0, 2.0):
        pipeline += count_rows({1: MicrobatchReport(part, 7.0)}, 2, members=2)
    account = read_counts(pipeline)
    assert (account.losses, account.weights) == ((3.0, 1.5), (5.0, 7.0))
    silent = read_counts(count_rows({0: MicrobatchReport()}, 1, members=1))
    assert (silent.loss, silent.weight) == (0.0, None)


def test_batches_of_a_step() -> None:
    step = Step(0, iter([(0, 1, 4), (2,)]))
    taken = []
    for batch in step.batches():
        taken.append(batch)
        if batch == (2,):
            step.report(torch.tensor(3.0), weight=2)
            continue
        step.report([torch.tensor(1.0), 2.0, torch.tensor(4.0)], weight=[1, 2, 3])
        with pytest.raises(ContractError, match="2 numbers for 3 microbatches"):
            step.report(torch.ones(2))
        with pytest.raises(ContractError, match="1 numbers for 3 microbatches"):
            step.report(1.0)
    assert taken == [(0, 1, 4), (2,)]
    assert {index: report.weight for index, report in step.done.items()} == {0: 1, 1: 2, 4: 3, 2: 2}
    assert list(step.batches_of((3, 5))) == [(3, 5)]
    assert not list(step.batches_of(()))
    assert list(Step(0, iter(())).batches_of((3, 5))) == [(3,), (5,)]
    with pytest.raises(ContractError, match="no microbatch"):
        step.report(1.0)


def test_counts_that_cannot_be() -> None:
    once, twice = (
        count_rows({0: MicrobatchReport(1.0)}, 1, members=1),
        count_rows({0: MicrobatchReport(1.0), 1: MicrobatchReport(1.0, 2.0)}, 2, members=1),
    )
    with pytest.raises(MiscountError):
        read_counts(once + once)
    with pytest.raises(ContractError, match="or with none"):
        read_counts(twice)
    with pytest.raises(ContractError, match="sum to 0"):
        read_counts(count_rows({0: MicrobatchReport(1.0, 0.0)}, 1, members=1))


TENSORS: list[torch.Tensor] = [
    torch.tensor(3.0),
    torch.arange(6, dtype=torch.int64).reshape(2, 3),
    torch.zeros(0, 4),
    torch.ones(3, dtype=torch.bfloat16),
    torch.tensor([True, False]),
    torch.arange(6.0).reshape(2, 3).t(),
    torch.arange(48.0).reshape(2, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    torch.arange(12.0).reshape(3, 4)[:, 1:3],
    torch.ones(2, 1).expand(2, 3),
    torch.tensor([1.0 + 2.0j, 3.0j]).conj(),
    torch.tensor([1.0 + 2.0j, 3.0j]).conj().imag,
]


class Keeping:
    """A state that is kept as it is."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or {}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.state = state_dict


def sent(state: dict[str, Stateful], into: dict[str, Stateful]) -> None:
    """Send the state from one thread to another."""

    def run_rank(factory: ProcessGroupFactory) -> None:
        transport = ProcessGroupTransport(factory.group("state", (0, 1)), 0)
        with torch.device("meta"):  # as a loop's default device
            if factory.rank == 0:
                StateBroadcast(transport, state).finish()
            else:
                receive_state(transport, into, [])

    on_ranks((0, 1), run_rank)


def test_state_of_any_shape_travels() -> None:
    state: dict[str, Any] = {"a": TENSORS[:3], "b": {"c": (TENSORS[3], 7), "d": TENSORS[4:]}}
    skeleton, tensors = pack(state)
    room = empties(skeleton)
    assert [(t.shape, t.dtype) for t in room] == [(t.shape, t.dtype) for t in tensors]
    again = unpack(skeleton, tensors, [])
    assert again["b"]["c"][1] == 7
    received = Keeping()
    sent({"state": Keeping(state)}, {"state": received})
    for got in again, received.state:
        found = [*got["a"], got["b"]["c"][0], *got["b"]["d"]]
        assert all(map(torch.equal, found, TENSORS))


def test_moments_keep_the_strides_of_their_parameter() -> None:
    """A fused optimizer goes through both in the order of memory."""

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        pixels = torch.arange(512.0).sin().view(2, 4, 8, 8)
        model(pixels.contiguous(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()

    ours, theirs = made(0), made(1)
    update(*ours)
    names = ("model", "optimizer")
    sent(dict(zip(names, ours, strict=True)), dict(zip(names, theirs, strict=True)))
    update(*ours)
    update(*theirs)
    for a, b in zip(ours[0].parameters(), theirs[0].parameters(), strict=True):
        assert theirs[1].state[b]["exp_avg"].stride() == b.stride()
        assert torch.equal(a, b)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_a_sparse_tensor_is_refused_before_anything_is_sent(layout: torch.layout) -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("graph", torch.eye(4).to_sparse(layout=layout))
    with pytest.raises(ContractError, match=r"model\.graph: a tensor of layout torch.sparse"):
        pack({"model": model.state_dict(), "optimizer": [1.0]})


class Failing:
    """A transport that has no memory left."""

    source, is_zero_copy = 0, False

    def send(self, _: Sequence[torch.Tensor]) -> Iterator[int]:
        raise MemoryError("no memory left")

    recv = send


def test_an_error_of_the_thread_that_sends_is_raised() -> None:
    broadcast = StateBroadcast(Failing(), {"state": Keeping()})
    with pytest.raises(MemoryError, match="no memory left"):
        broadcast.finish()
