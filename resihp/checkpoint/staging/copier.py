"""Copier: a thread that copies state into the host cache while training computes.

On a CUDA device the copies run on a stream of lowest priority that first waits for the optimizer,
a few chunks in flight at a time, so that transfers of the training run in between; the fence then
makes the training stream wait for the copies, not the host.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from resihp._devices import record_awaited
from resihp._shutdown import start_thread
from resihp._stream_captures import ignore_captures

from ..format.shard_file import SourceBytes
from ..providers import TensorSource, memory_of
from ..state_dict import is_plain
from .in_flight import ChunkState, InFlightCheckpoint

IN_FLIGHT = 4
"""Maximum number of chunk copies submitted to the device and not completed."""

_NOT_NOW = -1


class Copier:
    """Copies one checkpoint after the other, each chunk once the cache has a block for it."""

    def __init__(self, device: torch.device) -> None:
        self._queue: SimpleQueue[InFlightCheckpoint | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None
        self._device = device
        thread = Thread(target=self._run, name="resihp-checkpoint-copy", daemon=True)
        self._thread = start_thread(thread, partial(self._queue.put, None))

    @property
    def pins(self) -> bool:
        """True if host memory should be pinned."""
        return self._stream is not None

    def start(self, checkpoint: InFlightCheckpoint) -> None:
        """Begin to copy, after the work that the caller's stream has been given so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._queue.put(checkpoint)

    def help(self, checkpoint: InFlightCheckpoint, pending: deque[int]) -> bool:
        """Remove chunks from `pending` whose tensors may change, copying open ones on the way.

        Ends at the first chunk without room; on a device at the first open one, as the stream
        copies there (then returns False). A chunk that another thread is copying stays, in front.
        """
        put = None if self._stream is not None else _ChunkCopy(checkpoint)
        busy: list[int] = []
        while pending:
            with checkpoint.changed:
                state = checkpoint.progress[pending[0]]
                is_open = state < ChunkState.ORDERED and state is not ChunkState.COPYING
                if checkpoint.problem is not None or (
                    is_open and (put is None or not checkpoint.claim(pending[0]))
                ):
                    break
            number = pending.popleft()
            if is_open and put is not None:
                put(number, ChunkState.COPIED)
            elif state is ChunkState.COPYING:
                busy.append(number)
        pending.extendleft(reversed(busy))
        return put is not None

    def fence(self) -> None:
        """Make the caller's stream wait for every copy submitted so far."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def end(self) -> None:
        """Ask the thread to end after its current work."""
        self._queue.put(None)

    def close(self, deadline_s: float | None = None) -> None:
        """End the thread and wait for it, until the deadline of the monotonic clock if given."""
        self.end()
        self._thread.join(None if deadline_s is None else max(0.0, deadline_s - time.monotonic()))

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
            ignore_captures()
        while (checkpoint := self._queue.get()) is not None:
            try:
                self._copy(checkpoint)
            except Exception as problem:  # noqa: BLE001 - raised in the levels, which count it
                checkpoint.abandon(problem)
                checkpoint.sources = ()
            del checkpoint

    def _copy(self, checkpoint: InFlightCheckpoint) -> None:
        if self._stream is not None:
            _copy_from_device(checkpoint, self._stream)
            return
        put = _ChunkCopy(checkpoint)
        while (number := _next(checkpoint)) is not None:
            put(number, ChunkState.COPIED)


def _copy_from_device(checkpoint: InFlightCheckpoint, stream: torch.cuda.Stream) -> None:
    """Copy with few chunks in flight; without limit once the training stream waits at the fence."""
    put = _ChunkCopy(checkpoint)
    flying: deque[tuple[int, torch.cuda.Event]] = deque()
    try:
        while (number := _next(checkpoint, can_wait=not flying)) is not None:
            if number == _NOT_NOW:
                _land(checkpoint, flying)  # levels may then release its block
                continue
            put(number, ChunkState.ORDERED)
            flying.append((number, record_awaited(stream)))
            if len(flying) >= IN_FLIGHT and not checkpoint.hurry.is_set():
                _land(checkpoint, flying)
    finally:
        while flying:
            _land(checkpoint, flying)
        record_awaited(stream).synchronize()  # the references to the tensors are dropped after this


def _land(checkpoint: InFlightCheckpoint, flying: deque[tuple[int, torch.cuda.Event]]) -> None:
    number, event = flying.popleft()
    event.synchronize()
    checkpoint.move(number, ChunkState.COPIED)


def _next(checkpoint: InFlightCheckpoint, *, can_wait: bool = True) -> int | None:
    """Wait for the next chunk to copy, and claim it for the copying thread; None at the end.

    With a level that writes from the tensors it starts at the other end, as late as possible.
    Returns `_NOT_NOW` in place of a wait for room unless it `can_wait`.
    """
    while True:
        with checkpoint.changed:
            if checkpoint.problem is not None or checkpoint.is_safe:
                checkpoint.sources = ()
                return None
            progress, pace = checkpoint.progress, checkpoint.pace
            number = progress.last_open() if pace else progress.first_open()
            if number is None or not checkpoint.has_room(number):
                if not can_wait:
                    return _NOT_NOW
                checkpoint.changed.wait()
                continue
            nap_s = pace.nap_s(checkpoint) if pace and not checkpoint.hurry.is_set() else 0.0
            if not nap_s:
                checkpoint.claim(number)
                return number
        checkpoint.hurry.wait(nap_s)


class _ChunkCopy:
    """Copies the frames and tensor segments of a chunk into its block."""

    def __init__(self, checkpoint: InFlightCheckpoint) -> None:
        self._checkpoint, self._bytes = checkpoint, SourceBytes(checkpoint.sources)

    def __call__(self, number: int, then: ChunkState) -> None:
        """Copy a claimed chunk, which is in state `then` afterwards."""
        checkpoint = self._checkpoint
        try:
            start = checkpoint.file.chunks[number][0]
            checkpoint.file.put_frames(number, checkpoint.chunk(number), start)
            block = checkpoint.cache.tensor(checkpoint.blocks[number])
            for segment in checkpoint.file.segments[number]:
                at = segment.at - start
                goal = block[at : at + segment.stop - segment.start]
                goal.copy_(self._bytes.of(segment), non_blocking=True)
        except BaseException:
            checkpoint.move(number, ChunkState.OPEN)  # so that no block is held for it
            raise
        checkpoint.move(number, then)


def chunks_of(checkpoint: InFlightCheckpoint, tensors: Iterable[Tensor]) -> list[int]:
    """List the chunks that share memory with any of these tensors, in order."""
    starts, stops = _merged(sorted(_memory(tensor) for tensor in tensors))
    with checkpoint.changed:
        if not checkpoint.sources:
            return []  # every chunk is copied
        held = set()
        for number, source in enumerate(checkpoint.sources):
            for start, stop in map(_memory, memory_of(source)):
                before = bisect_left(starts, stop)  # among spans that start before it ends
                if before and stops[before - 1] > start:
                    held.add(number)
    segments = checkpoint.file.segments
    return [
        n for n in range(checkpoint.count) if any(segment.tensor in held for segment in segments[n])
    ]


def _merged(spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Merge overlapping spans; returns their starts and stops, both ascending."""
    starts: list[int] = []
    stops: list[int] = []
    for start, stop in spans:
        if stops and start <= stops[-1]:
            stops[-1] = max(stops[-1], stop)
        else:
            starts.append(start)
            stops.append(stop)
    return starts, stops


