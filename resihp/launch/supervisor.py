"""The launcher of one node: starts its ranks, and starts them again where that helps."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from math import inf
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple

import torch.distributed as dist

from resihp._preemption import NOTICED_STATUS, SIGNALS, PreemptionNotice
from resihp.contracts import FencedOutError, JobStoppedError
from resihp.elastic.rendezvous import exit_status

from .attempts import Attempt, AttemptEnd, EndKind, JobEnd, NodeOffer
from .fork_server import Ended, ForkServer
from .node_memory_folder import NodeMemoryFolder
from .nodes import Nodes
from .options import Options
from .rank_environment import RankEnvironment
from .rank_output import RankOutput, pass_on_all
from .restart_plans import RestartPlanPoller, poller_of
from .restart_policy import Failure, error_line, launcher_status

if TYPE_CHECKING:
    from resihp.checkpoint.levels.peer_server import PeerServer

_log = logging.getLogger("resihp.launch")
_TOLD_STATUSES = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Ends of ranks that were told to end, other than 0."""
_WRONG_USE = 2  # as argparse's


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the launcher; returns its exit status.

    0 if a rank completed the job and those that did not were killed or given up by the others;
    after a notice that the node is about to be taken away 128 + the number of the signal, or of
    SIGTERM for another notice; 2 if there is no such script; otherwise the status of the first rank
    that failed, with its last lines on stderr.
    """
    _open_closed_streams()
    logging.basicConfig(level=logging.INFO, format="%(name)s: %(message)s")
    options = Options.parse(arguments)
    if options.command.refusal is not None:
        _log.error("%s", options.command.refusal)
        return _WRONG_USE
    with _interrupted_by(signal.SIGHUP, signal.SIGQUIT):
        return _supervised(options)


def _supervised(options: Options) -> int:
    notice = PreemptionNotice(
        options.preemption_file, options.preemption_url, window_s=options.preemption_s
    )
    may_coordinate = (options.node == 0 or options.outlives_nodes) and not options.joins
    plans = poller_of(options.command, options.run) if may_coordinate else None
    nodes = _joined(options, notice, plans)
    if isinstance(nodes, int):
        return nodes
    options = replace(options, run=nodes.run)
    notice.start()
    with closing(notice), NodeMemoryFolder() as memory:  # a signal is handled to the last
        supervisor = Supervisor(options, nodes, memory, notice)
        try:
            return supervisor.run()
        except KeyboardInterrupt as interrupt:
            _log.error("interrupted: the ranks may end; once more, and they are killed")
            with suppress(KeyboardInterrupt):
                supervisor.interrupt()
            return 128 + _number_of(interrupt)
        except FencedOutError as error:
            _log.error("%s", error)
            return exit_status.FENCED_OUT
        except (JobStoppedError, dist.DistError) as error:
            _log.error("the job ends here, as its launchers cannot agree any more: %s", error)
            return exit_status.JOB_STOPPED
        finally:
            supervisor.close()
            if plans is not None:
                plans.close()


def _joined(
    options: Options, notice: PreemptionNotice, plans: RestartPlanPoller | None
) -> Nodes | int:
    """Nodes of the job, or the exit status where there is none or a signal ends the wait for it."""
    try:
        with _interrupted_by(*SIGNALS):
            return Nodes(options, notice, plans)
    except JobStoppedError as error:
        _log.error("%s", error)
        return exit_status.JOB_STOPPED
    except KeyboardInterrupt as interrupt:
        number = _number_of(interrupt)
        _log.error("got %s: this node has not joined the job", signal.Signals(number).name)
        return 128 + number


def _open_closed_streams() -> None:
    """Open /dev/null in place of streams that the caller has closed, as `resihp run ... >&-` does:
    pipes and sockets would take their numbers, and ranks write into them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


@contextmanager
def _interrupted_by(*signals: signal.Signals) -> Iterator[None]:
    """Take these signals as Ctrl-C, unless they are ignored, as after `nohup`, or handled."""

    def interrupt(number: int, _: FrameType | None) -> None:
        raise KeyboardInterrupt(number)

    is_possible = threading.current_thread() is threading.main_thread()
    changed = [each for each in signals if signal.getsignal(each) is signal.SIG_DFL and is_possible]
    for each in changed:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for each in changed:
            signal.signal(each, signal.SIG_DFL)


def _number_of(interrupt: KeyboardInterrupt) -> int:
    return int(interrupt.args[0] if interrupt.args else signal.SIGINT)


