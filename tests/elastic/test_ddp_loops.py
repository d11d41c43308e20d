"""A loop of the user's own survives losses: the same training, each microbatch once."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn

from resihp.contracts import ContractError, JoinRefusedError, Layout, PeerLostError, Plan
from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.ddp.step import Step
from resihp.elastic.rendezvous.environment import Environment
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.ddp_faults import LoopFault
from tests.elastic.ddp_loops import Loop, Trace, play, train_evaluated, work_of
from tests.elastic.engine_job import TIMEOUTS

STEPS, MICROBATCHES = 4, 8


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The undisturbed run of one process."""
    return play(Loop(1), tmp_path_factory.mktemp("alone"))


def assert_same_training(trace: Trace, alone: Trace, dead: set[int]) -> None:
    assert {rank for rank, code in trace.exit_codes.items() if code} == dead, trace.logs
    assert trace.losses == pytest.approx(alone.losses, rel=1e-5), trace.logs
    for model in trace.models.values():
        for key, tensor in model.items():
            torch.testing.assert_close(tensor, alone.models[0][key], rtol=1e-3, atol=1e-5)


CASES: dict[str, tuple[LoopFault, ...]] = {
    "undisturbed": (),
    "behind its first microbatch": (LoopFault(1, 1),),
    "when it begins to sum": (LoopFault(1, 1, at="sum"),),
    "when it votes": (LoopFault(1, 1, at="vote"),),
    "when it commits": (LoopFault(1, 1, at="commit"),),
    "two at once": (LoopFault(0, 1, 2), LoopFault(1, 1, 2)),
    "one during the recovery of another": (LoopFault(1, 1), LoopFault(2, 1, at="recovery")),
    "one in each of two steps": (LoopFault(0, 1), LoopFault(2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_one_process_a_replica(case: str, alone: Trace, tmp_path: Path) -> None:
    faults = CASES[case]
    trace = play(Loop(3, faults=faults), tmp_path)
    dead = {fault.rank for fault in faults}
    assert_same_training(trace, alone, dead)
    for step in range(STEPS):
        taken = [trace.taken.get((rank, step), []) for rank in {0, 1, 2} - dead]
        by_survivors = [index for indices in taken for index in indices]
        assert len(by_survivors) == len(set(by_survivors)), "no survivor computes anything again"
        if step > max((fault.step for fault in faults), default=-1):
            assert sorted(by_survivors) == list(range(MICROBATCHES))


UNEVEN = Plan(
    version=3, layout=Layout.grid(dp=3, pp=1, tp=1, layers=1), quotas=(4, 3, 1), from_step=3
)
"""Proposed in the vote of step 1, in which the others learn of it."""
QUOTA_CASES: dict[str, tuple[LoopFault, ...]] = {
    "undisturbed": (),
    "in the first step with new quotas": (LoopFault(1, 3, 2),),
    "when it votes on them": (LoopFault(1, 1, at="vote"),),
    "the first process, between vote and use": (LoopFault(0, 2, at="vote"),),
    "when it would begin to use them": (LoopFault(2, 2, at="commit"),),
}


@pytest.mark.parametrize("case", QUOTA_CASES)
def test_quotas_of_a_plan(case: str, alone: Trace, tmp_path: Path) -> None:
    faults = QUOTA_CASES[case]
    trace = play(Loop(3, faults=faults, plans=(UNEVEN,)), tmp_path)
    dead = {fault.rank for fault in faults}
    assert_same_training(trace, alone, dead)
    taken = [len(trace.taken.get((rank, 3), [])) for rank in range(3)]
    if not faults:
        assert [len(trace.taken[rank, 2]) for rank in range(3)] == [3, 3, 2]
        assert taken == [4, 3, 1]
    elif faults[0].step == 3:
        assert taken == [4 + 3, 2, 1], "the fastest does all that was lost"


def test_by_work_a_loss_changes_no_bit(tmp_path: Path) -> None:
    """Microbatches go by work and by the quotas' speeds, those of the lost replica too."""
    alone = play(Loop(1, deterministic=True), tmp_path / "alone")
    loop = Loop(3, by_work=True, plans=(UNEVEN,), faults=(LoopFault(1, 3, 2),), deterministic=True)
    trace = play(loop, tmp_path)
    assert_same_training(trace, alone, {1})
    assert trace.losses == alone.losses
    for model in trace.models.values():
        assert all(torch.equal(model[key], alone.models[0][key]) for key in model)
    even = [sum(work_of(1)[index] for index in trace.taken[rank, 1]) for rank in range(3)]
    assert max(even) - min(even) <= max(work_of(1))
    first, last = (set(trace.taken[rank, 3]) for rank in (0, 2))
    assert sorted(first | last) == list(range(MICROBATCHES))
    assert not first & last
    done = [sum(work_of(3)[index] for index in taken) for taken in (first, last)]
    assert done[0] > done[1], "the faster one has more of the work"


@pytest.mark.parametrize("inner", ["fsdp2", "ddp"])
def test_several_processes_a_replica(inner: str, alone: Trace, tmp_path: Path) -> None:
    """The loss of one process ends its replica; the other replica goes on."""
    trace = play(Loop(2, members=2, inner=inner, faults=(LoopFault(3, 1, 2),)), tmp_path)
    assert_same_training(trace, alone, {2, 3})


def test_sharded_replicas_that_are_evaluated(alone: Trace, tmp_path: Path) -> None:
    """FSDP2 leaves the parameters of the root gathered behind a forward pass without backward."""
    trace = play(Loop(2, members=2, train=train_evaluated), tmp_path)
    assert_same_training(trace, alone, set())


@pytest.mark.parametrize("at", ["microbatch", "vote"])
def test_a_fixed_order_makes_a_loss_change_no_bit(at: str, tmp_path: Path) -> None:
    alone = play(Loop(1, deterministic=True), tmp_path / "alone")
    trace = play(Loop(3, deterministic=True, faults=(LoopFault(1, 1, at=at),)), tmp_path)
    assert_same_training(trace, alone, {1})
    assert trace.losses == alone.losses
    for model in trace.models.values():
        assert all(torch.equal(model[key], alone.models[0][key]) for key in model)


def assert_each_sample_once(trace: Trace) -> None:
    for step in range(max(trace.losses) + 1):
        first = step * MICROBATCHES
        assert trace.summed[step] == list(range(first, first + MICROBATCHES)), trace.logs


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_replica_comes_back_and_gets_a_quota_again(deterministic: bool, tmp_path: Path) -> None:
    """A new process in the place of the dead one takes over state and goes on like the others.

    It is then the only one of the first two that is left, so what it was given is all there is.
    """
    steps = 10
    alone = play(Loop(1, steps=steps, deterministic=deterministic), tmp_path / "alone")
    faults = (LoopFault(1, 1), LoopFault(0, 7, at="vote"), LoopFault(2, 8))
    loop = Loop(3, steps=steps, faults=faults, returns=((1, 1),), deterministic=deterministic)
    trace = play(loop, tmp_path)
    assert_same_training(trace, alone, {0, 2})
    assert_each_sample_once(trace)
    assert trace.alive[5] == [0, 1, 2]
    assert trace.taken[1, 6], "it has a quota again"
    assert trace.alive[9] == [1]
    if deterministic:
        assert trace.losses == alone.losses
        assert all(torch.equal(trace.models[1][k], v) for k, v in alone.models[0].items())


@pytest.mark.parametrize("inner", ["fsdp2", "ddp"])
def test_several_processes_come_back_as_one_replica(inner: str, tmp_path: Path) -> None:
    steps = 8
    alone = play(Loop(1, steps=steps), tmp_path / "alone")
    faults = (LoopFault(3, 1, 2), LoopFault(0, 6, 1))
    loop = Loop(2, members=2, inner=inner, steps=steps, faults=faults, returns=((1, 1),))
    trace = play(loop, tmp_path, timeout_s=300)
    assert_same_training(trace, alone, {0, 1})
    assert_each_sample_once(trace)
    assert trace.alive[7] == [1]


@pytest.mark.parametrize(("members", "dead"), [(1, 0), (1, 1), (2, 3)])
def test_one_is_lost_while_the_job_starts(
    members: int, dead: int, alone: Trace, tmp_path: Path
) -> None:
    """The others do not wait for it until their time-out, which is far beyond that of this test."""
    loop = Loop(3, members=members, faults=(LoopFault(dead, 0, at="start"),))
    trace = play(loop, tmp_path, timeout_s=300)
    assert_same_training(trace, alone, {dead, dead ^ 1} if members > 1 else {dead})
    assert_each_sample_once(trace)


def test_the_first_replica_is_lost_before_all_have_its_state(alone: Trace, tmp_path: Path) -> None:
    trace = play(Loop(3, faults=(LoopFault(0, 0, at="give"),)), tmp_path)
    assert_same_training(trace, alone, {0})
    assert_each_sample_once(trace)


@pytest.mark.parametrize("at", ["give", "take"])
def test_one_is_lost_while_the_state_moves(at: str, tmp_path: Path) -> None:
    """If it is the giver, another one gives; if it is the newcomer, the others go on as before."""
    steps = 8
    alone = play(Loop(1, steps=steps), tmp_path / "alone")
    second = LoopFault(0, 0, 2, at=at) if at == "give" else LoopFault(1, 0, at=at, life=1)
    trace = play(
        Loop(3, steps=steps, faults=(LoopFault(1, 1), second), returns=((1, 1),)), tmp_path
    )
    victim = second.rank
    assert_same_training(trace, alone, {victim})
    assert_each_sample_once(trace)
    assert trace.alive[7] == sorted({0, 1, 2} - {victim})


class Apart(NamedTuple):
    """What the second of two replicas has otherwise than the first one."""

    told: str
    change: Callable[[nn.Module], nn.Module] = lambda model: model
    microbatches: int = 4
    frozen: int = 0
    at_step: int = 0


APART = {
    "dtype": Apart("torch.bfloat16", lambda model: model.bfloat16()),
    "shape": Apart("are not alike", lambda _: nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))),
    "microbatches": Apart("microbatches=6", microbatches=6),
    "trained": Apart("set requires_grad alike", frozen=1),
    "trained later": Apart("set requires_grad alike", frozen=1, at_step=1),
}


def run_apart(rank: int, host: str, port: int, case: str, folder: Path) -> None:
    """One of two replicas that differ; the layers are of equal sizes."""
    torch.set_num_threads(1)
    apart = APART[case] if rank else Apart("")
    model = apart.change(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    environment = Environment(rank, 2, host, port, "apart", False, False)
    replicas = Replicas(
        model,
        optimizer,
        microbatches=apart.microbatches,
        timeouts=TIMEOUTS,
        environment=environment,
    )
    done = 0
    try:
        for step in replicas.steps(3):
            if step.number == APART[case].at_step and "trained" in case:
                model[apart.frozen].requires_grad_(False)
            for _ in step:
                x = torch.ones(2, 4, dtype=model[0].weight.dtype)
                model(x).square().sum().backward()
            done += 1
    except ContractError as error:
        (folder / f"told-{rank}").write_text(f"{done} {error}")


JOINED = {
    "trained": "set requires_grad alike",
    "trained, in the first step": "set requires_grad alike",
    "schedule": "give `state` the LR schedules",
}
"""What a joiner has otherwise than the others, and what it is told."""


def run_joined(rank: int, host: str, port: int, case: str, folder: Path) -> None:
    """One of two replicas, or a joiner that has a layer frozen or begins its LR schedule anew."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(rank < 2 or case == "schedule")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    environment = Environment(rank, 2, host, port, "joined", False, rank == 2)
    timeouts = replace(TIMEOUTS, heartbeat=timedelta(seconds=5))  # it ends well, and is missed
    replicas = Replicas(
        model, optimizer, microbatches=4, timeouts=timeouts, environment=environment
    )
    try:
        for step in replicas.steps(10**6):
            for _ in step:
                model(torch.ones(2, 4)).square().sum().backward()
                (folder / f"begun-{rank}").touch()
                if "first step" in case and rank == step.number == 0 and not replicas.recoveries:
                    await_joiner(replicas)
            optimizer.step()
            schedule.step()
            if (folder / "refused").exists() and 2 not in replicas.alive:
                break
    except JoinRefusedError as error:
        (folder / "refused").write_text(f"{rank} {error}")


def await_joiner(replicas: Replicas) -> None:
    """Wait for the third replica, and let the sum of the step fail: the recovery invites it."""
    deadline = time.monotonic() + 120
    while replicas._join.waiting(replicas.alive) != (2,):
        assert time.monotonic() < deadline, "nobody joins"
        time.sleep(0.02)
    original = replicas._sum

    def failing(step: Step) -> None:
        replicas._sum = original  # type: ignore[method-assign]
        raise PeerLostError("as if a peer had died")

    replicas._sum = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("case", JOINED)
def test_a_joiner_that_differs_ends_alone(case: str, tmp_path: Path) -> None:
    with LocalRanks("joined", tmp_path) as ranks:
        ranks.start(range(2), run_joined, case, tmp_path)
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("begun-*"))) < 2:
            assert time.monotonic() < deadline, ranks.logs()
            time.sleep(0.02)
        ranks.start([2], run_joined, case, tmp_path)
        assert set(ranks.wait(120).values()) == {0}, ranks.logs()
    told = (tmp_path / "refused").read_text()
    assert told.startswith("2 ")
    assert JOINED[case] in told


@pytest.mark.parametrize("case", APART)
def test_replicas_that_are_not_alike(case: str, tmp_path: Path) -> None:
    """All end before a gradient is used that another one had no part in."""
    with LocalRanks("apart", tmp_path) as ranks:
        ranks.start(range(2), run_apart, case, tmp_path)
        assert set(ranks.wait(120).values()) == {0}, ranks.logs()
    for rank in range(2):
        done, told = (tmp_path / f"told-{rank}").read_text().split(" ", 1)
        assert int(done) == APART[case].at_step
        assert APART[case].told in told or rank == 0
