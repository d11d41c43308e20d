"""Processes die in an exchange and in a build; the others build anew and hold nothing of the dead.

The contract itself is tested with threads in `test_process_groups.py`.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from resihp.contracts import PeerLostError
from resihp.elastic.process_groups.abortable import (
    AbortableProcessGroup,
    ProcessGroupFactory,
    WaitClock,
    close_groups,
)
from resihp.elastic.process_groups.communicators import CPU
from resihp.elastic.process_groups.selection import VARIABLE, select_communicators
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.liveness import ProcessHistory
from resihp.elastic.rendezvous.store import Timeouts, connect
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.held import held
from tests.elastic.test_process_groups import NO_RECONFIGURE, added, await_passing

RANKS = (0, 1, 2, 3)
IN_EXCHANGE, IN_BUILD = 3, 2
"""Ranks that die, in this order."""
TIMEOUTS = Timeouts()
EXCHANGE, BUILD = timedelta(seconds=60), timedelta(seconds=2)
MAKERS = [
    "gloo",
    pytest.param(
        "reconfigure",
        marks=pytest.mark.skipif(NO_RECONFIGURE is not None, reason=str(NO_RECONFIGURE)),
    ),
]


@pytest.mark.parametrize("maker", MAKERS)
def test_ranks_that_die_in_an_exchange_and_in_a_build(maker: str, tmp_path: Path) -> None:
    with LocalRanks("groups", tmp_path) as processes:
        processes.start(RANKS, run_rank, maker)
        codes = processes.wait(300)
    assert codes == {0: 0, 1: 0, 2: -signal.SIGKILL, 3: -signal.SIGKILL}, processes.logs()


class Rank:
    """One rank's groups, one generation after another."""

    def __init__(self, rank: int, host: str, port: int, maker: str) -> None:
        self.rank, self.store = rank, connect(host, port, "groups", TIMEOUTS)
        self._maker = select_communicators(CPU, {VARIABLE: maker})
        self._factory: ProcessGroupFactory | None = None
        self._building = connect(host, port, "groups", TIMEOUTS)

    def build(
        self, name: str, ranks: tuple[int, ...], limit: timedelta = EXCHANGE
    ) -> AbortableProcessGroup:
        self._factory = ProcessGroupFactory(
            self._building,
            self.rank,
            broken=lambda ranks, waited_s: None,
            timeout=EXCHANGE,
            connect=limit,
            waited=WaitClock(),
            maker=self._maker,
        )
        return self._factory.group(name, ranks)

    def close(self) -> None:
        """Abort and close the newest generation."""
        assert self._factory is not None
        self._factory.abort()
        close_groups(self._factory.groups)
        for thread in threading.enumerate():
            if thread.name == "resihp-close":
                thread.join(60)
        assert self._factory.communicators.open_handles == 0
        self._factory = None
        gc.collect()

    def await_death(self, rank: int) -> None:
        deadline = time.monotonic() + EXCHANGE.total_seconds()
        while rank not in ProcessHistory(self.store.get(keys.PROCESS_HISTORY)).dead:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def run_rank(rank: int, host: str, port: int, maker: str) -> None:
    """One rank's process."""
    own = Rank(rank, host, port, maker)
    group = own.build("first", RANKS)
    assert group.all_reduce(torch.tensor([1.0])).item() == len(RANKS)
    own.close()
    before = held()
    group = own.build("second", RANKS)
    assert group.all_reduce(torch.tensor([1.0])).item() == len(RANKS)
    if rank == IN_EXCHANGE:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(PeerLostError):
        group.all_reduce(torch.zeros(1 << 20))
    del group
    own.close()
    if rank == IN_BUILD:
        threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
        own.build("third", (0, 1, IN_BUILD))  # the others have not begun
    own.await_death(IN_BUILD)
    with pytest.raises(RuntimeError):
        own.build("third", (0, 1, IN_BUILD), BUILD)
    own.close()
    assert own.build("fourth", (0, 1)).all_reduce(torch.tensor([1.0])).item() == 2
    own.close()
    await_passing(lambda: not added(before))  # and some of the first group's may count as before
    assert not added(before), added(before)
    own.store.add("done", 1)
    while own.store.add("done", 0) < 2:  # a rank that ends takes its connections with it
        time.sleep(0.01)
