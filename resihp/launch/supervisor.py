"""The launcher of one node: starts its ranks, and starts them again where that helps."""

from __future__ import annotations

import logging
import os
import select
import signal
from collections.abc import Sequence
from types import FrameType

import torch.distributed as dist

from resihp.contracts import JobStoppedError
from resihp.elastic.rendezvous import exit_status

from .fork_server import Ended, ForkServer
from .node_memory_folder import NodeMemoryFolder
from .nodes import Attempt, Nodes
from .options import Options
from .rank_output import RankOutput
from .restart_policy import Failure

_log = logging.getLogger("resihp.launch")
_POLL_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher; returns its exit status.

    0 if a rank completed the job and those that did not were killed or given up by the others;
    otherwise the status of the first rank that failed, with its last lines on stderr.
    """
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    options = Options.parse(arguments)
    try:
        nodes = Nodes(options)
    except JobStoppedError as error:
        _log.error("%s", error)
        return exit_status.JOB_STOPPED
    with NodeMemoryFolder() as memory:
        supervisor = Supervisor(options, nodes, memory)
        signal.signal(signal.SIGTERM, supervisor.request_stop)
        try:
            return supervisor.run()
        except KeyboardInterrupt:
            return 128 + signal.SIGINT
        except (JobStoppedError, dist.DistError) as error:
            _log.error("the job ends here, as node 0 has ended: %s", error)
            return exit_status.JOB_STOPPED
        finally:
            supervisor.close()


class _Rank:
    """One rank's process: its device, its output, and its exit status once it has ended."""

    def __init__(self, rank: int, device: int, output: RankOutput) -> None:
        self.rank, self.device, self.output = rank, device, output
        self.status: int | None = None


