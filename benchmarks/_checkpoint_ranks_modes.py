"""Modes of checkpointing for several ranks: ResiHP, torch's DCP, and peers where they install."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from resihp.checkpoint import Checkpointer, LocalDisk, Ranks

State = Any
"""What `Checkpointer.save` takes."""


class RanksMode(Protocol):
    """`save` after each optimizer step, `fence` before the next one."""

    durable_s: list[float]

    def save(self, step: int, state: State, local: Mapping[str, Tensor]) -> bool:
        """Begin a checkpoint of the state, or of this rank's own tensors; False: not now."""

    def fence(self) -> None:
        """Wait until the state may change."""

    def settle(self) -> None:
        """Wait until no checkpoint is in flight."""


class NoCheckpoint:
    """No checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.durable_s = folder, list[float]()

    def save(self, step: int, state: State, local: Mapping[str, Tensor]) -> bool:
        """Do nothing."""
        return False

    def fence(self) -> None:
        """Return at once."""

    def settle(self) -> None:
        """Return at once."""


class ResiHPRanks(NoCheckpoint):
    """One disk for all ranks; a host cache of a share of the state, or of all of it."""

    def __init__(self, folder: Path, ranks: Ranks, host_cache_bytes: int | None) -> None:
        super().__init__(folder)
        disk = LocalDisk(folder, keep=1)
        self.saver = Checkpointer([disk], ranks=ranks, host_cache_bytes=host_cache_bytes)
        self._counters = self.saver.counters.levels[disk.name]

    def save(self, step: int, state: State, local: Mapping[str, Tensor]) -> bool:
        """Begin a lazy checkpoint."""
        return self.saver.save(step, state)

    def fence(self) -> None:
        """Wait for copies, and for room."""
        self.saver.fence()

    def settle(self) -> None:
        """Wait until it is on disk."""
        assert self.saver.wait()
        assert not self.saver.counters.failures, self.saver.counters.failures
        if self._counters.durable_s is not None:
            self.durable_s.append(self._counters.durable_s)


class AsyncDcp(NoCheckpoint):
    """`dcp.async_save`, in a process group of its own; waits for the save before."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._group = dist.new_group(backend="gloo")
        self._upload: Any = None

    def save(self, step: int, state: State, local: Mapping[str, Tensor]) -> bool:
        """Wait for the save before, then begin."""
        self.settle()
        begun = time.perf_counter()
        named: dict[str, Any] = state if isinstance(state, dict) else dict(local)
        response: Any = dcp.async_save(
            named, checkpoint_id=self.folder / str(step % 2), process_group=self._group
        )
        self._upload = getattr(response, "upload_completion", response)
        self._upload.add_done_callback(lambda _: self.durable_s.append(time.perf_counter() - begun))
        return True

    def settle(self) -> None:
        """Wait for the save in flight."""
        if self._upload is not None:
            self._upload.result()
            self._upload = None


class TorchSnapshotAsync(NoCheckpoint):
    """`Snapshot.async_take` of this rank's own tensors: it knows no `DTensor`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._library: Any = import_module("torchsnapshot")
        self._pending: Any = None
        self._begun_s = 0.0

    def save(self, step: int, state: State, local: Mapping[str, Tensor]) -> bool:
        """Wait for the snapshot before, then begin."""
        self.settle()
        self._begun_s = time.perf_counter()
        app: dict[str, Any] = {"state": self._library.StateDict(**local)}
        self._pending = self._library.Snapshot.async_take(str(self.folder / str(step % 2)), app)
        return True

    def settle(self) -> None:
        """Wait for the snapshot in flight."""
        if self._pending is not None:
            self._pending.wait()
            self.durable_s.append(time.perf_counter() - self._begun_s)
            self._pending = None


class DeepSpeedEngine(NoCheckpoint):
    """DeepSpeed's checkpoint engine for torch: a file for each rank, while training waits."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        logging.disable(logging.WARNING)
        package = "deepspeed.runtime.checkpoint_engine"
        module: Any = import_module(f"{package}.torch_checkpoint_engine")
        self._engine: Any = module.TorchCheckpointEngine()

    def save(self, step: int, state: State, local: Mapping[str, Tensor]) -> bool:
        """Save and return; not durable then."""
        self._engine.save(dict(local), str(self.folder / f"{dist.get_rank()}.{step % 2}.pt"))
        return True


