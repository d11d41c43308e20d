"""Modes of checkpointing a training loop, each used as documented by its library."""

from __future__ import annotations

import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks._checkpoint_disk import write_s
from resihp.checkpoint import Checkpointer, LazyWriter, LocalDisk
from resihp.checkpoint.staging.host_buffer import HostBuffer

State = dict[str, Any]


class Mode(Protocol):
    """`save` right after the optimizer's step, `fence` right before the next one."""

    durable_s: list[float]

    def save(self, step: int, state: State) -> None:
        """Begin, or make, a checkpoint."""

    def fence(self) -> None:
        """Wait until the state may change."""

    def settle(self) -> None:
        """Wait until no checkpoint is in flight."""

    def close(self) -> int:
        """Finish all checkpoints; return the number of skipped ones."""


class Nothing:
    """No checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.durable_s: list[float] = []

    def save(self, step: int, state: State) -> None:
        """Do nothing."""

    def fence(self) -> None:
        """Return at once."""

    def settle(self) -> None:
        """Return at once."""

    def close(self) -> int:
        """Return 0."""
        return 0


class ResiHP(Nothing):
    """One local disk, one buffer."""

    def __init__(self, folder: Path, niceness: int = 0) -> None:
        super().__init__(folder)
        self._saver = Checkpointer([LocalDisk(folder, keep=1)], niceness=niceness)
        self._counters = self._saver.counters.levels[str(folder)]

    def save(self, step: int, state: State) -> None:
        """Begin a lazy checkpoint."""
        self._note()
        self._saver.save(step, state)

    def fence(self) -> None:
        """Wait for copies alone."""
        self._saver.fence()

    def settle(self) -> None:
        """Wait until it is on disk."""
        assert self._saver.wait()

    def close(self) -> int:
        """Finish all checkpoints."""
        self._saver.close()
        self._note()
        counters = self._saver.counters
        assert not counters.failures, counters.failures
        return counters.no_buffer + self._counters.skipped + self._counters.failed

    def _note(self) -> None:
        durable_s = self._counters.durable_s
        if durable_s is not None and durable_s not in self.durable_s[-1:]:
            self.durable_s.append(durable_s)


class WritesAlone(Nothing):
    """No checkpoint: the same number of bytes is written to the disk during the loop.

    The slow-down is that of the disk's use of memory and processor. The fence waits for the writes,
    as those of a real state would be worthless after a change.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._thread = ThreadPoolExecutor(1)
        self._writing: Future[float] | None = None
        self._buffer: HostBuffer | None = None

    def save(self, step: int, state: State) -> None:
        """Begin to write."""
        if self._buffer is None:
            nbytes = sum(tensor.nbytes for tensor in tensors_of(state))
            self._buffer = HostBuffer(nbytes // 4096 * 4096)
        self._writing = self._thread.submit(write_s, self.folder / "alone", self._buffer)

    def fence(self) -> None:
        """Wait for the writes."""
        if self._writing is not None:
            self.durable_s.append(self._writing.result())
            self._writing = None

    def settle(self) -> None:
        """Wait for the writes."""
        self.fence()

    def close(self) -> int:
        """Finish all checkpoints."""
        self.fence()
        self._thread.shutdown()
        return 0


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_of(inner)


class TorchSave(Nothing):
    """`torch.save` with fsync."""

    def save(self, step: int, state: State) -> None:
        """Save and block until durable."""
        begun = time.perf_counter()
        with open(self.folder / f"{step % 2}.pt", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        self.durable_s.append(time.perf_counter() - begun)


class PageCacheSave(Nothing):
    """`torch.save` as in most loops: not durable when it returns."""

    def save(self, step: int, state: State) -> None:
        """Save into the page cache."""
        torch.save(state, self.folder / f"{step % 2}.pt")


class DcpSave(Nothing):
    """`dcp.save`."""

    def save(self, step: int, state: State) -> None:
        """Save and block until durable."""
        begun = time.perf_counter()
        dcp.save(state, checkpoint_id=self.folder / str(step % 2))
        self.durable_s.append(time.perf_counter() - begun)


class DcpAsync(Nothing):
    """`dcp.async_save`, which waits for the save before."""

    def __init__(self, folder: Path, kind: AsyncCheckpointerType, stager: bool = False) -> None:
        super().__init__(folder)
        self._options: dict[str, Any] = {"async_checkpointer_type": kind}
        if stager:
            chosen = StagingOptions(
                use_pinned_memory=False, use_shared_memory=False, use_non_blocking_copy=False
            )
            self._options["async_stager"] = DefaultStager(chosen)
        self._upload: Any = None
        self._stager: Any = None

    def save(self, step: int, state: State) -> None:
        """Wait for the save before, then begin."""
        if self._upload is not None:
            self._upload.result()
        begun = time.perf_counter()
        response = dcp.async_save(state, checkpoint_id=self.folder / str(step % 2), **self._options)
        self._stager = getattr(response, "staging_completion", None)
        self._upload = getattr(response, "upload_completion", response)
        self._upload.add_done_callback(lambda _: self.durable_s.append(time.perf_counter() - begun))

    def fence(self) -> None:
        """Wait for the stager."""
        if self._stager is not None:
            self._stager.result()
            self._stager = None

    def settle(self) -> None:
        """Wait for the save in flight."""
        if self._upload is not None:
            self._upload.result()

    def close(self) -> int:
        """Finish all checkpoints."""
        self.settle()
        return 0


class DcpOurs(DcpAsync):
    """`dcp.async_save` with `LazyWriter`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, AsyncCheckpointerType.THREAD)
        self._writer = LazyWriter(folder)
        self._options = {"storage_writer": self._writer}

    def fence(self) -> None:
        """Wait for copies alone."""
        self._writer.fence()


MODES: dict[str, Callable[[Path], Mode]] = {
    "none": Nothing,
    "ResiHP": ResiHP,
    "writes alone": WritesAlone,
    "torch.save": PageCacheSave,
    "torch.save + fsync": TorchSave,
    "dcp.save": DcpSave,
    "dcp.async_save, thread": lambda f: DcpAsync(f, AsyncCheckpointerType.THREAD),
    "dcp.async_save, process": lambda f: DcpAsync(f, AsyncCheckpointerType.PROCESS),
    "dcp.async_save, async stager": lambda f: DcpAsync(f, AsyncCheckpointerType.THREAD, True),
    "dcp.async_save, LazyWriter": DcpOurs,
}


def open_mode(name: str, folder: Path) -> Mode:
    """Create a new folder and the mode that writes to it."""
    warnings.filterwarnings("ignore")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return MODES[name](folder)
