"""Transfer of the state of one generation to the next, while training continues."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from resihp._devices import finish_own_work, use_device
from resihp._process_limits import lower_priority
from resihp.contracts import CheckpointError, PeerLostError, Plan, StateLostError
from resihp.layout import Param

from ..checkpointing.protocol import StateManager
from ..process_groups.abortable import AbortableProcessGroup
from ..step import Cursor, Engine, Setup
from ..step.gradient_allreduce import SummedGradients
from ..step.shard import Shard, copy_shared_rows, scalar_table
from .buffers import HeldState, held_apart, held_twice
from .build import Generation, ReshardContext
from .exchange import TensorExchange, view_of
from .gradient_migration import GradientMigration
from .gradient_transfer import GradientTransfer
from .spreading import CopyPace, copy_seconds, segments

_NICENESS = 5


class StateTransfer:
    """Brings the shard of the next generation to the state of the old one, which stays intact.

    Parameters and moments do not change between two updates, so they are copied during the passes
    of a step (LiveR, arXiv 2605.22014; DataStates-LLM, arXiv 2406.10707). The update at the end of
    the step is not copied: each new holder receives the summed gradients of its ranges and makes
    the same elementwise update. Collective over the ranks of both generations:

    1. All ranks of the old layout call `start` before the same step, or none does.
    2. Each of them calls `end_step` before the update. If the copy takes a further step, it calls
       `start` behind the update: new holders make it in what they have, with gradients that move
       beside the next step.
    3. Otherwise, or after a failure, all ranks call `finish`, or `restore` where state is missing.
       It sets `total`, `rest` or `rewound` of the generation.
    4. To abort, `stop`; no state is read or written afterwards.

    engine          of the old generation; None if this rank has no place in it
    before          its plan
    completed       steps completed in it; ranks without a place learn it in the transfer
    received_bytes  of parameters and moments
    gradient_bytes  of summed gradients
    copied_s        duration of the copy of parameters and moments
    steps           over which it is spread
    """

    def __init__(
        self,
        context: ReshardContext,
        generation: Generation,
        engine: Engine | None,
        before: Plan,
        completed: int,
        *,
        on_transfer: Callable[[int], None],
    ) -> None:
        self.completed = self._known = completed
        self.received_bytes = 0
        self.copied_s = 0.0
        self._context, self._setup = context, context.setup
        self._generation, self._engine, self._before = generation, engine, before
        self._old = engine.shard if engine is not None else None
        self._new = generation.pending
        self._exchange = TensorExchange(
            generation.links,
            context.rendezvous.rank,
            buffer_bytes=context.budget.buffer_bytes,
            on_transfer=on_transfer,
        )
        self._gradients = GradientTransfer(
            generation.planned,
            context.setup.model.parameters,
            self._exchange,
            engine,
            generation.pending,
            early=self._is_early,
        )
        self._pace = CopyPace()
        self._segments: list[set[Param]] = []
        self._copied: set[Param] = set()
        self._begun = self._done = 0  # segments
        self._kept: SummedGradients = {}
        self._is_spread = threading.Event()
        self._error: Exception | None = None
        self._is_done = False
        self._thread: threading.Thread | None = None
        self._gradient_thread: threading.Thread | None = None

    @property
    def gradient_bytes(self) -> int:
        return self._gradients.received_bytes

    @property
    def steps(self) -> int:
        return len(self._segments)

    @property
    def extra_bytes(self) -> int:
        """Buffers, and state held in memory for both generations until the commit."""
        twice = 0
        if self._old is not None and self._new is not None:
            both = HeldState.of(self._old), HeldState.of(self._new.shard)
            twice = held_twice(*both, self._setup.optimizer.copies - 1)
            twice = max(0, twice - self.spilled_bytes)
        return self._exchange.buffer_bytes + twice

    @property
    def spilled_bytes(self) -> int:
        """State held in files instead."""
        return self._new.allocator.spilled_bytes if self._new is not None else 0

    def start(self, completed: int, pace: CopyPace) -> None:
        """Copy state in the background, in the end gradients as well, as they become whole.

        completed  steps by now
        pace       of this rank; the time of the copy is added. If a rank has a single step left
                   for it, the rest of a copy is made in the step that follows this one
        """
        self._known, self._pace, self._is_done = completed, pace, False
        self._begun += 1
        # Created here: a thread that is never started would keep the state alive in a cycle.
        self._thread = threading.Thread(target=self._run, name="resihp-transfer", daemon=True)
        self._thread.start()
        if self._is_early:  # by a thread that is not as nice: training soon waits for them
            self._gradient_thread = threading.Thread(
                target=self._run_gradients, name="resihp-gradients", daemon=True
            )
            self._gradient_thread.start()

    def stop(self) -> None:
        """Abort; no state is read or written afterwards."""
        self._generation.cancelled.set()
        self._join()

    @property
    def is_last_step(self) -> bool:
        """True if the copy ends with the step that has begun, as far as is known by now."""
        return self._begun >= len(self._segments)

    def end_step(self) -> bool:
        """Wait for what is copied beside a step; True if `finish` comes next, before the update.

        Raises `PeerLostError` if a peer is lost.
        """
        self._is_spread.wait()
        if self.is_last_step or self._error is not None:
            return True
        self._await_thread()
        assert self._engine is not None
        assert self._engine.total is not None
        self._kept = self._gradients.kept_of(self._copied, self._engine.total)
        return False

    def finish(self) -> None:
        """Complete the state, and move gradients: summed ones, or what survives of a failure.

        Raises `PeerLostError` if a peer is lost.
        """
        self._gradients.is_summed.set()
        while self._thread is None and not self._is_copied:
            self._copy_segment()
        self._await_thread()
        if self._generation.lost is None:
            if self._thread is None or not self._is_early:
                self._gradients.run(self._generation.cancelled)
            self._generation.total = self._gradients.total()
        else:
            assert self._generation.transit is not None
            migration = GradientMigration(
                self._setup,
                self._generation.transit,
                self._exchange,
                self._before,
                self._generation.plan,
            )
            self._generation.rest = migration.run(
                self._generation.kept, self._engine, self._generation.shard
            )

    def restore(self, checkpoints: StateManager, missing: str) -> None:
        """Read all state from the newest checkpoint, because no rank alive holds the `missing`.

        Overwrites tensors that both generations share: once state is missing, no later decision can
        return to the old generation. Raises `StateLostError` if no checkpoint is usable.
        """
        assert self._generation.transit is not None
        try:
            self._generation.rewound = checkpoints.restore(
                self._generation.transit, self._generation.shard
            )
        except CheckpointError as error:
            raise StateLostError(f"{missing}; {error}") from error

    @property
    def _is_early(self) -> bool:
        """Return whether gradients move before all of them are whole: alike on all ranks.

        They are not known before the end of a step where sums are ordered or scattered, and may
        change until then where replicas claim microbatches. Devices copy quickly in the pause.
        """
        setup, dp = self._setup, self._before.layout.dp
        is_ordered = setup.deterministic or setup.state_copies is not None
        is_claimed = setup.steal_ahead is not None and dp > 1
        return setup.device.type == "cpu" and not is_ordered and not is_claimed

    @property
    def _is_copied(self) -> bool:
        """Return whether all parameters and moments are copied."""
        return 0 < len(self._segments) == self._done

    def _await_thread(self) -> None:
        """Wait for what was started; raise what has kept this rank from it."""
        if self._thread is None:
            return
        self._join()
        if self._error is not None:
            raise self._error
        if not self._is_done:
            raise RuntimeError("the transfer of state has ended before its time")

    def _join(self) -> None:
        for thread in (self._thread, self._gradient_thread):
            if thread is not None:
                thread.join()

    def _run(self) -> None:
        try:
            with self._keeping_error():
                use_device(self._setup.device)
                lower_priority(_NICENESS)
                self._copy_segment()
                finish_own_work(self._setup.device)  # training's stream may be another one
                self._is_done = True
        finally:
            self._is_spread.set()

    def _run_gradients(self) -> None:
        assert self._thread is not None
        self._thread.join()
        if self._is_done and self._is_copied:
            self._is_done = False
            with self._keeping_error():
                self._gradients.run(self._generation.cancelled)
                self._is_done = True

    @contextmanager
    def _keeping_error(self) -> Iterator[None]:
        """Keep what a thread raises for `finish`."""
        try:
            yield
        except PeerLostError as error:
            self._error = PeerLostError(str(error))  # the traceback would keep the state
        except Exception as error:  # noqa: BLE001
            self._error = error

    def _copy_segment(self) -> None:
        """Copy the next part of parameters and moments, and the replicated state."""
        old, new, generation, setup = self._old, self._new, self._generation, self._setup
        assert generation.transit is not None
        if not self._segments:
            self._segments = self._spread(generation.transit)
            self._is_spread.set()
        else:
            self._update_copied()
        self.completed = distribute_replicated_state(
            generation.transit,
            setup,
            self._known,
            old=old,
            new=new.shard if new is not None else None,
            source=generation.source,
        )
        start, segment = time.perf_counter(), self._segments[self._done]
        for param, held, due in held_apart(old, new):
            if param in segment:
                assert old is not None
                assert new is not None
                both = old.state((param, held)), new.state((param, due))
                for source, target in zip(*both, strict=True):
                    copy_shared_rows(param, source, held, target, due)
        # Most optimizers allocate their moments at the first update.
        is_new = self.completed == 0 and not setup.optimizer.form.eager
        copies = 1 if is_new else setup.optimizer.copies
        planned = [move for move in generation.planned if move.param in segment]
        self.received_bytes += self._exchange.run(planned, copies, view_of(old), view_of(new))
        self.copied_s += time.perf_counter() - start
        self._copied |= segment
        self._done += 1
        if not self._is_copied:
            # Sources change with the update of the step: all have been read.
            has_to_end = torch.tensor([float(self._pace.most_steps <= 1)], device="cpu")
            if generation.transit.all_reduce_max(has_to_end.to(generation.transit.device)).item():
                self._segments[self._done :] = [set().union(*self._segments[self._done :])]
            self._kept = {}

    def _spread(self, group: AbortableProcessGroup) -> list[set[Param]]:
        """Agree with all ranks on the parameters that are copied beside each step.

        One step must do after a failure, where an update writes gradients, and where the state is
        sharded over replicas.
        """
        generation, optimizer = self._generation, self._setup.optimizer
        parameters, steps = self._setup.model.parameters, 1
        if generation.lost is None:
            planned, rank = generation.planned, self._context.rendezvous.rank
            copy_s = copy_seconds(planned, optimizer.copies, rank, generation.link_s)
            if optimizer.form.writes_gradients or self._setup.state_copies:
                self._pace = replace(self._pace, most_steps=1)
            steps = replace(self._pace, copy_s=copy_s).agree(group)
        return segments(generation.planned, parameters, steps)

    def _update_copied(self) -> None:
        """Make the last update in what was copied before it."""
        self._gradients.run_behind(self._copied, self._kept)
        if self._new is not None:
            self._new.update(self._setup.model.parameters, self._copied, self.completed)


def distribute_replicated_state(
    group: AbortableProcessGroup,
    setup: Setup,
    completed: int,
    *,
    old: Shard | None,
    new: Shard | None,
    source: int,
) -> int:
    """Distribute over `group` what is equal on all ranks; collective. Returns the completed steps.

    That is the completed steps, the optimizer's scalars and the data cursor. Ranks outside the old
    layout (`old` is None) receive all of it; `source` is a rank inside, the same on all ranks.
    """
    table = old.scalars() if old is not None else scalar_table(setup.model, setup.optimizer)
    known = torch.cat(
        [torch.tensor([completed], dtype=torch.float64, device="cpu"), table.flatten()]
    )
    known = group.all_reduce_max(known.to(group.device)).cpu()
    completed = int(known[0])
    if new is not None:
        new.set_scalars(known[1:].view_as(table), completed)
    if isinstance(setup.data, Cursor):
        written = io.BytesIO()
        torch.save(setup.data.state_dict(), written)
        own = written.getvalue()
        length = group.broadcast(torch.tensor([len(own)], device=group.device), source)
        sent = bytearray(own if group.rank == source else int(length))
        state = torch.frombuffer(sent, dtype=torch.uint8).to(group.device)
        group.broadcast(state, source)
        if old is None:
            received = io.BytesIO(state.cpu().numpy().tobytes())
            setup.data.load_state_dict(torch.load(received, weights_only=True))
    return completed