class CheckFreqRule(NoCheckpoint):
    """CheckFreq (FAST '21): a snapshot beside the next forward and backward, written behind it.

    It begins one only as often as the last measured cost stays below `share` of training, and
    never before the one before is on disk. Written anew here from the paper, for state in host
    memory; all ranks use the interval of the slowest.
    """

    def __init__(self, folder: Path, share: float = 0.035) -> None:
        super().__init__(folder)
        self._share, self._threads = share, ThreadPoolExecutor(1)
        self._copy: dict[str, Tensor] = {}
        self._snapshot: Future[None] | None = None
        self._written: Future[None] | None = None
        self._next, self._steps, self._cost_s, self._begun_s = 0, 0, 0.0, 0.0
        self._since_s: float | None = None

    def save(self, step: int, state: State, local: Mapping[str, Tensor]) -> bool:
        """Begin a snapshot if the interval has passed."""
        self._steps += 1
        if self._steps <= self._next:
            return False
        self.settle()
        self._begun_s = time.perf_counter()
        self._snapshot = self._threads.submit(self._take, dict(local))
        return True

    def fence(self) -> None:
        """Wait for the snapshot, set the interval, and begin to write."""
        if self._snapshot is None:
            return
        begun = time.perf_counter()
        self._snapshot.result()
        now = time.perf_counter()
        self._cost_s, step_s, self._snapshot = now - begun, now - self._begun_s, None
        every = math.ceil(self._cost_s / (self._share * step_s))
        told = torch.tensor([every])
        dist.all_reduce(told, dist.ReduceOp.MAX)
        self._next = self._steps + max(1, int(told.item())) - 1
        self._written = self._threads.submit(self._write)

    def settle(self) -> None:
        """Wait for the file."""
        self.fence()
        if self._written is not None:
            self._written.result()
            self._written = None

    def _take(self, local: Mapping[str, Tensor]) -> None:
        for name, tensor in local.items():
            if name not in self._copy:
                self._copy[name] = torch.empty_like(tensor)
            self._copy[name].copy_(tensor)

    def _write(self) -> None:
        with open(self.folder / f"{dist.get_rank()}.pt", "wb") as file:
            torch.save(self._copy, file)
            file.flush()
            os.fsync(file.fileno())
        self.durable_s.append(time.perf_counter() - self._begun_s)


PEERS = {"TorchSnapshot, async_take": "torchsnapshot", "DeepSpeed's engine": "deepspeed"}
"""Modes that need a package, with its name."""


def ranks_modes(
    ranks: Callable[[], Ranks], local_bytes: int
) -> dict[str, Callable[[Path], RanksMode]]:
    """Return all modes by name; `ranks` makes those of the job."""
    quarter = max(32 << 20, local_bytes // 4)
    return {
        "ResiHP": lambda f: ResiHPRanks(f, ranks(), None),
        "ResiHP, cache of a quarter": lambda f: ResiHPRanks(f, ranks(), quarter),
        "dcp.async_save, thread": AsyncDcp,
        "CheckFreq's rule, 3.5%": CheckFreqRule,
        **dict(zip(PEERS, (TorchSnapshotAsync, DeepSpeedEngine), strict=True)),
    }


def fresh_folder(folder: Path) -> None:
    """Empty a folder, once for all ranks; a collective call."""
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()


def gathered(value: object) -> Sequence[Any]:
    """Return the value of every rank; a collective call."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, json.loads(json.dumps(value)))
    return values
