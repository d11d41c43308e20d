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

from .agreement import Agreement, Ballot
from .arguments import check
from .cascade import Cascade
from .counters import Counters, Said, seconds_since
from .levels.contract import Level
from .levels.memory import HostMemory
from .levels.peer import PeerMemory
from .lineage import Descent, Lineage, valid_step
from .parts import Part, State, Thing, collect
from .policy import EveryStep, Moment, Policy
from .ranks import Alone, Group, Ranks
from .restore import Restored, restore
from .staging.filling import Abandoned, Filling
from .staging.plan import claims_of
from .staging.stage import Fitted, Staging

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
        policy: Policy | None = None,
        *,
        ranks: Ranks | None = None,
        buffers: int | None = None,
        clock: Callable[[], int] = time.time_ns,
        niceness: int = 0,
    ) -> None:
        check(levels, policy, buffers, niceness)
        self.levels, self.policy = tuple(levels), policy or EveryStep()
        self.ranks = ranks or (Group() if dist.is_initialized() else Alone())
        self.counters, self._said = Counters(), Said()
        self._descent = Descent(self.ranks.run, clock)
        held = sum(level.keep for level in levels if isinstance(level, HostMemory))
        spare = int(buffers is None and any(isinstance(level, PeerMemory) for level in levels))
        self._staging = Staging(self.ranks, held + (buffers or 1) + spare, spare)
        self._cascade = Cascade(
            self.levels, self.counters.levels, self._said, self._staging.settle, niceness
        )
        self._agreement: Agreement | None = None
        if not isinstance(self.ranks, Alone):
            self._agreement = Agreement(self.ranks, self._said, self._give_up)
        self._version, self._is_closed = 0, False
        self._current: Filling | None = None
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
        self._staging.know(optimizer, modules)
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def prepare(self, state: State) -> None:
        """Plan, and allocate in the background, for a state like this one.

        The first `save` does so otherwise, and takes longer. A collective call where there is a
        group. Raises `ContractError` for what cannot be saved.
        """
        self._staging.fit(state)
        self._staging.settle()

    def save(self, step: int, state: State, extra: Mapping[str, object] | None = None) -> bool:
        """Begin a checkpoint, right after the optimizer's step; whether one was begun.

        state  nested mapping of tensors, modules, optimizers and other values; tensors must not
               change before `fence`. Other values are copied here.
        extra  what else to have back, of each rank its own: RNG, data cursor, plan version, layout
        """
        ballot, filling = Ballot(lambda: None, self._version), None
        with self._boundary("save"):
            if self._is_closed:
                raise CheckpointError("the checkpointer has been closed")
            filling = self._save(valid_step(step), state, extra or {}, ballot)
        ballot.begun.set_result(filling)
        if self._agreement is not None and ballot.version is not None:
            self._agreement.cast(ballot)  # whatever went wrong here: the others ask
        return filling is not None

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
        self._descent.branch(restored.newest_born)
        return restored

    def wait(self, timeout_s: float = 600.0) -> bool:
        """Until every level has finished what it took; whether it did in time."""
        deadline_s = time.monotonic() + timeout_s
        self.fence()
        return self._cascade.wait(deadline_s)

    def close(self, timeout_s: float = 600.0) -> None:
        """Finish what was begun, within the time, and end all threads.

        A program that ends without it does so at its end.
        """
        deadline_s = time.monotonic() + timeout_s
        self._is_closed = True
        cancel_close_at_exit(self)
        self.wait(timeout_s)
        if self._agreement is not None:
            self._agreement.close()
        self._cascade.close(deadline_s)
        self._staging.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _is_due(self, step: int) -> bool:
        since_s = None if self._begun_s is None else seconds_since(self._begun_s)
        return self.policy.is_due(Moment(step, since_s, self._cost_s, self._cascade.durable_s))

    def _fence(self, tensors: Sequence[Tensor] | None = None) -> None:
        filling = self._current
        if filling is None:
            return
        if not self._staging.fence(filling, tensors):
            self.counters.no_buffer += 1
            self._begun_s = None  # due again
        elif tensors is not None:
            return
        self._window_s = seconds_since(filling.begun_s)
        self._current = None

    def _save(
        self, step: int, state: State, extra: Mapping[str, object], ballot: Ballot
    ) -> Filling | None:
        lineage, is_due = self._descent.at(step), self._is_due(step)
        if not is_due and self._agreement is None:
            return None
        found = self._fit(state, ballot)  # all ranks look at the state: a new plan is theirs all
        return self._begin(step, lineage, found, state, extra) if is_due else None

    def _fit(self, state: State, ballot: Ballot) -> Fitted:
        self._fence()  # of a loop that saves twice without a step in between
        self._pause_s = 0.0
        if self._agreement is None:
            return self._staging.fit(state)
        held = collect(state)
        ballot.claims = lambda: claims_of(*held)
        if self._agreement.newest.version != self._version or not self._staging.has_plan(*held):
            self._share_out(held, ballot, self._agreement)
        return self._staging.fitted(*held)

    def _share_out(
        self, held: tuple[list[Part], list[Thing]], ballot: Ballot, agreement: Agreement
    ) -> None:
        """Plan by what all ranks said last, if it still holds here; else let them say it again."""
        told, me = agreement.newest, self.ranks.all.index(self.ranks.rank)
        if told.version == self._version or list(told.claims[me]) != claims_of(*held):
            ballot.version = None
            told = agreement.ask(ballot)
        else:
            ballot.version = told.version
        self._version = told.version
        self._staging.plan(*held, told.claims)

    def _begin(
        self,
        step: int,
        lineage: Lineage,
        found: Fitted,
        state: State,
        extra: Mapping[str, object],
    ) -> Filling | None:
        able, filling = self._cascade.able(), None
        if found.has_buffers and able:
            filling = self._staging.lend(step, lineage, found, state, extra, self._window_s)
        if filling is None:
            self.counters.no_buffer += 1
            return None
        self._cascade.expect(filling, able)
        self._staging.start(filling, self._cascade.pace(able, self._window_s))
        self._cascade.offer(filling, able)
        if self._begun_s is not None:
            self._interval_s = filling.begun_s - self._begun_s
        self._current, self._begun_s = filling, filling.begun_s
        self.counters.started += 1
        return filling

    def _give_up(self, filling: Filling) -> None:
        """In the background: not every rank takes part."""
        self.counters.vetoed += 1
        self._begun_s = None  # due again
        filling.veto(Abandoned("another rank had no buffer"))

    @contextmanager
    def _boundary(self, where: str) -> Iterator[None]:
        """Training goes on whatever happens within; time and failures are counted."""
        begun = time.perf_counter()
        try:
            yield
        except Exception as problem:  # noqa: BLE001 - the boundary with the training loop
            self.counters.failures[f"{where}: {problem}"] += 1
            self._said.problem(where, problem)
        finally:
            spent = time.perf_counter() - begun
            self.counters.blocking_s += spent
            self._pause_s += spent
