"""Checkpointer: lazy, asynchronous checkpoints of a training loop on several levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import RLock, local

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resihp._shutdown import cancel_close_at_exit, close_at_exit
from resihp.contracts import CheckpointError, ContractError, FaultRate, Protection

from .counters import Counters, ProblemLog, log
from .history import RunHistory, valid_step
from .level_pipeline import LevelPipeline
from .levels import HostMemory, Level, LocalDisk, PeerMemory
from .policy import EveryStep, SavePolicy, SaveTiming
from .ranks import IndependentRank, ProcessGroupRanks, Ranks
from .restore import Restored, restore
from .staging.in_flight import CheckpointAbandoned, InFlightCheckpoint
from .staging.stager import LEAST_CACHE_BYTES, CapturedState, Stager, save_items_of
from .state_dict import CollectedState, State, collect, opened
from .vote import Vote, VoteQueue

_SETTLE_TIMEOUT_S = 10.0
"""Time that checkpoints in flight get to complete before a restore begins."""


class _CallsOfThread(local):
    """Calls of a checkpointer that a thread is in, one within another.

    late_close_s  timeout of a `close` that a signal handler has asked for meanwhile
    """

    depth = 0
    late_close_s: float | None = None


class Checkpointer:
    """Saves the state of a training loop while training continues.

    levels            nearest first; each has a thread of its own
    policy            selects the steps to checkpoint; by default every step
    ranks             the ranks that checkpoint together; by default those of the default process
                      group
    host_cache_bytes  host memory for copies of this rank's state, shared by all checkpoints in
                      flight; at least 32 MiB. By default one image of the state, which is enough
                      while the disk keeps up, one more for a peer's memory, which takes memory only
                      once the peer is slow, and as many as `HostMemory` keeps. With less than one
                      image the fence waits until storage has taken what the cache cannot hold
                      (`counters.cache_wait_s`).
    clock             nanoseconds since 1970; orders the lineages of a job that has gone back
    niceness          of the threads that write, relative to training (Linux)

    `save` and `fence` do not raise, and wait for storage only if the host cache is smaller than the
    state: problems are counted in `counters` and logged once. One thread calls them, the same at
    each step on all ranks.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        policy: SavePolicy | None = None,
        *,
        ranks: Ranks | None = None,
        host_cache_bytes: int | None = None,
        clock: Callable[[], int] = time.time_ns,
        niceness: int = 0,
    ) -> None:
        _check_arguments(levels, policy, host_cache_bytes, niceness)
        self.levels, self.policy = tuple(levels), policy or EveryStep()
        self.ranks = ranks or (ProcessGroupRanks() if dist.is_initialized() else IndependentRank())
        self.counters, self._problems = Counters(), ProblemLog()
        self._history = RunHistory(self.ranks.run, clock, self._newest_born)
        self._stager = Stager(
            self.ranks,
            kept=sum(level.keep for level in levels if isinstance(level, HostMemory)),
            spare=int(any(isinstance(level, PeerMemory) for level in levels)),
            cache_bytes=host_cache_bytes,
        )
        self._pipeline = LevelPipeline(
            self.levels,
            self.counters.levels,
            self._problems,
            self._stager.move_to_huge_pages,
            niceness,
        )
        self._votes: VoteQueue | None = None
        if not isinstance(self.ranks, IndependentRank):
            self._votes = VoteQueue(
                self.ranks, [level.name for level in levels], self._problems, self._abandon
            )
        self._version, self._is_closing, self._is_closed = 0, False, False
        self._one_closes = RLock()
        self._calls = _CallsOfThread()
        self._last: CapturedState | None = None
        self._current: InFlightCheckpoint | None = None
        self._begun_s: float | None = None
        self._window_s = self._pause_s = 0.0
        self._cost_s: float | None = None
        self._interval_s: float | None = None
        close_at_exit(self)

    def attach(self, optimizer: torch.optim.Optimizer, *modules: nn.Module) -> None:
        """Call `fence` before each step of the optimizer, and copy in the order of its writes.

        Buffers of the modules (e.g. running statistics), which the forward pass may change, are
        copied within `save`. Modules that are values of the state need not be named.
        """
        self._stager.know(optimizer, modules)
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def prepare(self, state: State) -> None:
        """Plan for a state like this one, and allocate the host cache in the background.

        Otherwise the first `save` does so and takes longer. A collective call with a process group.
        Raises `ContractError` for a state that cannot be saved, on any rank, and if `HostMemory`
        would keep more than the host cache can hold.
        """
        with self._before_close():
            self._stager.fit(state)
            self._stager.move_to_huge_pages()

    def save(self, step: int, state: State, extra: Mapping[str, object] | None = None) -> bool:
        """Begin a checkpoint, right after the optimizer's step.

        state  nested mapping of tensors, modules, optimizers, providers and other values; tensors
               must not change before `fence`. Other values may change once this returns.
        extra  further values of this rank: RNG state, data cursor, plan version, layout

        Returns True if a checkpoint was begun. False: the policy did not ask for one, the host
        cache had no room or no level was free (`counters.no_buffer`), or the call failed
        (`counters.failures`). It does not say that the checkpoint is complete: see `wait` and
        `counters.levels`.
        """
        with self._before_close():
            vote, checkpoint = Vote(lambda: None, self._version), None
            with self._boundary("save"):
                if self._is_closing:
                    raise CheckpointError("the checkpointer has been closed")
                checkpoint = self._save(valid_step(step), state, extra or {}, vote)
            vote.begun.set_result(checkpoint)
            if self._votes is not None and vote.version is not None:
                self._votes.submit(vote)  # also after a failure, as the other ranks vote
        return checkpoint is not None

    def fence(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Wait until these tensors (None: all) are copied; call it right before they change."""
        with self._before_close():
            last, self._last = self._last, None
            try:
                with self._boundary("fence"):
                    self._fence(tensors)
            except BaseException:  # a signal handler's: the state may stay as it is until `close`
                self._last = last
                raise
            if self._current is None:
                self._cost_s = self._pause_s

    def protection(self, faults: FaultRate) -> Protection:
        """Build `Job.protection` from the measured interval and cost, and the rate of faults.

        Both are 0 until two checkpoints have begun.
        """
        interval_s = self._interval_s or 0.0
        return Protection(
            faults=faults, interval_s=interval_s, cost_s=min(self._cost_s or 0.0, interval_s)
        )

    def newest_step(self) -> int | None:
        """Newest step with a complete checkpoint on any level of any rank; a collective call.

        None if there is none: the job begins. Raises `CheckpointError`, on all ranks, if none is
        found but a level could not be read.
        """
        newest, problems = -1, []
        for level in self.levels:
            try:
                newest = max(newest, *level.steps(), -1)
            except Exception as problem:  # noqa: BLE001 - storage may fail in any way
                problems.append(f"{level.name}: {problem}")
        told = self.ranks.gather((newest, "; ".join(problems)))
        newest = max(step for step, _ in told)
        unread = [f"rank {rank}: {words}" for rank, (_, words) in enumerate(told) if words]
        if newest < 0 and unread:
            raise CheckpointError(f"no checkpoint found, but not all was read: {unread[0]}")
        return newest if newest >= 0 else None

    def restore(self, into: State, *, step: int | None = None) -> Restored:
        """Fill `into` from the newest complete checkpoint at the nearest level; a collective call.

        into  as for `save`, in the layout that is needed now; providers (modules,
              optimizers) load their state, optimizers also moments that they do not have yet
        step  only this one; None: the newest

        The next save begins a new lineage: later checkpoints of the past are abandoned, and retired
        once a new one is complete. Raises `CheckpointError` if no level has a usable checkpoint,
        and `ContractError`, on all ranks, if the `into` of one cannot be filled.
        """
        self._last = None
        self._drain(time.monotonic() + _SETTLE_TIMEOUT_S)  # levels should not change during reads
        self.ranks.gather(None)
        restored = restore(self.levels, into, self.ranks, step=step)
        self._history.branch(restored.step, restored.newest_born)
        return restored

    def wait(self, timeout_s: float = 600.0) -> bool:
        """Wait until every level has finished the checkpoints that it accepted; False on timeout.

        Finished is complete, failed or abandoned: `counters.levels` tells which. A `save` that
        returned False is not made up for; `close` does that.
        """
        return self._drain(time.monotonic() + timeout_s)

    def close(self, timeout_s: float = 600.0) -> None:
        """Finish all checkpoints within the time, and end all threads.

        If the last due `save` was skipped, for want of room or because a level was busy, the
        state is saved now, provided that it has not changed since. At the end of the program
        checkpointers that are still open are closed.

        In a signal handler that interrupts another call, also of `close`, this only notes the
        request, and that call closes when it ends: the handler should return or raise, as
        `sys.exit`. A `close` that an exception has ended goes on at the end of the program.
        """
        if self._is_closed:
            return
        if self._calls.depth:
            self._calls.late_close_s = timeout_s
            log.warning(
                "close interrupts another call, which closes when it ends: if the signal handler"
                " ends the process before, checkpoints that are not complete are lost"
            )
            return
        deadline_s = time.monotonic() + timeout_s
        with self._before_close():
            if self._one_closes.acquire(timeout=max(0.0, timeout_s)):
                try:
                    self._close(deadline_s)
                finally:
                    self._one_closes.release()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _fence(
        self, tensors: Sequence[Tensor] | None = None, deadline_s: float | None = None
    ) -> None:
        checkpoint = self._current
        if checkpoint is None:
            return
        is_kept = self._stager.fence(checkpoint, tensors, deadline_s)
        self.counters.cache_wait_s = self._stager.room_s
        if not is_kept:
            self.counters.no_buffer += 1
            self._begun_s = None  # due again
            if checkpoint.streams:
                self._problems.report("host cache", f"step {checkpoint.identity.step} does not fit")
        elif tensors is not None:
            return
        self._window_s = time.monotonic() - checkpoint.begun_s
        self._current = None

    def _close(self, deadline_s: float) -> None:
        """Finish all and end all threads; again from the start if a signal handler has ended it."""
        if self._is_closed:
            return
        self._is_closing = True
        if self._votes is not None:  # a lost peer leaves time to finish without it
            self._votes.close(max(0.0, deadline_s - time.monotonic()) / 2)
        self._drain(deadline_s)
        with self._boundary("close"):
            self._save_last(deadline_s)
        self._drain(deadline_s)
        self._pipeline.close(deadline_s)
        self._stager.close(deadline_s)
        self._is_closed, self._last = True, None
        cancel_close_at_exit(self)

    def _drain(self, deadline_s: float) -> bool:
        with self._before_close():
            is_done = self._pipeline.wait(deadline_s)
            with self._boundary("fence"):
                self._fence(deadline_s=deadline_s)
            self._cost_s = self._pause_s
        return is_done

    def _save(
        self, step: int, state: State, extra: Mapping[str, object], vote: Vote
    ) -> InFlightCheckpoint | None:
        self._last = None
        lineage = self._history.at(step)
        since_s = None if self._begun_s is None else time.monotonic() - self._begun_s
        timing = SaveTiming(step, since_s, self._cost_s, self._pipeline.durable_s)
        is_due = self.policy.is_due(timing)
        if not is_due and self._votes is None:
            return None
        collected = self._collect(state, vote)  # also if not due: the ranks plan together
        if not is_due:
            return None
        self._last = self._stager.capture(step, lineage, collected, extra)
        return self._begin(self._last)

    def _newest_born(self) -> int:
        """`born` of the newest lineage in folders, which are read without asking other nodes."""
        folders = [level for level in self.levels if isinstance(level, LocalDisk)]
        return max((folder.newest_born() for folder in folders), default=0)

    def _collect(self, state: State, vote: Vote) -> CollectedState:
        self._fence()  # for a loop that saves twice without a step in between
        self._pause_s = 0.0
        if self._votes is None:
            return self._stager.fit(state)
        collected = collect(opened(state))
        vote.items = lambda: save_items_of(collected)
        is_planned = self._stager.has_plan(save_items_of(collected))
        if self._votes.newest.version != self._version or not is_planned:
            self._plan_together(collected, vote, self._votes)
        return collected

    def _plan_together(self, collected: CollectedState, vote: Vote, votes: VoteQueue) -> None:
        """Plan by the latest exchange of items if it is valid for this state, else by a new one."""
        gathered, me = votes.newest, self.ranks.all.index(self.ranks.rank)
        if gathered.version == self._version or (
            list(gathered.items[me]) != save_items_of(collected)
        ):
            vote.version = None
            gathered = votes.submit_and_gather(vote)
        else:
            vote.version = gathered.version
        self._version = gathered.version
        self._stager.plan(collected, gathered.items)

    def _begin(self, captured: CapturedState) -> InFlightCheckpoint | None:
        able = self._pipeline.able()
        checkpoint = self._stager.lend(captured, self._window_s) if able else None
        if checkpoint is None:
            self.counters.no_buffer += 1
            return None
        self._pipeline.expect(checkpoint, able)
        try:
            if self._votes is None:
                checkpoint.settle(checkpoint.receivers)
            self._stager.start(checkpoint, self._pipeline.pace(able, self._window_s))
            self._pipeline.offer(checkpoint, able)
        except BaseException as problem:  # a signal handler's: `close` saves the state anew
            self._pipeline.withdraw(checkpoint, able, problem)
            raise
        if self._begun_s is not None:
            self._interval_s = checkpoint.begun_s - self._begun_s
        self._current, self._begun_s = checkpoint, checkpoint.begun_s
        self.counters.started += 1
        return checkpoint

    def _save_last(self, deadline_s: float) -> None:
        """Save the last captured state on the levels that skipped it, if it has not changed."""
        last = self._last
        lacking = [] if last is None else self._pipeline.lacking(last.identity)
        if last is None or not lacking:
            return
        step, names = last.identity.step, ", ".join(worker.level.name for worker in lacking)
        if not last.is_unchanged:
            raise CheckpointError(f"step {step} is not on {names}: skipped, and changed since")
        checkpoint = self._stager.lend(last, deadline_s - time.monotonic())
        if checkpoint is None:
            raise CheckpointError(f"step {step} is not on {names}: no room within the timeout")
        self._pipeline.expect(checkpoint, lacking)
        try:
            checkpoint.settle(checkpoint.receivers)
            self._stager.start(checkpoint)
            for worker in lacking:
                worker.offer(checkpoint)
        except BaseException as problem:  # a signal handler's: the next `close` saves it anew
            self._pipeline.withdraw(checkpoint, lacking, problem)
            raise
        self._current = checkpoint
        self.counters.started += 1

    def _abandon(self, checkpoint: InFlightCheckpoint) -> None:
        """Abandon a checkpoint that another rank does not take part in; called by the vote."""
        self.counters.vetoed += 1
        self._begun_s = None  # due again
        checkpoint.abandon(CheckpointAbandoned("another rank had no room"))

    @contextmanager
    def _before_close(self) -> Iterator[None]:
        """Put off a `close` of a signal handler that interrupts this thread until the end.

        It would wait for threads that wait for what this one holds: a lock, a chunk that it is
        copying, a checkpoint that it has not yet given to the levels.
        """
        calls = self._calls
        calls.depth += 1
        try:
            yield
        finally:
            calls.depth -= 1
            if not calls.depth and calls.late_close_s is not None:
                timeout_s, calls.late_close_s = calls.late_close_s, None
                self.close(timeout_s)

    @contextmanager
    def _boundary(self, where: str) -> Iterator[None]:
        """Count and log exceptions instead of raising them into the training loop; measure time."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - the boundary with the training loop
            self.counters.failures[f"{where}: {problem}"] += 1
            self._problems.report(where, problem)
        finally:
            spent = time.perf_counter() - begun
            self.counters.blocking_s += spent
            self._pause_s += spent


def _check_arguments(
    levels: Sequence[Level], policy: SavePolicy | None, cache_bytes: int | None, niceness: int
) -> None:
    """Raise `ContractError` for arguments that cannot work."""
    if not isinstance(levels, Sequence) or not all(isinstance(level, Level) for level in levels):
        raise ContractError("levels", "a list of levels, e.g. [LocalDisk(folder)]")
    if not levels:
        raise ContractError("levels", "at least one is needed, e.g. LocalDisk(folder)")
    if len({level.name for level in levels}) < len(levels):
        raise ContractError("levels", "two have the same name")
    if isinstance(policy, type) or not hasattr(policy or EveryStep(), "is_due"):
        raise ContractError("policy", f"e.g. EveryStep() or Every(10), not {policy!r}")
    is_size = cache_bytes is None or isinstance(cache_bytes, int)
    if not is_size or (cache_bytes is not None and cache_bytes < LEAST_CACHE_BYTES):
        least = f"at least {LEAST_CACHE_BYTES} bytes"
        raise ContractError("host_cache_bytes", f"{least}, not {cache_bytes!r}")
    if not 0 <= niceness <= 19:
        raise ContractError("niceness", f"from 0 to 19, not {niceness!r}")
