"""Agreement of the launchers of a job's nodes, over the store that node 0 hosts."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch.distributed as dist

from resihp.contracts import JobStoppedError
from resihp.elastic.rendezvous import keys
from resihp.elastic.rendezvous.environment import store_prefix
from resihp.elastic.rendezvous.store import announce_death, connect_store, host_store

from .options import Options
from .restart_policy import Decision, Failure, decide

_log = logging.getLogger("resihp.launch")
_CONNECT_TIMEOUT = timedelta(seconds=60)
_JOIN_TIMEOUT = timedelta(seconds=5)  # the store of a running job answers at once
_ARRIVAL_TIMEOUT_S = 600.0
_POLL_S = 0.05


@dataclass(frozen=True)
class Attempt:
    """One start of all ranks of the job.

    port        of the store at which the ranks meet
    world_size  ranks of all nodes
    first_rank  first one of this node
    """

    number: int
    port: int
    world_size: int
    first_rank: int


class Nodes:
    """Place of this launcher among those of the job. Node 0 hosts the store and decides.

    Raises `JobStoppedError` if the store is gone: nodes cannot agree without it.
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self.is_host = options.node == 0 and not options.joins
        timeout = _JOIN_TIMEOUT if options.joins else _CONNECT_TIMEOUT
        open_store = host_store if self.is_host else connect_store
        server = open_store(options.host, options.port, timeout)
        self._own = dist.PrefixStore("resihp-run", server)
        self._server = server
        self._of_ranks: dist.Store = server
        _log.info("store at %s:%d, of %d nodes", options.host, server.port, options.nodes)
        self._failures: list[Failure] = []
        self._recovering: set[int] = set()

    # One attempt.

    def begin(self, attempt: int, processes: int) -> Attempt:
        """Wait until every node is ready to start its ranks, `processes` on this one.

        The ranks of the first attempt meet at the launchers' store, those of each later one at a
        store of its own: torch expects no keys of another attempt there.
        """
        counts = [] if self._options.joins else self._arrive(attempt, processes)
        if self.is_host:
            if attempt:
                self._server = host_store(self._options.host, 0, _CONNECT_TIMEOUT)
            told = json.dumps([attempt, self._server.port, sum(counts)])
            self._own.set(f"attempt/{attempt}", told)
            self._own.set("attempt", told)
        key = "attempt" if self._options.joins else f"attempt/{attempt}"
        number, port, world_size = json.loads(self._own.get(key))
        if number and not self.is_host:
            self._server = connect_store(self._options.host, port, _CONNECT_TIMEOUT)
        prefix = store_prefix(self._options.run, str(number))
        self._of_ranks = dist.PrefixStore(prefix, self._server)
        return Attempt(number, port, world_size, sum(counts[: self._options.node]))

    def _arrive(self, attempt: int, processes: int) -> list[int]:
        """Ranks of each node, once all have told theirs."""
        options = self._options
        self._own.set(f"ranks/{attempt}/{options.node}", str(processes))
        told = [f"ranks/{attempt}/{node}" for node in range(options.nodes)]
        deadline = time.monotonic() + _ARRIVAL_TIMEOUT_S
        while not self._own.check(told):
            if time.monotonic() > deadline:
                missing = [key.rpartition("/")[2] for key in told if not self._own.check([key])]
                raise JobStoppedError(f"nodes {', '.join(missing)} of {options.nodes} did not come")
            time.sleep(_POLL_S)
        return [int(self._own.get(key)) for key in told]

    def announce_death(self, rank: int) -> None:
        """Tell the ranks of the elastic runtime that a rank has ended."""
        try:
            announce_death(self._of_ranks, rank)
        except dist.DistError as error:
            _log.warning("the death of rank %d is not announced: %s", rank, error)

    def recovers(self, attempt: int) -> bool:
        """True if the script itself goes on without a lost rank, by ResiHP's elastic runtime."""
        if attempt not in self._recovering and self._of_ranks.check([keys.MODEL]):
            self._recovering.add(attempt)
        return attempt in self._recovering

    def stop(self) -> None:
        """Let the ranks of the elastic runtime end after the current step."""
        self._of_ranks.set(keys.STOPPED, "the launcher was told to end the job")
        self._of_ranks.add(keys.SIGNAL, 1)

    # The end of an attempt.

    def report(self, failure: Failure) -> None:
        """Report the first failure of an attempt; that of another node may have come first."""
        told = json.dumps(asdict(failure))
        self._own.compare_set(f"failure/{failure.attempt}", "", told)

    def has_failed(self, attempt: int) -> bool:
        """True if another node has reported a failure that ends the attempt."""
        if self._options.nodes == 1 or attempt in self._recovering:
            return False
        return not self.recovers(attempt) and self._own.check([f"failure/{attempt}"])

    def all_completed(self, attempt: int) -> bool:
        """Wait until the ranks of all nodes have completed, or one has failed; True if they have.

        Not where the script recovers from losses: its last step has waited for all that are left.
        """
        if self._options.nodes == 1 or self._options.joins or self.recovers(attempt):
            return True
        count = self._own.add(f"completed/{attempt}", 1)
        while count < self._options.nodes:
            if self.has_failed(attempt):
                return False
            time.sleep(_POLL_S)
            count = self._own.add(f"completed/{attempt}", 0)
        return True

    def decide(self, attempt: int) -> tuple[Failure, Decision]:
        """The failure that was reported first, and what follows; waits for node 0's decision."""
        failure = Failure(**json.loads(self._own.get(f"failure/{attempt}")))
        self._failures.append(failure)
        if self.is_host:
            decision = decide(self._failures, max_restarts=self._options.max_restarts)
            self._own.set(f"decision/{attempt}", json.dumps(asdict(decision)))
        return failure, Decision(**json.loads(self._own.get(f"decision/{attempt}")))
