"""An error that a lost mate explains ends a process as fenced out; any other error stays."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import timedelta

import pytest
import torch.distributed as dist

from resihp.contracts import ContractError, FencedOutError
from resihp.elastic.ddp.member_loss import MemberLossWatch
from resihp.elastic.ddp.step import ReplicaCoordinates
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.consensus import RecoveryDecision
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, announce_death, connect, host_store

TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=0.4), poll=timedelta(seconds=0.05))
"""For errors that no loss explains: a loss is awaited in vain."""
PATIENT = replace(TIMEOUTS, heartbeat=timedelta(seconds=20))
"""For those that one explains: it is known at once, on a busy machine later."""
CLOSED = RuntimeError("Connection closed by peer")


@pytest.fixture
def is_explained() -> bool:
    """Where a test has no such parameter."""
    return False


@pytest.fixture
def rendezvous(is_explained: bool) -> Iterator[Rendezvous]:
    """Of the first of two replicas of two processes; the others do not run."""
    server = host_store("127.0.0.1", 0, timedelta(seconds=10))
    port, timeouts = server.port, PATIENT if is_explained else TIMEOUTS
    one = Rendezvous(lambda: connect("127.0.0.1", port, "job", timeouts), 0, range(4), timeouts)
    one.start()
    yield one
    one.close()
    del server


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Errors that the hook of before gets."""
    errors: list[BaseException] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: errors.append(error))
    return errors


@pytest.mark.parametrize("is_closed", [False, True])
@pytest.mark.parametrize(
    ("dead", "error", "is_explained"),
    [
        ((1,), CLOSED, True),
        ((), CLOSED, False),
        ((2, 3), CLOSED, False),
        ((1,), ValueError("a bug of the script"), False),
        ((1,), ContractError("report", "no microbatch is being computed"), False),
    ],
)
def test_errors(
    dead: tuple[int, ...],
    error: Exception,
    is_explained: bool,
    is_closed: bool,
    rendezvous: Rendezvous,
    seen: list[BaseException],
) -> None:
    """The loop of steps, which an error leaves, closes the rendezvous before the hook is called."""
    watch = MemberLossWatch(rendezvous, ReplicaCoordinates(0, 2, 0, members=2))
    watch.start()
    for rank in dead:
        announce_death(rendezvous.stores.store, rank)
    if is_closed:
        rendezvous.close()
    sys.excepthook(type(error), error, None)
    watch.close()
    if is_explained:
        assert [str(one) for one in seen] == ["replica 0 has lost rank 1"]
        assert isinstance(seen[0], FencedOutError)
    else:
        assert seen == [error]


def test_a_process_that_is_a_replica_has_no_mates(
    rendezvous: Rendezvous, seen: list[BaseException]
) -> None:
    before = sys.excepthook
    MemberLossWatch(rendezvous, ReplicaCoordinates(0, 4)).start()
    assert sys.excepthook is before


def test_a_replica_that_comes_back_is_not_ended_for_the_loss_that_it_comes_back_from() -> None:
    """While it waits for its invitation the survivors' decision is one without it."""
    server = host_store("127.0.0.1", 0, timedelta(seconds=10))
    store = connect("127.0.0.1", server.port, "job", PATIENT)
    joiner = Rendezvous(lambda: connect("127.0.0.1", server.port, "job", PATIENT), 2, (), PATIENT)
    watch = MemberLossWatch(joiner, ReplicaCoordinates(1, 2, 0, members=2))
    joiner.start()
    try:
        lose_replica_1(store, joiner, recovery=0)
        assert not watch.is_fenced_out()
        joiner.enter(1, (0, 1, 2, 3))
        lose_replica_1(store, joiner, recovery=1)
        assert watch.is_fenced_out()
    finally:
        joiner.close()


def lose_replica_1(store: dist.Store, seen_by: Rendezvous, recovery: int) -> None:
    """Let the other replica decide without it, and wait until it has heard of the failure."""
    decision = RecoveryDecision((0, 1), 0, 0, None, recovery + 1)
    store.set(keys.decision(recovery), json.dumps(asdict(decision)))
    store.set(keys.broken(recovery), "ranks [3] do not answer")
    store.add(keys.SIGNAL, 1)
    deadline = time.monotonic() + 60
    while not seen_by.is_broken and time.monotonic() < deadline:
        time.sleep(0.01)
    assert seen_by.is_broken
