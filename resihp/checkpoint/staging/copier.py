"""The lazy copy: a thread that moves state into host buffers while training computes.

On a CUDA device the copies run on a stream of lowest priority that first waits for the optimizer,
a few chunks in flight at a time, so that training's own transfers get in between; the fence then
makes training's stream wait for the copies, not the host. (Written for CUDA; run on CPU so far.)
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from resihp._shutdown import start_thread

from ..format.shard_file import flat_bytes
from .chunk_progress import ChunkState
from .in_flight import InFlightCheckpoint

IN_FLIGHT = 4
"""Chunks of which the copy from a device is ordered and has not ended."""


class Copier:
    """Copies one checkpoint after the other, each chunk as soon as its place is free."""

    def __init__(self, device: torch.device) -> None:
        self._queue: SimpleQueue[InFlightCheckpoint | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None
        self._device = device
        thread = Thread(target=self._run, name="resihp-checkpoint-copy", daemon=True)
        self._thread = start_thread(thread, partial(self._queue.put, None))

    @property
    def pins(self) -> bool:
        """Whether host buffers should be pinned."""
        return self._stream is not None

    def start(self, checkpoint: InFlightCheckpoint) -> None:
        """Begin to copy; what the caller's stream does until here comes first."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._queue.put(checkpoint)

    def help(self, checkpoint: InFlightCheckpoint, needed: Iterable[int]) -> bool:
        """Copy in the caller's thread what nobody copies yet; whether the caller may do so."""
        if self._stream is not None:
            return False
        put = _ChunkCopy(checkpoint)
        for number in needed:
            if _takes_over(checkpoint, number):
                put(number, ChunkState.COPIED)
        return True

    def fence(self) -> None:
        """Let the caller's stream wait for every copy that has been ordered."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def end(self) -> None:
        """Have the thread end after what it has begun."""
        self._queue.put(None)

    def close(self) -> None:
        """The same, and wait for it."""
        self.end()
        self._thread.join()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        while (checkpoint := self._queue.get()) is not None:
            try:
                self._copy(checkpoint)
            except Exception as problem:  # noqa: BLE001 - told to the levels, which count it
                checkpoint.veto(problem)
            with checkpoint.changed:
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
    """A few chunks in flight at a time; all at once when training's stream waits at the fence."""
    put = _ChunkCopy(checkpoint)
    flying: deque[tuple[int, torch.cuda.Event]] = deque()
    try:
        while (number := _next(checkpoint)) is not None:
            put(number, ChunkState.ORDERED)
            flying.append((number, stream.record_event()))
            if len(flying) >= IN_FLIGHT and not checkpoint.hurry.is_set():
                _land(checkpoint, flying)
        while flying:
            _land(checkpoint, flying)
    finally:
        stream.synchronize()  # the tensors are let go of after this


def _land(checkpoint: InFlightCheckpoint, flying: deque[tuple[int, torch.cuda.Event]]) -> None:
    number, event = flying.popleft()
    event.synchronize()
    checkpoint.move(number, ChunkState.COPIED)


def _next(checkpoint: InFlightCheckpoint) -> int | None:
    """For the copying thread: what to copy next, once there is room and reason; None at the end.

    Beside a level that writes from the tensors it begins at the other end, and as late as it can.
    """
    while True:
        with checkpoint.changed:
            if checkpoint.problem is not None or checkpoint.is_safe:
                return None
            progress, pace = checkpoint.progress, checkpoint.pace
            number = progress.last_open() if pace else progress.first_open()
            if number is None or not checkpoint.has_room(number):
                checkpoint.changed.wait()
                continue
            nap_s = pace.nap_s(checkpoint) if pace and not checkpoint.hurry.is_set() else 0.0
            if not nap_s:
                progress.set(number, ChunkState.COPYING)
                return number
        checkpoint.hurry.wait(nap_s)


def _takes_over(checkpoint: InFlightCheckpoint, number: int) -> bool:
    """At the fence: whether to copy this chunk at once, though a level may be writing it."""
    with checkpoint.changed:
        is_free = checkpoint.progress[number] in (ChunkState.OPEN, ChunkState.ZERO_COPY)
        if checkpoint.problem is not None or not is_free or not checkpoint.has_room(number):
            return False
        checkpoint.progress.set(number, ChunkState.COPYING)
        return True


class _ChunkCopy:
    """Copies what of the tensors lies in a chunk into the buffer."""

    def __init__(self, checkpoint: InFlightCheckpoint) -> None:
        self._checkpoint, self._sources = checkpoint, checkpoint.sources
        self._image = checkpoint.slot.buffer.tensor
        self._held, self._source = -1, torch.empty(0)

    def __call__(self, number: int, then: ChunkState) -> None:
        """A claimed chunk, which is at that stage afterwards."""
        try:
            self._checkpoint.slot.frame(number)
            for segment in self._checkpoint.file.segments[number]:
                if segment.tensor != self._held:
                    self._held, self._source = (
                        segment.tensor,
                        flat_bytes(self._sources[segment.tensor]),
                    )
                goal = self._image[segment.at : segment.at + segment.stop - segment.start]
                goal.copy_(self._source[segment.start : segment.stop], non_blocking=True)
        except BaseException:
            self._checkpoint.move(number, ChunkState.OPEN)  # the buffer is not held for it
            raise
        self._checkpoint.move(number, then)


def chunks_of(checkpoint: InFlightCheckpoint, tensors: Iterable[Tensor]) -> list[int]:
    """The chunks that hold memory of any of these tensors, views and wholes alike, in order."""
    starts, stops = _merged(sorted(_memory(tensor) for tensor in tensors))
    with checkpoint.changed:
        if not checkpoint.sources:
            return []  # every chunk is copied
        held = set()
        for number, source in enumerate(checkpoint.sources):
            start, stop = _memory(source)
            before = bisect_left(starts, stop)  # of those that start before it ends
            if before and stops[before - 1] > start:
                held.add(number)
    segments = checkpoint.file.segments
    return [
        n for n in range(checkpoint.count) if any(segment.tensor in held for segment in segments[n])
    ]


def _merged(spans: Iterable[tuple[int, int]]) -> tuple[list[int], list[int]]:
    """Starts and stops of the same bytes without overlaps, both ascending."""
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
    tensors: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]
) -> list[int]:
    """Positions of the tensors in the order in which the optimizers write them; others first."""
    turn: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            moments = optimizer.state.get(parameter, {}).values()
            for tensor in (parameter, *(m for m in moments if isinstance(m, Tensor))):
                turn.setdefault(_address(tensor), len(turn))
    return sorted(range(len(tensors)), key=lambda i: turn.get(tensors[i].data_ptr(), -1))


def _address(tensor: Tensor) -> int:
    return _local(tensor).data_ptr()


def _memory(tensor: Tensor) -> tuple[int, int]:
    """First and last (exclusive) address that the tensor reaches, gaps included."""
    local = _local(tensor)
    reach = 1 + sum((n - 1) * by for n, by in zip(local.shape, local.stride(), strict=True))
    start = local.data_ptr()
    return start, start + (reach * local.itemsize if local.numel() else 0)


def _local(tensor: Tensor) -> Tensor:
    """What of it this process holds."""
    local = getattr(tensor, "to_local", None)
    return tensor.detach() if local is None else local().detach()
