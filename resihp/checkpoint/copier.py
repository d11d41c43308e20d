"""The lazy copy: a thread that moves state into host buffers while training computes.

On a CUDA device the copies run on a stream of lowest priority that first waits for the optimizer,
a few chunks in flight at a time, so that training's own transfers get in between; the fence then
makes training's stream wait for the copies, not the host. (Written for CUDA; run on CPU so far.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Thread

import torch
from torch import Tensor

from .filling import Filling
from .shard_file import flat_bytes

IN_FLIGHT = 4
"""Chunks of which the copy from a device is ordered and has not ended."""


class Copier:
    """Copies one checkpoint after the other, each chunk as soon as its place is free."""

    def __init__(self, device: torch.device) -> None:
        self._queue: SimpleQueue[Filling | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device, priority=0) if device.type == "cuda" else None
        self._device = device
        self._thread = Thread(target=self._run, name="resihp-checkpoint-copy", daemon=True)
        self._thread.start()

    @property
    def pins(self) -> bool:
        """Whether host buffers should be pinned."""
        return self._stream is not None

    def start(self, filling: Filling) -> None:
        """Begin to copy; what the caller's stream does until here comes first."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._queue.put(filling)

    def fence(self) -> None:
        """Let the caller's stream wait for every copy that has been ordered."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def close(self) -> None:
        """End the thread after what it has begun."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        if self._stream is not None:
            torch.cuda.set_stream(self._stream)
        while (filling := self._queue.get()) is not None:
            try:
                self._copy(filling)
            except Exception as problem:  # noqa: BLE001 - told to the levels, which count it
                filling.veto(problem)
            filling.sources = ()
            del filling

    def _copy(self, filling: Filling) -> None:
        flying: deque[tuple[int, torch.cuda.Event]] = deque()
        image, current, source = filling.slot.buffer.tensor, -1, torch.empty(0)
        for number, cuts in enumerate(filling.file.cuts):
            if not _await_room(filling, number):
                return
            for cut in cuts:
                if cut.tensor != current:
                    current, source = cut.tensor, flat_bytes(filling.sources[cut.tensor])
                goal = image[cut.at : cut.at + cut.stop - cut.start]
                goal.copy_(source[cut.start : cut.stop], non_blocking=True)
            if self._stream is None:
                _advance(filling, enqueued=number + 1, copied=number + 1)
                continue
            flying.append((number, self._stream.record_event()))
            _advance(filling, enqueued=number + 1)
            if len(flying) >= IN_FLIGHT:
                _land(filling, flying)
        while flying:
            _land(filling, flying)


def chunks_until(filling: Filling, tensors: Sequence[Tensor]) -> int:
    """How many chunks must be copied until all of these tensors are."""
    wanted = {tensor.data_ptr() for tensor in tensors}
    last = 0
    for number, cuts in enumerate(filling.file.cuts):
        for cut in cuts:
            if filling.sources and filling.sources[cut.tensor].data_ptr() in wanted:
                last = number + 1
    return last


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
    local = getattr(tensor, "to_local", None)
    return (tensor.detach() if local is None else local().detach()).data_ptr()


def _await_room(filling: Filling, number: int) -> bool:
    """Wait until the chunk's place is free; False where the checkpoint has been given up."""
    with filling.changed:
        while filling.problem is None:
            previous = filling.previous
            if previous is None or previous.released > number:
                filling.is_blocked = False
                return True
            filling.is_blocked = True
            filling.changed.notify_all()
            filling.changed.wait()
    return False


def _land(filling: Filling, flying: deque[tuple[int, torch.cuda.Event]]) -> None:
    number, event = flying.popleft()
    event.synchronize()
    _advance(filling, copied=number + 1)


def _advance(filling: Filling, enqueued: int | None = None, copied: int | None = None) -> None:
    with filling.changed:
        filling.enqueued = enqueued or filling.enqueued
        filling.copied = copied or filling.copied
        if filling.is_copied:
            filling.previous = None
        filling.changed.notify_all()
