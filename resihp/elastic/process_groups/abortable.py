"""Process groups whose collectives can be abandoned.

A rank never blocks inside the backend: it waits for asynchronous work in short slices and checks
between them whether the generation is aborted. An aborted group is dropped; the next generation
builds its groups under store prefixes of its own. The backend is that of `Communicators`.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from resihp._devices import record_own_work, use_device
from resihp._shutdown import torch_lock
from resihp.contracts import PeerLostError

from .communicators import ABORTED, CPU, Communicators
from .selection import select_communicators

_CLOSE_POLL_S = 0.01


class WaitClock:
    """Sums the time that this rank is blocked on others, in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the time inside the block as waiting."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds += time.perf_counter() - start


class ProcessGroupFactory:
    """Builds the process groups of one generation over one store and waits for their work.

    rank     this rank
    broken   called between two slices of every wait with the awaited ranks and the seconds waited;
             returns a reason to abort the generation, or None
    timeout  of one collective
    connect  timeout for building a group; default: `timeout`
    waited   clock that counts the waits
    host     address under which peers reach this rank
    device   of the tensors
    maker    of the communicators; default: `select_communicators`
    groups   all groups that this factory has built
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        *,
        broken: Callable[[Sequence[int], float], str | None],
        timeout: timedelta,
        connect: timedelta | None = None,
        waited: WaitClock,
        host: str = "127.0.0.1",
        device: torch.device = CPU,
        maker: type[Communicators] | None = None,
    ) -> None:
        self.rank, self.device, self.waited = rank, device, waited
        self.groups: list[AbortableProcessGroup] = []
        self._broken, self._timeout = broken, timeout
        self.communicators = (maker or select_communicators(device))(
            store, device, host=host, timeout=timeout, connect=connect or timeout
        )

    def group(self, name: str, ranks: Sequence[int], *, threads: int = 1) -> AbortableProcessGroup:
        """The group of `ranks` (this rank among them). Blocks until all of them build it.

        With one thread, the group completes its collectives in the order of their start.
        """
        communicator = self.communicators.connect(
            f"{name}/{'-'.join(map(str, ranks))}",
            list(ranks).index(self.rank),
            len(ranks),
            threads=threads,
            check=partial(self.check_aborted, ranks, 0.0),
        )
        self.groups.append(AbortableProcessGroup(self, tuple(ranks), communicator))
        return self.groups[-1]

    def alone(self) -> AbortableProcessGroup:
        """The group of this rank alone, which exchanges nothing: there is nothing to close."""
        return AbortableProcessGroup(self, (self.rank,), None)  # type: ignore[arg-type]

    def uncounted(self) -> ProcessGroupFactory:
        """The same factory for a background thread, with a clock of its own for its waits."""
        other = copy.copy(self)
        other.waited = WaitClock()
        return other

    def wait(self, work: dist.Work, ranks: Sequence[int], own: Any = None) -> None:
        """Wait until `work` is done. Raises `PeerLostError` if a peer is lost, or too slow.

        own  event of the device before which `work` cannot begin: until then nobody else is waited
             for, and the time is that of this rank's own kernels
        """
        if own is not None:
            own.synchronize()
        start, waited_s = time.perf_counter(), 0.0
        with self.waited.blocked():
            while not self._is_done(work, ranks):
                waited_s = time.perf_counter() - start
                self.check_aborted(ranks, waited_s)
                if waited_s > self._timeout.total_seconds():
                    raise PeerLostError(f"{list(ranks)} did not exchange within {self._timeout}")

    def check_aborted(self, ranks: Sequence[int], waited_s: float) -> None:
        """Raises `PeerLostError` if the generation is aborted or one of `ranks` is silent."""
        reason = ABORTED if self.communicators.is_aborted else self._broken(ranks, waited_s)
        if reason is not None:
            raise PeerLostError(reason)

    def abort(self) -> None:
        """Abort all groups, from any thread; each rank calls it for itself.

        Whoever waits in one of them gets `PeerLostError` within a slice; no call may follow.
        """
        self.communicators.abort()

    def _is_done(self, work: dist.Work, ranks: Sequence[int]) -> bool:
        """Wait one slice for `work`. Raises `PeerLostError` if it has failed."""
        try:
            return self.communicators.is_done(work)
        except RuntimeError as error:
            raise _lost(ranks, error) from error


class AbortableProcessGroup:
    """Collectives over a set of ranks. All calls are collective; tensors are contiguous."""

    def __init__(
        self, factory: ProcessGroupFactory, ranks: tuple[int, ...], backend: dist.ProcessGroup
    ) -> None:
        self.ranks = ranks
        self._factory, self._backend = factory, backend
        self._started: list[_Started] = []

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self._factory.rank

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._factory.device

    def warm_up(self) -> None:
        """Connect now, in a background thread, instead of at the first collective."""
        if len(self.ranks) > 1:
            work = self.start_all_reduce(torch.zeros(1, device=self.device))
            self._factory.uncounted().wait(work, self.ranks)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum `tensor` over the group, in place."""
        if len(self.ranks) > 1:
            self.wait(self.start_all_reduce(tensor))
        return tensor

    def all_reduce_max(self, tensor: torch.Tensor) -> torch.Tensor:
        """Elementwise maximum of `tensor` over the group, in place."""
        if len(self.ranks) > 1:
            options = dist.AllreduceOptions()
            options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
            self.wait(self._start(lambda backend: backend.allreduce([tensor], options)))
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Start to sum `tensor` in place; `wait` for the work before using it."""
        return self._start(lambda backend: backend.allreduce([tensor]))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The equally shaped tensors of all ranks, in group order."""
        if len(self.ranks) == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        self.wait(self.start_all_gather(parts, tensor))
        return parts

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Start to copy `tensor` from rank `source` to all; `wait` for the work before use."""
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(source)
        options.rootTensor = 0
        return self._start(lambda backend: backend.broadcast([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy `tensor` from rank `source` to all, in place."""
        if len(self.ranks) > 1:
            self.wait(self.start_broadcast(tensor, source))
        return tensor

    def start_all_gather(self, parts: list[torch.Tensor], tensor: torch.Tensor) -> dist.Work:
        """Start to fill `parts` with the equally shaped tensors of all ranks, in group order."""
        return self._start(lambda backend: backend.allgather([parts], [tensor]))

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, into: list[int], out: list[int]
    ) -> None:
        """Exchange flat buffers: `out[i]` elements go to rank i, `into[i]` come from it."""
        self.wait(self.start_all_to_all(received, sent, into, out))

    def start_all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, into: list[int], out: list[int]
    ) -> dist.Work:
        """Start `all_to_all`; `wait` for the work before using what is received."""
        options = dist.AllToAllOptions()
        return self._start(
            lambda backend: backend.alltoall_base(received, sent, into, out, options)
        )

    def wait(self, work: dist.Work) -> None:
        """Wait until `work` is done. Raises `PeerLostError` if a peer is lost."""
        own = next((one.own for one in self._started if one.work is work), None)
        self._factory.wait(work, self.ranks, own)
        self._started = [one for one in self._started if one.work is not work]

    def has_succeeded(self, work: dist.Work) -> bool:
        """Return whether `work` is done by now and is known not to have failed.

        After an abort some backends do not tell: then it is not known.
        """
        try:
            return work.is_completed() and self._factory.communicators.is_done(work)
        except RuntimeError:
            return False

    def check_aborted(self) -> None:
        """Raises `PeerLostError` like `wait`, without waiting: for use inside long work."""
        self._factory.check_aborted(self.ranks, 0.0)

    @property
    def is_idle(self) -> bool:
        """True when no collective is in progress, aborted ones included."""
        return all(one.work.is_completed() for one in self._started)

    def abort(self) -> None:
        """Abort this group and all others of its generation; see `ProcessGroupFactory.abort`."""
        self._factory.abort()

    def close(self) -> None:
        """Close the connections, even if other objects refer to the group. No call may follow.

        Blocks until a collective in progress has timed out.
        """
        self._started = []
        self._factory.communicators.close(self._backend)
        del self._backend, self._factory

    def _start(self, collective: Callable[[dist.ProcessGroup], dist.Work]) -> dist.Work:
        own = record_own_work(self.device)
        try:
            work = collective(self._backend)
        except dist.DistBackendError as error:
            raise _lost(self.ranks, error) from error
        self._started = [one for one in self._started if not one.work.is_completed()]
        self._started.append(_Started(work, own))
        return work