class Supervisor:
    """The ranks of this node, over all attempts. An attempt is a start of all ranks."""

    def __init__(self, options: Options, nodes: Nodes, memory: NodeMemoryFolder) -> None:
        self._options, self._nodes, self._memory = options, nodes, memory
        self._devices = list(range(len(options.joins) or options.processes))
        self._environment = self._of_all_ranks()
        self._server = ForkServer(self._environment)
        self._ranks: dict[str, _Rank] = {}
        self._failed: _Rank | None = None
        self._is_stop_requested = self._is_stopping = False

    def request_stop(self, number: int, frame: FrameType | None) -> None:
        """Signal handler: let the ranks end after the current step."""
        self._is_stop_requested = True  # the store must not be used here: it may be in use

    def run(self) -> int:
        """Run attempts until one succeeds or the next would not help; returns the exit status."""
        attempt = 0
        while True:
            self._start(self._nodes.begin(attempt, len(self._devices)))
            self._wait(attempt)
            if self._failed is None and self._nodes.all_completed(attempt):
                return 0 if self._has_completed() else 1
            if self._is_final(attempt):
                return self._report_failure()
            failure, decision = self._nodes.decide(attempt)
            if not decision.restarts:
                _log.error("%s: the job ends", decision.why)
                return self._report_failure() if self._failed else _status(failure.status)
            if self._failed is not None and failure.is_of_device:
                self._leave_out(self._failed)
            attempt += 1
            _log.warning("%s: restart", decision.why)

    def close(self) -> None:
        """Kill the ranks that have not ended, and the process that forks them."""
        self._server.close()

    # One attempt.

    def _start(self, attempt: Attempt) -> None:
        if not self._server.is_alive:
            self._server.close()
            self._server = ForkServer(self._environment)
        self._ranks, self._failed = {}, None
        first = attempt.first_rank
        ranks = self._options.joins or range(first, first + len(self._devices))
        for local_rank, rank in enumerate(ranks):
            output = RankOutput(
                self._options.output, rank=rank, local_rank=local_rank, attempt=attempt.number
            )
            key = f"{attempt.number}/{rank}"
            self._ranks[key] = _Rank(rank, self._devices[local_rank], output)
            variables = self._of_one_rank(rank, local_rank, attempt)
            self._server.start(key, self._options.command, variables, output.descriptors)
            output.started()
        _log.info("attempt %d begins, with ranks %s", attempt.number, [*ranks])
        self._server.preload(self._options.command)

    def _wait(self, attempt: int) -> None:
        """Wait for the end of all ranks; kill them after a failure that the script cannot survive.

        Where the script recovers from losses by itself, the attempt ends with its last rank.
        """
        while any(rank.status is None for rank in self._ranks.values()):
            select.select([self._server], [], [], _POLL_S)
            self._stop_if_requested()
            for event in self._server.events():
                if isinstance(event, Ended):
                    self._note_end(attempt, self._ranks[event.key], event.status)
            if self._must_end(attempt):
                self._kill_all()

    def _note_end(self, attempt: int, rank: _Rank, status: int) -> None:
        rank.status = status
        if status == 0:
            return
        self._nodes.announce_death(rank.rank)
        _log.warning("rank %d ended with %d", rank.rank, status)
        if self._failed is None and self._is_failure(attempt, status):
            self._failed = rank
            if not self._is_without_restart:
                lines = rank.output.last_lines().splitlines() or ["no message"]
                step = self._memory.newest_step()
                self._nodes.report(Failure(attempt, rank.rank, status, lines[-1], step))

    def _is_failure(self, attempt: int, status: int) -> bool:
        """True if an end is more than the loss of a rank that the others recover from."""
        if status > 0:
            return status != exit_status.FENCED_OUT
        if self._is_without_restart:
            return False
        is_last = all(rank.status for rank in self._ranks.values()) and self._options.nodes == 1
        return is_last or not self._nodes.recovers(attempt)

    @property
    def _is_without_restart(self) -> bool:
        """True if this launcher ends with its ranks, whatever their end."""
        return self._is_stopping or bool(self._options.joins)

    def _must_end(self, attempt: int) -> bool:
        """True if a rank failed, here or on another node, for which the others wait in vain."""
        if self._is_without_restart:
            return False
        has_failed = self._failed is not None or self._nodes.has_failed(attempt)
        return has_failed and not self._nodes.recovers(attempt)

    def _is_final(self, attempt: int) -> bool:
        """True if no restart follows a failure.

        So where ranks of the elastic runtime have completed the job, or may do so on other nodes.
        """
        if self._is_without_restart:
            return True
        is_lasting = self._has_completed() or self._options.nodes > 1
        return is_lasting and self._nodes.recovers(attempt)

    def _leave_out(self, failed: _Rank) -> None:
        """Use the rank's device no more, if this node may go on with fewer ranks."""
        if len(self._devices) > self._options.least:
            self._devices.remove(failed.device)
            _log.warning("device %d of this node is left out", failed.device)

    def _kill_all(self) -> None:
        """Kill the ranks of an attempt that has failed, and wait for their ends."""
        for key in self._ranks:
            self._server.signal(key, signal.SIGKILL)
        while any(rank.status is None for rank in self._ranks.values()):
            select.select([self._server], [], [], _POLL_S)
            for event in self._server.events():
                if isinstance(event, Ended):
                    self._ranks[event.key].status = event.status

    def _has_completed(self) -> bool:
        return any(rank.status == 0 for rank in self._ranks.values())

    def _stop_if_requested(self) -> None:
        if not self._is_stop_requested:
            return
        self._is_stop_requested, self._is_stopping = False, True
        try:
            if self._nodes.is_host:
                self._nodes.stop()
        finally:
            for key in self._ranks:
                self._server.signal(key, signal.SIGTERM)

    def _report_failure(self) -> int:
        """Repeat the last lines of the rank that failed first; returns its status."""
        rank = self._failed
        if rank is None or rank.status is None:
            return 1
        _log.error(
            "rank %d failed with status %d:\n%s", rank.rank, rank.status, rank.output.last_lines()
        )
        return _status(rank.status)

    # The environment.

    def _of_all_ranks(self) -> dict[str, str]:
        """Variables that the ranks have in common, in every attempt."""
        # Processes that all compute on every core slow each other down many times.
        threads = {"OMP_NUM_THREADS": "1"} if self._options.processes > 1 else {}
        memory = self._memory.path
        kept = {} if memory is None else {"RESIHP_NODE_MEMORY": str(memory)}
        return {**threads, **os.environ, **kept}

    def _of_one_rank(self, rank: int, local_rank: int, attempt: Attempt) -> dict[str, str]:
        """The variables that torchrun sets, and `RESIHP_JOIN`."""
        options = self._options
        ranks = str(attempt.world_size)
        restarts = "none" if options.max_restarts is None else str(options.max_restarts)
        return {
            **self._visible_devices(),
            "RANK": str(rank),
            "LOCAL_RANK": str(local_rank),
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": str(len(self._devices)),
            "GROUP_RANK": str(options.node),
            "GROUP_WORLD_SIZE": str(options.nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": ranks,
            "MASTER_ADDR": options.host,
            "MASTER_PORT": str(attempt.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": options.run,
            "TORCHELASTIC_RESTART_COUNT": str(attempt.number),
            "TORCHELASTIC_MAX_RESTARTS": restarts,
            "RESIHP_JOIN": "1" if options.joins else "0",
        }

    def _visible_devices(self) -> dict[str, str]:
        """CUDA's variable without the devices that are left out."""
        if len(self._devices) == self._options.processes or self._options.joins:
            return {}
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = (
            named.split(",") if named else [str(index) for index in range(max(self._devices) + 1)]
        )
        kept = [names[index] for index in self._devices if index < len(names)]
        return {"CUDA_VISIBLE_DEVICES": ",".join(kept)}


def _status(status: int) -> int:
    """Exit status of a launcher whose rank ended so."""
    return status if status >= 0 else 128 - status
