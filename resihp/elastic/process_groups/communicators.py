"""Contract of the makers of communicators; `selection` chooses one."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import cycle
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from resihp._devices import side_stream, use_device
from resihp.contracts import PeerLostError

CPU = torch.device("cpu")
SLICE = timedelta(milliseconds=50)
ABORTED = "the generation is aborted"
_SPIN_S, _POLL_S = 200e-6, 50e-6
_turns = cycle(range(4))
"""Of generations: the one in use, the next one, and those that are being closed."""


def check_nothing() -> None:
    """Continue; the default of `Communicators.connect`."""


@dataclass(frozen=True)
class Member:
    """Place of this rank in a communicator that is being connected.

    path         of the communicator in the job's store
    store        the job's store below `path`
    index, size  this rank is member `index` of `size`
    """

    path: str
    store: dist.Store
    index: int
    size: int


class Communicators(ABC):
    """All communicators of one rank in one generation.

    1. Every member calls `connect` with the same path, once, beside other communicators that are in
       use and usually in a background thread. It returns when all members have called it. It raises
       `RuntimeError` (of which `dist.DistError` is one) if one has not within the time-out or has
       died, and `PeerLostError` after an abort; what was made of the communicator is closed then.
    2. Members start collectives in the same order. Each returns a `dist.Work`, whose tensors are in
       use until `is_done` has returned True or has raised. After an abort or the loss of a peer
       starting may raise `dist.DistBackendError` instead.
    3. `is_done` waits for a work, one slice at most. Whoever waits checks between two slices for a
       reason to stop. It raises `RuntimeError` if the work has failed, as it does when a peer dies
       or aborts.
    4. `abort` is called from any thread at any time: during a collective, during `connect`, twice.
       It aborts all communicators together and is local: peers learn nothing, so every rank calls
       it. From then on no one waits for a work; a work ends by itself, at the latest with its
       time-out. Communicators of other generations are not affected.
    5. `close` is called once for each communicator when no work is in progress. It waits for no
       peer, alive or dead, and frees connections and threads as soon as nobody refers to the
       communicator.
    6. `open_handles` counts communicators that are connected, or being connected, and not closed.

    store     connection to the store on which no other thread waits: `connect` may block it
    device    of the tensors
    host      address under which peers reach this rank
    timeout   of one collective
    connect   time-out of `connect`
    """

    name: ClassVar[str]

    def __init__(
        self,
        store: dist.Store,
        device: torch.device = CPU,
        *,
        host: str = "127.0.0.1",
        timeout: timedelta,
        connect: timedelta,
    ) -> None:
        self.device, self.is_aborted = device, False
        self._store, self._host = store, host
        self._timeout, self._connect_timeout = timeout, connect
        self._open: list[dist.ProcessGroup] = []
        self._lock = threading.Lock()

    @classmethod
    @abstractmethod
    def refusal(cls, device: torch.device) -> str | None:
        """Reason for which this torch cannot exchange tensors of `device` in this way, or None."""

    @property
    def open_handles(self) -> int:
        """Number of communicators that are not closed."""
        return len(self._open)

    def connect(
        self,
        path: str,
        index: int,
        size: int,
        *,
        threads: int = 1,
        check: Callable[[], None] = check_nothing,
    ) -> dist.ProcessGroup:
        """Connect member `index` of `size`; `path` is used by no other communicator of the job.

        threads  that run collectives, where the maker has a choice; with one they end in order
        check    called while this rank waits for others, where waiting can be interrupted; raises
                 to stop it
        """
        member = Member(path, dist.PrefixStore(path, self._store), index, size)
        self._check_aborted()
        communicator = self._create(member, threads)
        with self._lock:
            self._open.append(communicator)
        try:
            self._check_aborted()
            self._join(communicator, member, check)
        except BaseException:
            self.close(communicator)
            raise
        return communicator

    @abstractmethod
    def is_done(self, work: dist.Work) -> bool:
        """Wait one slice; True once `work` has ended. Raises `RuntimeError` if it has failed."""

    def abort(self) -> None:
        """Abort all communicators; returns when they are aborted. None can be connected any more.

        The flag comes first: a `connect` in another thread then sees it, or its communicator is
        seen here.
        """
        with self._lock:
            is_first, self.is_aborted = not self.is_aborted, True
            if is_first and self._open:
                self._abort(self._open)

    def close(self, communicator: dist.ProcessGroup) -> None:
        """Close a communicator; the caller then drops its reference."""
        with self._lock:
            self._open = [other for other in self._open if other is not communicator]
            if not self.is_aborted:
                self._close(communicator)

    @abstractmethod
    def _create(self, member: Member, threads: int) -> dist.ProcessGroup: ...

    def _check_aborted(self) -> None:
        if self.is_aborted:
            raise PeerLostError(ABORTED)

    def _poll_slice(self, work: dist.Work) -> bool:
        """`is_done` where nothing of `work` blocks the host.

        torch calls a work completed that has failed, too, and does not tell it apart
        (`Work.exception` raises `TypeError` in torch 2.11); `Work.wait` would abort its
        communicator alone. A failed one does not end on the device before an abort.
        """
        end = time.monotonic() + SLICE.total_seconds()
        if not _comes(work.is_completed, end):
            return False
        if not _comes(self._event_behind(work).query, end):
            return False
        if self.is_aborted:
            raise RuntimeError(ABORTED)
        work.synchronize()  # orders the caller's stream behind the work's
        return True

    def _event_behind(self, work: dist.Work) -> Any:
        """Event of the device that comes once `work` has ended there."""
        with torch.cuda.stream(self._ends):
            work.synchronize()
            return self._ends.record_event()

    @cached_property
    def _ends(self) -> Any:
        """Stream on which the host polls; a failed work holds it until its generation is aborted.

        Therefore generations that exist beside each other have different ones.
        """
        return side_stream(self.device, f"ends {next(_turns)}")

    # What follows is all that `_create` leaves to do; for gloo that is nothing.

    def _join(  # noqa: B027
        self, communicator: dist.ProcessGroup, member: Member, check: Callable[[], None]
    ) -> None:
        """Connect a communicator that `_create` has made; can be aborted from now on."""

    def _abort(self, communicators: Sequence[dist.ProcessGroup]) -> None:  # noqa: B027
        """Abort open communicators; without effect where the backend cannot."""

    def _close(self, communicator: dist.ProcessGroup) -> None:  # noqa: B027
        """Prepare a communicator that was not aborted for its destructor."""


def at_once(aborts: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Call all of `aborts`, each in a thread of `device`; return when the last one has.

    On a device an abort frees memory, which waits for the kernels of communicators that are not
    aborted yet. Raises what the first of them raised.
    """
    if len(aborts) < 2:
        for abort in aborts:
            abort()
        return
    with ThreadPoolExecutor(len(aborts), "resihp-abort", use_device, (device,)) as threads:
        ended = [threads.submit(abort) for abort in aborts]
    for one in ended:
        one.result()


def _comes(has_come: Callable[[], bool], end: float) -> bool:
    """Poll until `end` of the monotonic clock at most.

    At first without sleep: the shortest one lasts longer than a small collective.
    """
    start = time.monotonic()
    while not has_come():
        now = time.monotonic()
        if now > end:
            return False
        time.sleep(0.0 if now < start + _SPIN_S else _POLL_S)
    return True


def wait_slice(work: dist.Work) -> bool:
    """`Communicators.is_done` where `work.wait` blocks the host and may be called again."""
    try:
        work.wait(SLICE)
    except RuntimeError:
        if not work.is_completed():
            return False
        # It may have ended between the timeout and this line: ask for its outcome again.
        work.wait()
    return True
