"""Checkpoints of a training loop: lazy, asynchronous, on several levels."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from resihp._shutdown import cancel_close_at_exit, close_at_exit
from resihp.contracts import CheckpointError, FaultRate, Protection

from .arguments import check
from .counters import Counters, ProblemLog, seconds_since
from .history import Lineage, RunHistory, valid_step
from .level_pipeline import LevelPipeline
from .levels.host_memory import HostMemory
from .levels.level import Level
from .levels.peer_memory import PeerMemory
from .policy import EveryStep, SavePolicy, SaveTiming
from .ranks import IndependentRank, ProcessGroupRanks, Ranks
from .restore import Restored, restore
from .staging.in_flight import CheckpointAbandoned, InFlightCheckpoint
from .staging.stager import PlannedState, Stager
from .staging.write_plan import save_items_of
from .state_dict import ObjectEntry, State, TensorEntry, collect
from .vote import Vote, VoteQueue

_UNTIL_SETTLED_S = 10.0
"""What is under way when a restore begins is given so long to complete."""


class Checkpointer:
    """Saves the state of a training loop while it trains on.

    levels   nearest first; each has a thread of its own
    policy   at which steps to checkpoint; by default at every one
    ranks    who checkpoints together; by default the process group's ranks where there is one
    buffers  host buffers, each of the size of this rank's state. One is enough while the disk
             keeps up; by default there is one more for a peer's memory, which takes up room only
             once the peer lags behind. `HostMemory` holds as many in addition as it keeps.
    clock    nanoseconds since 1970; tells a later lineage of a job that has gone back
    niceness  how far the threads that write are below training's, as in `nice` (on Linux)

    Neither `save` nor `fence` raises or waits for storage: problems are counted in `counters`
    and logged once. One thread calls them, the same at each step on all ranks.
    """

    def __init__(
        self,
        levels: Sequence[Level],
        policy: SavePolicy | None = None,
        *,
        ranks: Ranks | None = None,
        buffers: int | None = None,
        clock: Callable[[], int] = time.time_ns,
        niceness: int = 0,
    ) -> None:
        check(levels, policy, buffers, niceness)
        self.levels, self.policy = tuple(levels), policy or EveryStep()
        self.ranks = ranks or (ProcessGroupRanks() if dist.is_initialized() else IndependentRank())
        self.counters, self._problems = Counters(), ProblemLog()
        self._history = RunHistory(self.ranks.run, clock)
        held = sum(level.keep for level in levels if isinstance(level, HostMemory))
        spare = int(buffers is None and any(isinstance(level, PeerMemory) for level in levels))
        self._stager = Stager(self.ranks, held + (buffers or 1) + spare, spare)
        self._pipeline = LevelPipeline(
            self.levels, self.counters.levels, self._problems, self._stager.settle, niceness
        )
        self._votes: VoteQueue | None = None
        if not isinstance(self.ranks, IndependentRank):
            self._votes = VoteQueue(self.ranks, self._problems, self._give_up)
        self._version, self._is_closed = 0, False
        self._current: InFlightCheckpoint | None = None
        self._begun_s: float | None = None
        self._window_s = self._pause_s = 0.0
        self._cost_s: float | None = None
        self._interval_s: float | None = None
        close_at_exit(self)

    def attach(self, optimizer: torch.optim.Optimizer, *modules: nn.Module) -> None:
        """Put a fence before each step of the optimizer, and copy in the order of its writes.

        Buffers of the modules (running statistics and the like), which the forward pass may
        change, are copied within `save`. Modules that are values of the state need not be named.
        """
        self._stager.know(optimizer, modules)
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def prepare(self, state: State) -> None:
        """Plan, and allocate in the background, for a state like this one.

        The first `save` does so otherwise, and takes longer. A collective call where there is a
        group. Raises `ContractError` for what cannot be saved.
        """
        self._stager.fit(state)
        self._stager.settle()

    def save(self, step: int, state: State, extra: Mapping[str, object] | None = None) -> bool:
        """Begin a checkpoint, right after the optimizer's step; whether one was begun.

        state  nested mapping of tensors, modules, optimizers and other values; tensors must not
               change before `fence`. Other values are copied here.
        extra  what else to have back, of each rank its own: RNG, data cursor, plan version, layout
        """
        vote, checkpoint = Vote(lambda: None, self._version), None
        with self._boundary("save"):
            if self._is_closed:
                raise CheckpointError("the checkpointer has been closed")
            checkpoint = self._save(valid_step(step), state, extra or {}, vote)
        vote.begun.set_result(checkpoint)
        if self._votes is not None and vote.version is not None:
            self._votes.cast(vote)  # whatever went wrong here: the others ask
        return checkpoint is not None

    def fence(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Wait until these tensors (None: all) are copied; right before they change."""
        with self._boundary("fence"):
            self._fence(tensors)
        if self._current is None:
            self._cost_s = self._pause_s

    def protection(self, faults: FaultRate) -> Protection:
        """For `Job.protection`: interval and cost as measured so far, and the rate of faults.

        Both are 0 until two checkpoints have begun, so ask once the loop runs.
        """
        interval_s = self._interval_s or 0.0
        return Protection(
            faults=faults, interval_s=interval_s, cost_s=min(self._cost_s or 0.0, interval_s)
        )

    def restore(self, into: State, *, step: int | None = None) -> Restored:
        """Fill `into` from the newest complete checkpoint at the nearest level; see `restore`.

        What is saved next begins a new lineage: later checkpoints of the past that it does not
        go on from are abandoned, and retired once a new one is complete.
        """
        self.wait(_UNTIL_SETTLED_S)  # nothing should come or go while it is read
        self.ranks.gather(None)
        restored = restore(self.levels, into, self.ranks, step=step)
        self._history.branch(restored.newest_born)
        return restored

    def wait(self, timeout_s: float = 600.0) -> bool:
        """Until every level has finished what it took; whether it did in time."""
        deadline_s = time.monotonic() + timeout_s
        self.fence()
        return self._pipeline.wait(deadline_s)

    def close(self, timeout_s: float = 600.0) -> None:
        """Finish what was begun, within the time, and end all threads.

        A program that ends without it does so at its end.
        """
        deadline_s = time.monotonic() + timeout_s
        self._is_closed = True
        cancel_close_at_exit(self)
        self.wait(timeout_s)
        if self._votes is not None:
            self._votes.close()
        self._pipeline.close(deadline_s)
        self._stager.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_due(self, step: int) -> bool:
        since_s = None if self._begun_s is None else seconds_since(self._begun_s)
        return self.policy.is_due(SaveTiming(step, since_s, self._cost_s, self._pipeline.durable_s))

    def _fence(self, tensors: Sequence[Tensor] | None = None) -> None:
        checkpoint = self._current
        if checkpoint is None:
            return
        if not self._stager.fence(checkpoint, tensors):
            self.counters.no_buffer += 1
            self._begun_s = None  # due again
        elif tensors is not None:
            return
        self._window_s = seconds_since(checkpoint.begun_s)
        self._current = None

    def _save(
        self, step: int, state: State, extra: Mapping[str, object], vote: Vote
    ) -> InFlightCheckpoint | None:
        lineage, is_due = self._history.at(step), self._is_due(step)
        if not is_due and self._votes is None:
            return None
        found = self._fit(state, vote)  # all ranks look at the state: a new plan is theirs all
        return self._begin(step, lineage, found, state, extra) if is_due else None

    def _fit(self, state: State, vote: Vote) -> PlannedState:
        self._fence()  # of a loop that saves twice without a step in between
        self._pause_s = 0.0
        if self._votes is None:
            return self._stager.fit(state)
        held = collect(state)
        vote.items = lambda: save_items_of(*held)
        if self._votes.newest.version != self._version or not self._stager.has_plan(*held):
            self._share_out(held, vote, self._votes)
        return self._stager.fitted(*held)

    def _share_out(
        self, held: tuple[list[TensorEntry], list[ObjectEntry]], vote: Vote, votes: VoteQueue
    ) -> None:
        """Plan by what all ranks said last, if it still holds here; else let them say it again."""
        told, me = votes.newest, self.ranks.all.index(self.ranks.rank)
        if told.version == self._version or list(told.items[me]) != save_items_of(*held):
            vote.version = None
            told = votes.ask(vote)
        else:
            vote.version = told.version
        self._version = told.version
        self._stager.plan(*held, told.items)

    def _begin(
        self,
        step: int,
        lineage: Lineage,
        found: PlannedState,
        state: State,
        extra: Mapping[str, object],
    ) -> InFlightCheckpoint | None:
        able, checkpoint = self._pipeline.able(), None
        if found.has_buffers and able:
            checkpoint = self._stager.lend(step, lineage, found, state, extra, self._window_s)
        if checkpoint is None:
            self.counters.no_buffer += 1
            return None
        self._pipeline.expect(checkpoint, able)
        self._stager.start(checkpoint, self._pipeline.pace(able, self._window_s))
        self._pipeline.offer(checkpoint, able)
        if self._begun_s is not None:
            self._interval_s = checkpoint.begun_s - self._begun_s
        self._current, self._begun_s = checkpoint, checkpoint.begun_s
        self.counters.started += 1
        return checkpoint

    def _give_up(self, checkpoint: InFlightCheckpoint) -> None:
        """In the background: not every rank takes part."""
        self.counters.vetoed += 1
        self._begun_s = None  # due again
        checkpoint.veto(CheckpointAbandoned("another rank had no buffer"))

    @contextmanager
    def _boundary(self, where: str) -> Iterator[None]:
        """Training goes on whatever happens within; time and failures are counted."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - the boundary with the training loop
            self.counters.failures[f"{where}: {problem}"] += 1
            self._problems.problem(where, problem)
        finally:
            spent = time.perf_counter() - begun
            self.counters.blocking_s += spent
            self._pause_s += spent
