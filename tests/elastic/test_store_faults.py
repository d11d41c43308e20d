"""A store that is silent, or that is reached on new connections only, does not stop training."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist

from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.membership import Rendezvous
from resihp.elastic.rendezvous.store import Timeouts, announce_death

TIMEOUTS = Timeouts(heartbeat=timedelta(seconds=1), poll=timedelta(seconds=0.05))
UNTIL_S = 60.0


class Server:
    """A store in memory.

    answers  no request is answered before it is set
    """

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.answers = threading.Event()
        self.answers.set()

    def connect(self) -> dist.Store:
        return cast(dist.Store, Connection(self))


class Connection:
    """A connection to a `Server`."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._server.store, name)

        def request(*arguments: Any) -> Any:
            assert self._server.answers.wait(UNTIL_S)
            return method(*arguments)

        return request


@pytest.fixture
def server() -> Iterator[Server]:
    one = Server()
    yield one
    one.answers.set()


@pytest.fixture
def start(server: Server) -> Iterator[Callable[..., Rendezvous]]:
    """Start the rendezvous of a rank of two."""
    started: list[Rendezvous] = []

    def start(rank: int = 0) -> Rendezvous:
        rendezvous = Rendezvous(server.connect, rank, (0, 1), TIMEOUTS)
        rendezvous.start()
        started.append(rendezvous)
        return rendezvous

    yield start
    server.answers.set()
    for rendezvous in started:
        rendezvous.close()


def wait_until(condition: Callable[[], object]) -> None:
    """Ask again and again, as those that wait do."""
    done = threading.Event()
    for _ in range(int(UNTIL_S / 0.01)):
        if condition():
            return
        done.wait(0.01)
    raise AssertionError("it did not come to that")


def test_a_store_that_is_silent_holds_up_no_wait(
    server: Server, start: Callable[..., Rendezvous]
) -> None:
    """What is waited for may be there already, and has a time-out of its own."""
    rendezvous = start()
    server.answers.clear()
    asked: list[object] = []

    def ask() -> None:
        asked.append(rendezvous.broken((1,), 1.5))
        asked.append(rendezvous.lost((1,), 1.5))
        rendezvous.enter(1, (0, 1))

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(UNTIL_S / 4)
    assert asked == [None, []]
    assert not thread.is_alive()


def test_a_loss_is_known_once_the_store_answers_again(
    server: Server, start: Callable[..., Rendezvous]
) -> None:
    rendezvous = start()
    server.answers.clear()
    announce_death(server.store, 1)
    assert rendezvous.broken((1,), 1.5) is None
    server.answers.set()
    wait_until(lambda: rendezvous.broken((1,), 1.5))
    assert server.store.check([keys.broken(0)])