@dataclass(frozen=True)
class _Started:
    """A collective, and the event of this rank's device before which it cannot begin."""

    work: dist.Work
    own: Any


def _lost(ranks: Sequence[int], error: Exception) -> PeerLostError:
    """The loss that an error of a collective tells; NCCL's and gloo's go on for many lines."""
    first_line = (str(error).splitlines() or [type(error).__name__])[0]
    return PeerLostError(f"lost a peer among {list(ranks)}: {first_line}")


def close_groups(groups: Iterable[AbortableProcessGroup]) -> None:
    """Close unused groups in a thread, each as soon as it is idle.

    Closing connections takes longer than a change of layout; `groups` is iterated in the thread and
    may block. A collective in progress ends when a peer dies or closes its own end, so ranks that
    all close a generation unblock each other; only a stopped peer delays it until the timeout.
    """
    threading.Thread(target=_close, args=(groups,), name="resihp-close", daemon=True).start()


def _close(groups: Iterable[AbortableProcessGroup]) -> None:
    left = list(groups)
    for device in {group.device for group in left}:
        with torch_lock():
            use_device(device)
    while left:
        with torch_lock():
            for group in [group for group in left if group.is_idle]:
                group.close()
                left.remove(group)
        if left:
            time.sleep(_CLOSE_POLL_S)