def write_order(
    sources: Sequence[TensorSource], optimizers: Sequence[torch.optim.Optimizer]
) -> list[int]:
    """Sort positions of sources by the order in which optimizers write them; others first."""
    turn: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            moments = optimizer.state.get(parameter, {}).values()
            for tensor in (parameter, *(m for m in moments if isinstance(m, Tensor))):
                turn.setdefault(address_of(tensor), len(turn))
    turns = [
        min((turn.get(address_of(tensor), -1) for tensor in memory_of(source)), default=-1)
        for source in sources
    ]
    return sorted(range(len(sources)), key=turns.__getitem__)


def _memory(tensor: Tensor) -> tuple[int, int]:
    """First and last (exclusive) address of the tensor, gaps included."""
    local = local_of(tensor)
    reach = 1 + sum((n - 1) * by for n, by in zip(local.shape, local.stride(), strict=True))
    start = local.data_ptr()
    return start, start + (reach * local.itemsize if local.numel() else 0)


def address_of(tensor: Tensor) -> int:
    """Address of a tensor's local shard; 0 if it is none that can be saved, as a sparse one."""
    local = None if is_lazy(tensor) else local_of(tensor)
    return local.data_ptr() if local is not None and is_plain(local) else 0


def local_of(tensor: Tensor) -> Tensor:
    """Return the local shard of a `DTensor`, or the tensor itself."""
    local = getattr(tensor, "to_local", None)
    return tensor.detach() if local is None else local().detach()