class _Rank:
    """One rank's process: its output, and its exit status once it has ended."""

    def __init__(self, rank: int, local_rank: int, output: RankOutput) -> None:
        self.rank, self.local_rank, self.output = rank, local_rank, output
        self.status: int | None = None


class _Consequence(NamedTuple):
    """Failure in the words of a lost peer, which is reported at `until_s` if nothing else is."""

    rank: _Rank
    failure: Failure
    until_s: float


class Supervisor:
    """The ranks of this node, over all attempts."""

    def __init__(
        self, options: Options, nodes: Nodes, memory: NodeMemoryFolder, notice: PreemptionNotice
    ) -> None:
        self._options, self._nodes, self._memory = options, nodes, memory
        self._notice = notice
        self._devices = list(range(len(options.joins) or options.processes))
        self._suspected: set[int] = set()  # devices with an error that may have been the script's
        self._environment = RankEnvironment(options, nodes.id, memory.path)
        self._server = ForkServer(self._environment.of_all_ranks())
        self._memory_server: PeerServer | None = None
        if options.nodes > 1 and memory.path is not None and not options.joins:
            from .memory_server import serve_memory  # takes a second: torch's own checkpoints

            self._memory_server = serve_memory(memory.path, nodes.own_address)
        self._ranks: dict[str, _Rank] = {}
        self._failed: _Rank | None = None
        self._consequence: _Consequence | None = None
        self._end: AttemptEnd | None = None
        self._kill_at_s = inf
        self._begun_s = time.monotonic()
        self._has_left = self._is_leave_told = False
        nodes.on_wait = self._tell_ranks_of_notice

    def run(self) -> int:
        """Run attempts until one succeeds or the next would not help; returns the exit status."""
        try:
            return self._run_attempts()
        except dist.DistError:
            if not self._has_left:
                raise
            self._await_told_ranks()
            return self._own_status()

    def _run_attempts(self) -> int:
        command = self._options.command
        following = self._nodes.begin(self._offer(), lambda: self._server.preload(command))
        while isinstance(following, Attempt):
            if following.why:
                _log.warning("%s: restart", following.why)
            self._start(following)
            self._wait(following)
            if self._is_final(following):
                return self._own_status()
            following = self._nodes.conclude(following, self._offer(), self._memory.newest_step())
        return self._status_at(following)

    def interrupt(self) -> None:
        """Interrupt the ranks, and wait for their ends.

        In the background of a shell script interrupts are ignored, by ranks too: SIGTERM is not.
        """
        is_ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        self._signal_all(signal.SIGTERM if is_ignored else signal.SIGINT)
        self._await_told_ranks()
        self._pass_on_output()

    def close(self) -> None:
        """Kill the ranks that have not ended, and the process that forks them."""
        self._server.close()
        self._nodes.close()
        if self._memory_server is not None:
            self._memory_server.close()
        self._environment.close()

    # One attempt.

    def _start(self, attempt: Attempt) -> None:
        if not self._server.is_alive:
            self._server.close()
            self._server = ForkServer(self._environment.of_all_ranks())
        self._ranks, self._failed, self._end, self._kill_at_s = {}, None, None, inf
        self._consequence, self._begun_s = None, time.monotonic()
        if self._memory_server is not None:
            self._memory_server.token = attempt.token
        index = attempt.index_of(self._nodes.id)
        ranks: Sequence[int] = self._options.joins
        if index is not None:
            ranks = attempt.nodes[index].ranks
            self._use(attempt.nodes[index].local_ranks)
        for local_rank, rank in enumerate(ranks):
            output = RankOutput(
                self._options.output, rank=rank, local_rank=local_rank, attempt=attempt.number
            )
            key = f"{attempt.number}/{rank}"
            self._ranks[key] = _Rank(rank, local_rank, output)
            variables = self._environment.of_one_rank(
                rank,
                local_rank,
                attempt,
                self._devices,
                has_copies=self._memory_server is not None,
            )
            self._server.start(key, self._options.command, variables, output.descriptors)
            output.started()
        _log.info("attempt %d begins, with ranks %s", attempt.number, [*ranks])
        self._server.preload(self._options.command)

    def _use(self, local_ranks: Sequence[int]) -> None:
        """Use the devices of these local ranks of the attempt before."""
        kept = [self._devices[local_rank] for local_rank in local_ranks]
        for device in self._devices:
            if device not in kept:
                _log.warning("device %d of this node is left out", device)
        self._devices = kept

    def _wait(self, attempt: Attempt) -> None:
        """Wait for the end of all ranks, and end them when an attempt cannot go on.

        Where the script recovers from losses by itself, the attempt ends with its last rank.
        """
        while True:
            self._server.wait(self._options.poll_s)
            for event in self._server.events():
                if isinstance(event, Ended):
                    self._note_end(attempt, self._ranks[event.key], event)
            is_running = self._is_running
            self._report_consequence(attempt, is_running)
            if is_running or self._has_left:
                self._leave_if_noticed(attempt)
            if is_running or self._failed is not None:
                self._look_for_end(attempt, is_running)
            if not is_running:
                return
            if time.monotonic() >= self._kill_at_s:
                self._signal_all(signal.SIGKILL)
                self._kill_at_s = inf

    def _look_for_end(self, attempt: Attempt, is_running: bool) -> None:
        """Take the reason to end the attempt, once there is one."""
        step = self._memory.newest_step()
        if self._end is None and is_running:
            self._nodes.attend(attempt, step, takes_plans=not self._has_completed())
        end = self._nodes.end_of(attempt)
        if self._end is None and end is not None:
            self._end = end
            self._kill_at_s = self._told_to_end(end)

    def _told_to_end(self, end: AttemptEnd) -> float:
        """Tell the ranks to end; returns the time at which those that are left are killed.

        After a notice for the only node, its ranks are given the time that the notice leaves.
        """
        if end.kind is EndKind.FAILURE and not self._has_left:
            return time.monotonic()
        if not self._has_left:
            _log.warning("%s: the ranks end after their step", end.why)
            self._signal_all(signal.SIGTERM)
        elif end.kind is EndKind.NOTICE and self._options.nodes == 1:
            return inf
        return time.monotonic() + self._options.shutdown_s

    def _note_end(self, attempt: Attempt, rank: _Rank, end: Ended) -> None:
        rank.status = status = end.status
        if end.crash is not None:
            _log.warning(
                "rank %d had completed when Python itself was killed by signal %d at its end",
                rank.rank,
                end.crash,
            )
        if status == 0:
            return
        self._nodes.announce_death(rank.rank)
        level = logging.WARNING if self._end is None else logging.INFO
        _log.log(level, "rank %d ended with %d", rank.rank, status)
        if self._has_left and status not in _TOLD_STATUSES:  # the others may wait for it
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._options.shutdown_s)
        if self._end is None and self._failed is None and self._is_failure(attempt, status):
            if self._is_without_restart:
                self._failed = rank
            else:
                self._note_failure(attempt, rank, status)

    def _note_failure(self, attempt: Attempt, rank: _Rank, status: int) -> None:
        """Report a failure; one in the words of a lost peer only if no other comes before long.

        The rank that failed first may end last: its connections close before its process does.
        """
        message = error_line(rank.output.last_lines())
        step = self._memory.newest_step()
        lasted_s = time.monotonic() - self._begun_s
        failure = Failure(attempt.number, rank.rank, status, message, step, lasted_s=lasted_s)
        if not failure.is_of_lost_peer:
            self._report(attempt, rank, failure)
        elif self._consequence is None:
            wait_s = self._options.heartbeat.total_seconds()
            self._consequence = _Consequence(rank, failure, time.monotonic() + wait_s)

    def _report_consequence(self, attempt: Attempt, is_running: bool) -> None:
        """Report the failure in the words of a lost peer where nothing else tells the cause."""
        held = self._consequence
        if held is None or self._failed is not None or self._end is not None:
            return
        if not is_running or time.monotonic() >= held.until_s:
            self._report(attempt, held.rank, held.failure)

    def _report(self, attempt: Attempt, rank: _Rank, failure: Failure) -> None:
        self._failed = rank
        self._nodes.end(attempt, AttemptEnd(EndKind.FAILURE, str(failure), failure))

    def _is_failure(self, attempt: Attempt, status: int) -> bool:
        """True if an end is more than the loss of a rank that the others recover from."""
        if status > 0:
            return status != exit_status.FENCED_OUT or not self._nodes.recovers(attempt)
        if self._is_without_restart:
            return False
        is_last = all(rank.status for rank in self._ranks.values()) and self._options.nodes == 1
        return is_last or not self._nodes.recovers(attempt)

    @property
    def _is_without_restart(self) -> bool:
        """True if this launcher ends with its ranks, whatever their end."""
        return self._has_left or bool(self._options.joins)

    def _is_final(self, attempt: Attempt) -> bool:
        """True if this launcher ends without asking the others.

        So where ranks of the elastic runtime have completed the job, or may do so on other nodes.
        """
        if self._options.joins:
            return True
        is_lasting = self._has_left or self._options.nodes > 1
        return (is_lasting or self._has_completed()) and self._nodes.recovers(attempt)

    def _leave_if_noticed(self, attempt: Attempt) -> None:
        """After a notice, leave the job and let the ranks end after the current step."""
        if self._notice.why is None or self._is_leave_told:
            return
        self._is_leave_told = True
        try:
            if not self._nodes.recovers(attempt) and not self._options.joins:
                self._nodes.leave(attempt)
            elif self._nodes.is_coordinator:
                self._nodes.stop()
        finally:
            self._tell_ranks_of_notice()

    def _tell_ranks_of_notice(self) -> None:
        """Let the ranks end after the current step once there is a notice, whether the store
        answers or not."""
        if self._notice.why is None or self._has_left or not self._is_running:
            return
        self._has_left = True
        _log.warning("%s: the ranks end after their step", self._notice.why)
        with suppress(OSError):  # without its time they learn of the notice by the signal
            self._notice.forward(self._environment.notice)
        self._signal_all(signal.SIGTERM)

    def _await_told_ranks(self) -> None:
        """Wait for ranks that were told to end, where the store is gone, as long as they may."""
        until_s = min(self._notice.until_s, time.monotonic() + self._options.shutdown_s)
        while time.monotonic() < until_s:
            self._server.wait(self._options.poll_s)
            for event in self._server.events():
                if isinstance(event, Ended):
                    self._ranks[event.key].status = event.status
            if not self._is_running:
                return

    def _signal_all(self, number: int) -> None:
        for key in self._ranks:
            self._server.signal(key, number)

    def _offer(self) -> NodeOffer:
        """Ranks that this node has for the next attempt: all but one on a device that broke.

        Where the error may be the script's, only if the device has made such a one before.
        """
        local_ranks = list(range(len(self._devices)))
        failure = self._end.failure if self._end is not None else None
        failed = self._failed
        if failed is not None and failure is not None and failed.rank == failure.rank:
            device = self._devices[failed.local_rank]
            is_broken = failure.is_of_device and (
                not failure.is_unsure or device in self._suspected
            )
            if is_broken and len(local_ranks) > self._options.least:
                local_ranks.remove(failed.local_rank)
            if failure.is_of_device:
                self._suspected.add(device)
        return NodeOffer(
            self._nodes.id,
            self._options.node,
            tuple(local_ranks),
            least=self._options.least,
            completed=self._failed is None and self._end is None,
            leaves=self._has_left,
            memory=self._memory_server.address if self._memory_server is not None else None,
        )

    @property
    def _is_running(self) -> bool:
        """True if a rank has not ended."""
        return any(rank.status is None for rank in self._ranks.values())

    def _has_completed(self) -> bool:
        return any(rank.status == 0 for rank in self._ranks.values())

    # The end of the job.

    def _status_at(self, end: JobEnd) -> int:
        """Exit status of this launcher at the end of the job."""
        if end.status == 0:
            if not self._ranks:
                _log.info("the job %r is completed: this node had no part in it", self._options.run)
            return self._own_status()
        _log.error("%s" if end.goes_on else "%s: the job ends", end.why)
        if self._notice.why is not None and end.status == NOTICED_STATUS:
            return self._notice.status
        is_by_failure = end.rank is not None and self._failed is not None
        return self._report_failure() if is_by_failure else end.status

    def _own_status(self) -> int:
        """Exit status by the ranks of the last attempt, once all that they wrote is passed on."""
        self._pass_on_output()
        if self._has_left:
            _log.error("%s: the ranks have ended", self._notice.why)
            return self._notice.status
        if self._failed is not None:
            return self._report_failure()
        return 0 if self._has_completed() or not self._ranks else 1

    def _pass_on_output(self) -> None:
        pass_on_all(rank.output for rank in self._ranks.values())

    def _report_failure(self) -> int:
        """Repeat the last lines of the rank that failed first, after what all others have written;
        returns its status."""
        rank = self._failed
        if rank is None or rank.status is None:
            return 1
        self._pass_on_output()
        _log.error(
            "rank %d failed with status %d:\n%s", rank.rank, rank.status, rank.output.last_lines()
        )
        return launcher_status(rank.status)
