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

from ..format.shard_file import flat_bytes
from .filling import Filling

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

    def help(self, filling: Filling, until: int) -> None:
        """Copy in the caller's thread what nobody has begun yet, of the first `until` chunks."""
        if self._stream is None:
            _fill(filling, patient=False, until=until)

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
        if self._stream is None:
            _fill(filling)
        else:
            _fill_from_device(filling, self._stream)


def _fill(filling: Filling, *, patient: bool = True, until: int | None = None) -> None:
    """Copy chunk by chunk; several threads may do so at once."""
    put = _Put(filling)
    while until is None or filling.copied < until:
        number = filling.claim(patient=patient)
        if number is None:
            return
        put(number)
        filling.landed(number)


def _fill_from_device(filling: Filling, stream: torch.cuda.Stream) -> None:
    put = _Put(filling)
    flying: deque[tuple[int, torch.cuda.Event]] = deque()
    while (number := filling.claim()) is not None:
        put(number)
        flying.append((number, stream.record_event()))
        filling.ordered(number)
        if len(flying) >= IN_FLIGHT:
            _land(filling, flying)
    while flying:
        _land(filling, flying)


def _land(filling: Filling, flying: deque[tuple[int, torch.cuda.Event]]) -> None:
    number, event = flying.popleft()
    event.synchronize()
    filling.landed(number)


class _Put:
    """Copies what of the tensors lies in a chunk into the buffer."""

    def __init__(self, filling: Filling) -> None:
        self._file, self._sources = filling.file, filling.sources
        self._image = filling.slot.buffer.tensor
        self._held, self._source = -1, torch.empty(0)

    def __call__(self, number: int) -> None:
        for cut in self._file.cuts[number]:
            if cut.tensor != self._held:
                self._held, self._source = cut.tensor, flat_bytes(self._sources[cut.tensor])
            goal = self._image[cut.at : cut.at + cut.stop - cut.start]
            goal.copy_(self._source[cut.start : cut.stop], non_blocking=True)


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
