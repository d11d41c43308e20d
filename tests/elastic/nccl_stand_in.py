"""Stand-ins for `torch.distributed.ProcessGroupNCCL` and `ProcessGroupNCCL2`.

They refuse what NCCL or torch does not survive.

They exchange CPU tensors by gloo and behave towards their caller as NCCL does: nothing blocks the
host, a work ends late, an abort frees this rank alone and tells its peers nothing. Each of these is
a mistake, which `mistakes` names:

- `wait` (it aborts the communicator alone if the work has failed), `exception` (torch 2.11 cannot
  hand it over), or `synchronize` for a work that has not ended (the stream of the caller would wait
  for a peer that may be lost);
- an abort while a kernel of one of its `siblings` waits for a peer and is not aborted at the same
  time, or a second one;
- `shutdown`, or a connected communicator that is freed without abort: both wait for all peers;
- a blocking connection; torch's watchdog, which ends the process, or its sleep of a minute;
- of `ProcessGroupNCCL2`: a communicator that cannot be reconfigured, handles that are not those of
  its members in their order, a number that was used before.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

MOST = timedelta(seconds=5)
"""For which an aborted exchange may keep its thread, as none of NCCL's would."""


class StandInWork:
    """A work, as its communicator's caller sees it."""

    def __init__(self, communicator: StandInNccl, future: Future[Any]) -> None:
        self._communicator, self.future = communicator, future

    def is_completed(self) -> bool:
        return self._communicator.is_aborted or self.future.done()

    def query(self) -> bool:
        """Whether the device has ended it: a lost peer leaves the kernel waiting for an abort."""
        has_failed = self.future.done() and self.future.exception() is not None
        return self._communicator.is_aborted or (self.future.done() and not has_failed)

    def exception(self) -> None:
        self._communicator.refuse("exception")

    def synchronize(self) -> None:
        if not self.query():
            self._communicator.refuse("a stream that waits for a work that has not ended")

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Of a reconfiguration, which is no collective."""
        if self in self._communicator.works:
            self._communicator.refuse("wait")
        return True


class StandInNccl:
    """One rank's end of a communicator."""

    mistakes: list[str] = []  # noqa: RUF012 - of all communicators of the process

    class Options:
        def __init__(self) -> None:
            self._timeout = timedelta(minutes=30)
            self.config = SimpleNamespace(blocking=1)

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any) -> None:
        self.is_aborted = self.is_connected = False
        self._member = (store, rank, size)
        self._timeout = min(options._timeout, MOST)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="stand-in")
        self.works: list[StandInWork] = []
        self.siblings: Callable[[], Iterable[StandInNccl]] = lambda: ()
        self.check_options(options)

    def check_options(self, options: Any) -> None:
        if options.config.blocking:
            self.refuse("a blocking connection")
        for name in ("ASYNC_ERROR_HANDLING", "WAIT_TIMEOUT_DUMP_MILSEC"):
            if os.environ.get(f"TORCH_NCCL_{name}") != "0":
                self.refuse("torch's watchdog")

    def __del__(self) -> None:
        if self.is_connected and not self.is_aborted:
            self.refuse("freed without abort", silently=True)
        self._thread.shutdown(wait=False)

    def refuse(self, mistake: str, *, silently: bool = False) -> None:
        self.mistakes.append(mistake)
        assert silently, mistake

    def rank(self) -> int:
        return self._member[1]

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.is_connected = True
        store, rank, size = self._member
        self._gloo = self._thread.submit(
            lambda: dist.ProcessGroupGloo(store, rank, size, self._timeout)
        )

    def allreduce(self, *arguments: Any) -> StandInWork:
        return self._start(lambda gloo: gloo.allreduce(*arguments))

    def allgather(self, *arguments: Any) -> StandInWork:
        return self._start(lambda gloo: gloo.allgather(*arguments))

    def broadcast(self, *arguments: Any) -> StandInWork:
        return self._start(lambda gloo: gloo.broadcast(*arguments))

    def alltoall_base(self, *arguments: Any) -> StandInWork:
        return self._start(lambda gloo: gloo.alltoall_base(*arguments))

    def _start(self, collective: Callable[[Any], dist.Work]) -> StandInWork:
        if self.is_aborted:
            raise dist.DistBackendError("NCCL communicator was aborted")
        gloo = self._gloo
        future = self._thread.submit(lambda: collective(gloo.result()).wait())
        self.works.append(StandInWork(self, future))
        return self.works[-1]

    @property
    def is_busy(self) -> bool:
        return any(not work.query() for work in self.works)

    def abort(self) -> None:
        if self.is_aborted:
            self.refuse("a second abort")
        was_busy, self.is_aborted = self.is_busy, True
        end = time.monotonic() + MOST.total_seconds()
        while was_busy and any(other.is_busy for other in self.siblings()):
            if time.monotonic() > end:
                self.refuse("an abort that waits for the kernel of another communicator")
            time.sleep(1e-3)

    def shutdown(self) -> None:
        self.refuse("shutdown")


class StandInNccl2(StandInNccl):
    """One rank's end of a communicator of the reconfigure API; its abort is repeatable."""

    def check_options(self, options: Any) -> None:
        self._number = -1
        if not getattr(options, "enable_reconfigure", False):
            self.refuse("no reconfigure")

    def get_reconfigure_handle(self) -> str:
        return f"nccl2:{self.rank()}:{self._number}:"

    def reconfigure(self, options: Any) -> StandInWork:
        store, rank, size = self._member
        ranks = [int(handle.split(":")[1]) for handle in options.handles]
        if ranks != list(range(size)) or options.handles[rank] != self.get_reconfigure_handle():
            self.refuse("handles in another order")
        if rank == 0 and store.add(f"used/{options.uuid}", 1) > 1:
            self.refuse("a number that was used before")
        self._number, self.is_connected = options.uuid, True
        store = dist.PrefixStore(f"reconfigure/{options.uuid}", store)
        self._gloo = Future()
        self._gloo.set_result(dist.ProcessGroupGloo(store, rank, size, options.timeout))
        return StandInWork(self, self._gloo)

    def abort(self) -> None:
        self.is_aborted = True


def get_reconfigure_handle(group: StandInNccl2) -> str:
    """`dist._get_reconfigure_handle`, for a torch that has none."""
    return group.get_reconfigure_handle()


def reconfigure(
    uuid: int, handles: list[str], group: StandInNccl2, timeout: timedelta
) -> StandInWork:
    """`dist._reconfigure`, for a torch that has none."""
    return group.reconfigure(SimpleNamespace(uuid=uuid, handles=handles, timeout=timeout))
