"""Gloo communicators of a device's tensors, which travel through pinned memory of the host.

For ranks that share a device, which NCCL refuses, and for torch builds without NCCL. Gloo itself
knows too few collectives of CUDA tensors. The tests hold the order of the copies against stand-ins;
`benchmarks.gpu` runs them on a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist

from resihp._devices import record_awaited, side_stream, use_device
from resihp._shutdown import start_thread

from .communicators import ABORTED, CPU, SLICE, Communicators, Member, wait_slice
from .gloo import GlooCommunicators

Tensors = Sequence[torch.Tensor]


class StagedGlooCommunicators(GlooCommunicators):
    """Communicators of gloo, each with a thread that waits for the copies to and from the host.

    Neither the training's thread nor its stream waits before `is_done` does: a collective may be
    started while a pass is still being computed.
    """

    name = "staged"

    @classmethod
    def refusal(cls, device: torch.device) -> str | None:
        """Reason for which tensors of `device` cannot travel through the host, or None."""
        if device.type != "cuda":
            return f"tensors of {device} need not be staged"
        if not torch.cuda.is_available():
            return "there is no CUDA device"
        return GlooCommunicators.refusal(CPU)

    def is_done(self, work: dist.Work) -> bool:
        """Wait one slice; True once `work` has ended. Raises `RuntimeError` if it has failed."""
        staged = cast(StagedWork, work)
        if not staged.ended.wait(SLICE.total_seconds()):
            return False
        if staged.error is not None:
            raise RuntimeError(str(staged.error)) from staged.error
        staged.follow()
        return True

    def _create(self, member: Member, threads: int) -> dist.ProcessGroup:
        group = StagedGroup(super()._create(member, threads), self._copies(), self)
        return cast(dist.ProcessGroup, group)

    def _close(self, communicator: dist.ProcessGroup) -> None:
        cast(StagedGroup, communicator).close()

    def _copies(self) -> DeviceCopies:
        return DeviceCopies(self.device)


class DeviceCopies:
    """Copies between a device and pinned memory, on two side streams.

    All groups share them: a copy waits for what the caller's stream was told before, for no peer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out: Any = side_stream(device, "to host")
        self._into: Any = side_stream(device, "to device")

    def begin(self) -> Any:
        """Event after all that the caller's stream has been told so far."""
        return torch.cuda.current_stream(self._device).record_event()

    def empty(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return pinned memory for a tensor."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def to_host(self, tensor: torch.Tensor, host: torch.Tensor, after: Any) -> Any:
        """Copy a tensor after an event; returns the event after the copy."""
        return self._copied(self._out, host, tensor, after)

    def to_device(self, host: torch.Tensor, tensor: torch.Tensor, after: Any) -> Any:
        """Copy into a tensor, which may be that of an earlier one until the event `after`."""
        return self._copied(self._into, tensor, host, after)

    def follow(self, event: Any) -> None:
        """Have the caller's stream wait for an event."""
        torch.cuda.current_stream(self._device).wait_event(event)

    def _copied(self, stream: Any, into: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            into.copy_(source, non_blocking=True)
        (into if into.is_cuda else source).record_stream(stream)
        return record_awaited(stream)


class StagedWork:
    """A collective under way, with what `AbortableProcessGroup` asks of a `dist.Work`.

    ended  by its outcome: `error`, or copies to the device that have been started
    """

    def __init__(self, copies: DeviceCopies) -> None:
        self.ended, self.error = threading.Event(), cast(BaseException | None, None)
        self._copies, self._landed = copies, list[Any]()

    def is_completed(self) -> bool:
        """Return whether it has ended."""
        return self.ended.is_set()

    def follow(self) -> None:
        """Have the caller's stream wait for the copies to the device."""
        for event in self._landed:
            self._copies.follow(event)

    def end(self, landed: Sequence[Any] = (), error: BaseException | None = None) -> None:
        """Set the outcome."""
        self._landed, self.error = list(landed), error
        self.ended.set()


class _Exchange(NamedTuple):
    """A collective that waits for its turn.

    copied      events after the copies of what is sent
    collective  starts it, on tensors of the host
    received    tensors of the host and of the device that it fills
    begun       event after the caller's earlier use of the memory of those of the device
    """

    work: StagedWork
    copied: Sequence[Any]
    collective: Callable[[], dist.Work]
    received: Sequence[tuple[torch.Tensor, torch.Tensor]]
    begun: Any


class StagedGroup:
    """A gloo group for tensors of a device; its collectives run in the order of their start.

    Has the collectives that `AbortableProcessGroup` starts, with their arguments.
    """

    def __init__(
        self, gloo: dist.ProcessGroup, copies: DeviceCopies, communicators: Communicators
    ) -> None:
        self._gloo, self._copies = gloo, copies
        self._queue = SimpleQueue[_Exchange | None]()
        # An aborted group is not closed: its thread ends once nobody refers to it.
        self.close = weakref.finalize(self, self._queue.put, None)
        arguments = (self._queue, copies, communicators)
        thread = threading.Thread(target=_run, args=arguments, name="resihp-staged", daemon=True)
        start_thread(thread, self.close)

    def allreduce(self, tensors: Tensors, *options: Any) -> StagedWork:
        """Reduce a tensor in place."""
        hosts = self._hosts(tensors)
        gloo = self._gloo
        return self._start(
            lambda: gloo.allreduce(hosts, *options),
            sent=zip(tensors, hosts, strict=True),
            received=zip(hosts, tensors, strict=True),
        )

    def broadcast(self, tensors: Tensors, options: Any) -> StagedWork:
        """Copy a tensor from the root to all."""
        hosts = self._hosts(tensors)
        gloo, is_root = self._gloo, options.rootRank == self._gloo.rank()
        return self._start(
            lambda: gloo.broadcast(hosts, options),
            sent=zip(tensors, hosts, strict=True) if is_root else (),
            received=() if is_root else zip(hosts, tensors, strict=True),
        )

    def allgather(self, parts: Sequence[Tensors], tensors: Tensors) -> StagedWork:
        """Fill `parts` with the tensors of all members."""
        hosts, gathered = self._hosts(tensors), [self._hosts(row) for row in parts]
        gloo = self._gloo
        return self._start(
            lambda: gloo.allgather(gathered, hosts),
            sent=zip(tensors, hosts, strict=True),
            received=(
                pair
                for of_host, of_device in zip(gathered, parts, strict=True)
                for pair in zip(of_host, of_device, strict=True)
            ),
        )

    def alltoall_base(
        self, received: torch.Tensor, sent: torch.Tensor, *splits_and_options: Any
    ) -> StagedWork:
        """Exchange parts of flat buffers."""
        into, out = self._hosts([received, sent])
        gloo = self._gloo
        return self._start(
            lambda: gloo.alltoall_base(into, out, *splits_and_options),
            sent=[(sent, out)],
            received=[(into, received)],
        )

    def _hosts(self, tensors: Tensors) -> list[torch.Tensor]:
        return [self._copies.empty(tensor) for tensor in tensors]

    def _start(
        self,
        collective: Callable[[], dist.Work],
        *,
        sent: Any,
        received: Any,
    ) -> StagedWork:
        """Start to copy what is sent; the thread does the rest."""
        work, begun = StagedWork(self._copies), self._copies.begin()
        copied = [self._copies.to_host(tensor, host, begun) for tensor, host in sent]
        self._queue.put(_Exchange(work, copied, collective, list(received), begun))
        return work


def _run(
    queue: SimpleQueue[_Exchange | None], copies: DeviceCopies, communicators: Communicators
) -> None:
    """Carry out the collectives of a group, one after the other, until None comes.

    One that was started ends by itself, as gloo's do after an abort; later ones are not started.
    """
    use_device(communicators.device)
    while (exchange := queue.get()) is not None:
        try:
            if communicators.is_aborted:
                raise RuntimeError(ABORTED)
            for event in exchange.copied:
                event.synchronize()
            started = exchange.collective()
            while not wait_slice(started):
                pass
            landed = [
                copies.to_device(host, tensor, exchange.begun) for host, tensor in exchange.received
            ]
            exchange.work.end(landed)
        except Exception as error:  # noqa: BLE001 - whoever waits for the work raises it
            exchange.work.end(error=error)
        del exchange  # and with it the tensors
