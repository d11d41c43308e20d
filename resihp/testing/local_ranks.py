"""Ranks of a job as processes of this machine, for tests, benchmarks and the demo.

A fork server that has imported torch starts a rank in tens of milliseconds. The launching process
hosts the store and is no rank, so no rank's loss ends the store.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ..elastic.rendezvous.store import announce_death, host_store

RankMain = Callable[..., None]
# The first update of any optimizer imports torch._dynamo, which takes more than a second.
_PRELOAD = ["torch", "torch.distributed", "torch._dynamo", "resihp.elastic.trainer"]


class LocalRanks:
    """Processes of a job on this machine; a context manager that kills them at its end.

    `target(rank, host, port, *arguments)` runs in each process. Its output goes to
    `folder/rank-N.log`. The processes end with the one that started them, however that ends.
    """

    def __init__(self, job: str, folder: Path) -> None:
        self.job, self.folder = job, folder
        self.exit_codes: dict[int, int] = {}
        self._processes: dict[int, ForkServerProcess] = {}
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(_PRELOAD)
        self._server: dist.TCPStore | None = host_store("127.0.0.1", 0, timedelta(seconds=30))
        self._store: dist.Store | None = dist.PrefixStore(job, self._server)

    def __enter__(self) -> LocalRanks:
        self.folder.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes.values():
            if process.is_alive():
                process.kill()
        for process in self._processes.values():
            process.join(timeout=10)

    @property
    def address(self) -> tuple[str, int]:
        """(host, port) of the store."""
        assert self._server is not None
        return "127.0.0.1", self._server.port

    def close_store(self) -> None:
        """Close the store, as if its process had died."""
        self._store = self._server = None

    def start(self, ranks: Collection[int], target: RankMain, *arguments: Any) -> None:
        """Start these ranks; a rank that has ended may be started again, as a joiner."""
        for rank in ranks:
            self.exit_codes.pop(rank, None)
            process = self._context.Process(
                target=_main,
                args=(str(self.log(rank)), target, rank, *self.address, *arguments),
                name=f"{self.job}-rank-{rank}",
                daemon=True,
            )
            process.start()
            self._processes[rank] = process

    def log(self, rank: int) -> Path:
        """File of a rank's output."""
        return self.folder / f"rank-{rank}.log"

    def logs(self) -> str:
        """Output of all ranks, with their exit codes."""
        parts = []
        for rank in sorted(self._processes):
            text = self.log(rank).read_text() if self.log(rank).exists() else ""
            parts.append(f"--- rank {rank} (exit {self.exit_codes.get(rank)}) ---\n{text}")
        return "\n".join(parts)

    def kill(self, rank: int, with_signal: int = signal.SIGKILL) -> None:
        """Send a signal to a rank."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, with_signal)

    def poll(self, timeout_s: float) -> Sequence[int]:
        """Wait until a rank ends, at most `timeout_s`; announce deaths; return the ranks alive."""
        alive = {
            p.sentinel: rank for rank, p in self._processes.items() if rank not in self.exit_codes
        }
        for sentinel in wait_for_any(list(alive), timeout=timeout_s):
            rank = alive.pop(sentinel)  # type: ignore[arg-type]
            process = self._processes[rank]
            process.join()
            assert process.exitcode is not None
            self.exit_codes[rank] = process.exitcode
            if process.exitcode != 0 and self._store is not None:
                announce_death(self._store, rank)
        return sorted(alive.values())

    def wait(self, timeout_s: float) -> dict[int, int]:
        """Wait for the exit codes of all ranks. Raises `TimeoutError` with the logs."""
        deadline = time.monotonic() + timeout_s
        while self.poll(min(0.2, timeout_s)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"ranks did not end in {timeout_s} s\n{self.logs()}")
        return self.exit_codes


def _main(log: str, target: RankMain, rank: int, host: str, port: int, *arguments: Any) -> None:
    """Entry point of a rank's process."""
    gc.freeze()  # it need not look through what was imported before the fork, nor copy its pages
    threading.Thread(target=_end_with_launcher, name="launcher", daemon=True).start()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, sys.stdout.fileno())
    os.dup2(descriptor, sys.stderr.fileno())
    os.environ["RANK"] = str(rank)
    target(rank, host, port, *arguments)


def _end_with_launcher() -> None:
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    launcher.join()
    os._exit(1)
