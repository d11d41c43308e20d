"""Collectives that can be abandoned: every wait is sliced, so a dead peer never blocks a rank.

A gloo group's `abort()` does not unblock its ranks, and a peer that was stopped (not killed)
breaks no connection. So a rank never blocks inside the backend: it waits for the asynchronous work
in short slices and looks between them whether the generation has been given up. An abandoned group
is dropped; the next generation is built over store prefixes of its own.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist

from resihp.contracts import PeerLostError

_SLICE = timedelta(milliseconds=50)


class WaitClock:
    """Adds up the time that this rank spent blocked on others, in seconds."""

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
    """Makes groups over one store and completes their work; `groups` are those that it made.

    `broken` is asked between two slices of every wait: a reason why the generation is to be given
    up, or None. It gets the ranks that are waited for and for how many seconds already. `timeout`
    is for one exchange, `connect` for building a group; the same where it is not given.
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
    ) -> None:
        self.rank = rank
        self.waited = waited
        self.groups: list[AbortableProcessGroup] = []
        self._store = store
        self._broken = broken
        self._timeout, self._connect = timeout, connect or timeout
        self._device = dist.ProcessGroupGloo.create_device(hostname=host)

    def group(self, name: str, ranks: Sequence[int], *, threads: int = 1) -> AbortableProcessGroup:
        """The group of `ranks` (this rank among them). Blocks until all of them build it.

        Its exchanges end in the order in which they begin if it has one of gloo's `threads`.
        """
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._connect
        options._threads = threads
        options._devices = [self._device]
        store = dist.PrefixStore(f"{name}/{'-'.join(map(str, ranks))}", self._store)
        index = list(ranks).index(self.rank)
        # torch's stubs do not know that a backend takes the calls of a process group.
        backend = cast(dist.ProcessGroup, dist.ProcessGroupGloo(store, index, len(ranks), options))
        backend._set_default_timeout(self._timeout)  # type: ignore[attr-defined]
        self.groups.append(AbortableProcessGroup(self, tuple(ranks), backend))
        return self.groups[-1]

    def uncounted(self) -> ProcessGroupFactory:
        """The same network for a thread beside training, whose waits are not training's."""
        other = copy.copy(self)
        other.waited = WaitClock()
        return other

    def wait(self, work: dist.Work, ranks: Sequence[int]) -> None:
        """Wait until `work` is done. Raises `PeerLostError` if it will never be."""
        start = time.perf_counter()
        with self.waited.blocked():
            while not _is_done(work, ranks):
                self.check_aborted(ranks, time.perf_counter() - start)

    def check_aborted(self, ranks: Sequence[int], waited_s: float) -> None:
        """Raises `PeerLostError` if the job recovers or one of `ranks` is silent."""
        reason = self._broken(ranks, waited_s)
        if reason is not None:
            raise PeerLostError(reason)


def _is_done(work: dist.Work, ranks: Sequence[int]) -> bool:
    """Wait a slice for `work`. Raises `PeerLostError` if it has failed."""
    try:
        work.wait(_SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have ended between the time-out and this line: ask again what became of it.
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLostError(f"lost a peer among {list(ranks)}") from error
    return True


class AbortableProcessGroup:
    """A set of ranks that communicate. All calls are collective; tensors must be contiguous."""

    def __init__(
        self, factory: ProcessGroupFactory, ranks: tuple[int, ...], backend: dist.ProcessGroup
    ) -> None:
        self.ranks = ranks
        self._factory = factory
        self._backend = backend
        self._under_way: list[dist.Work] = []

    def __len__(self) -> int:
        return len(self.ranks)

    def warm_up(self) -> None:
        """Connect now, in a thread beside training, not at the first use."""
        if len(self.ranks) > 1:
            work = self.start_all_reduce(torch.zeros(1))
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
            self.wait(self._begun(self._backend.allreduce([tensor], options)))
        return tensor

    def start_all_reduce(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to sum `tensor` in place; `wait` for the work before using it."""
        return self._begun(self._backend.allreduce([tensor]))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The equally shaped tensors of all ranks, in group order."""
        if len(self.ranks) == 1:
            return [tensor]
        parts = [torch.empty_like(tensor) for _ in self.ranks]
        self.wait(self._begun(self._backend.allgather([parts], [tensor])))
        return parts

    def start_broadcast(self, tensor: torch.Tensor, source: int) -> dist.Work:
        """Begin to copy `tensor` from rank `source` to all; `wait` for the work before use."""
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(source)
        options.rootTensor = 0
        return self._begun(self._backend.broadcast([tensor], options))

    def broadcast(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Copy `tensor` from rank `source` to all, in place."""
        if len(self.ranks) > 1:
            self.wait(self.start_broadcast(tensor, source))
        return tensor

    def all_to_all(
        self, received: torch.Tensor, sent: torch.Tensor, into: list[int], out: list[int]
    ) -> None:
        """Exchange flat buffers: `out[i]` elements go to rank i, `into[i]` come from it."""
        options = dist.AllToAllOptions()
        work = self._backend.alltoall_base(received, sent, into, out, options)
        self.wait(self._begun(work))

    def wait(self, work: dist.Work) -> None:
        """Wait until `work` is done. Raises `PeerLostError` if it will never be."""
        self._factory.wait(work, self.ranks)
        self._under_way = [other for other in self._under_way if other is not work]

    def check_aborted(self) -> None:
        """Between two parts of long work without a wait; raises `PeerLostError` like a wait."""
        self._factory.check_aborted(self.ranks, 0.0)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way, not even an exchange that was given up."""
        return all(work.is_completed() for work in self._under_way)

    def close(self) -> None:
        """Close the connections, whoever still refers to the group. No other call may follow.

        If it is not idle, this blocks until its exchange has timed out.
        """
        self._under_way = []
        del self._backend, self._factory

    def _begun(self, work: dist.Work) -> dist.Work:
        self._under_way = [other for other in self._under_way if not other.is_completed()]
        self._under_way.append(work)
        return work
