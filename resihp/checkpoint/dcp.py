"""DCP storage writer over the file writer of `LocalDisk`, and its own asynchronous stager.

    writer = LazyWriter("/ckpt/step-000000010")
    dcp.save(state, storage_writer=writer)                   # large direct writes, atomic
    dcp.async_save(state, storage_writer=writer)             # lazy copy; fence before
    writer.attach(optimizer)                                 # the optimizer's next step

DCP plans and coordinates; the files are the same as those of the levels. What a killed or failed
save has not published is deleted at the next save of the same name.
"""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
import re
import shutil
import threading
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import Future as PythonFuture
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Condition, Thread, current_thread
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from resihp.contracts import CheckpointError

from .format.checksum import ROW_BYTES
from .format.metadata import data_name
from .format.shard_file import ShardFile, ShardSpec, object_section
from .history import Lineage
from .levels.checkpoint_folder import (
    delete_retired,
    part_folder,
    publish_folder,
    step_of,
    write_index,
)
from .levels.local_disk import discard_file, write_file
from .ranks import IndependentRank
from .staging.host_cache import HostCache
from .staging.in_flight import NO_FENCE_EXPECTED, InFlightCheckpoint, ShardIdentity
from .staging.stager import Stager
from .state_dict import Path as StatePath
from .state_dict import step_to

StateDict: TypeAlias = dict[str, Any]

_READER = "dcp"
_RELEASE_TIMEOUT_S = 600.0
_POLL_S = 0.05


@dataclass(frozen=True)
class _Assignment:
    """Values that the coordinator gives to each rank."""

    run: str
    rank: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Run:
    """One save, as its coordinator names it; lives as long as the save may still be published."""

    name: str


_runs: weakref.WeakSet[_Run] = weakref.WeakSet()


class _CurrentSave(threading.local):
    """The save of the current thread: torch runs all of a save in one thread.

    The next save may begin in another thread while the coordinator publishes this one.
    """

    path: Path | None = None
    run: _Run | None = None


@dataclass(eq=False)
class _StagedSave:
    """A save by `dcp.async_save`, for which a checkpoint is copied.

    copied  the state on the host
    caller  thread that called `async_save`
    saver   thread of this save alone, in which torch plans and writes; None: not begun
    """

    checkpoint: InFlightCheckpoint
    copied: PythonFuture[StateDict]
    caller: Thread
    saver: Thread | None = None

    @property
    def has_ended(self) -> bool:
        """True if it calls `write_data` no more, which torch does not tell after a failure."""
        if self.saver is not None:
            return not self.saver.is_alive()
        return self.copied.done() and self.copied.exception() is not None


class LazyWriter(StorageWriter, AsyncStager):
    """A `StorageWriter` for `dcp.save`, and its own `AsyncStager` for `dcp.async_save`.

    path  folder to publish, relative to the current one when it is given; replaced by the
          `checkpoint_id` given to torch

    With `dcp.async_save` the state is copied in the background: call `fence`, or `attach` the
    optimizer, before it changes. A further save waits until the one before has been written or has
    failed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path).absolute()
        self._save = _CurrentSave()
        one_of_several = IndependentRank(0, (0, 1), "dcp")  # DCP assigns the writers itself
        self._stager = Stager(one_of_several)
        self._threads = ThreadPoolExecutor(1, "resihp-checkpoint-stage")
        self._staged: _StagedSave | None = None

    def attach(self, optimizer: torch.optim.Optimizer, *modules: nn.Module) -> None:
        """Call `fence` before each step of the optimizer; see `Checkpointer.attach`."""
        self._stager.know(optimizer, modules)
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def fence(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Wait until these tensors (None: all) are copied; call it right before they change."""
        if self._staged is not None:
            self._stager.fence(self._staged.checkpoint, tensors)

    def stage(self, state_dict: StateDict) -> PythonFuture[StateDict]:
        """Begin to copy, once the save before has ended; the future returns the state on the host.

        The host cache, an image of the state, is in use until then.
        """
        if self._staged is not None:
            _wait_for_release(self._staged)
        collected = self._stager.fit(state_dict)
        captured = self._stager.capture(0, Lineage(""), collected, {})
        checkpoint = self._stager.lend(captured, 0.0)
        assert checkpoint is not None, "the cache is free"
        checkpoint.taken[_READER] = 0
        try:
            on_host = _on_host(state_dict, _image_views(checkpoint), ())
        except BaseException:
            checkpoint.done_with(_READER)
            raise
        self._stager.start(checkpoint)
        copied = self._threads.submit(_once_copied, checkpoint, on_host)
        self._staged = _StagedSave(checkpoint, copied, current_thread())
        return copied

    def synchronize_staging(self) -> None:
        """Call `fence`, by torch's name."""
        self.fence()

    def close(self) -> None:
        """End the copying threads."""
        self._stager.close()
        self._threads.shutdown()

    @property
    def checkpoint_id(self) -> Path:
        """Folder of the current save."""
        return self._save.path or self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return True for paths, False for URLs."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id).absolute()
        self._save.path, self._save.run = self._path, None

    def storage_meta(self) -> None:
        """Note the thread of a staged save, in which torch calls this first."""
        staged = self._staged
        if staged is not None and staged.saver is None and current_thread() is not staged.caller:
            staged.saver = current_thread()

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all ranks a common name of the unpublished folder; delete those of former saves."""
        run, ranks = _Run(f"dcp-{uuid.uuid4().hex[:12]}"), tuple(range(len(plans)))
        self._save.run = run
        _runs.add(run)
        _sweep(self.checkpoint_id)
        return [
            replace(plan, storage_data=_Assignment(run.name, rank, ranks))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors into one file, large ones from their own memory."""
        try:
            return self._write(plan, planner)
        finally:
            staged = self._staged
            if staged is not None and staged.saver in (None, current_thread()):
                staged.checkpoint.done_with(_READER)
                self._stager.move_to_huge_pages()

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the folder, in place of one of the same name; on the coordinator."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for each in results for r in each}
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.checkpoint_id))
        assert self._save.run is not None, "planned in this thread"
        part = part_folder(self.checkpoint_id, self._save.run.name)
        publish_folder(part, self.checkpoint_id, pickle.dumps(metadata))
        delete_retired(self.checkpoint_id)

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assigned: _Assignment = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        paths: Mapping[str, StatePath] = getattr(planner, "mappings", {})
        sources = [_tensor(planner, item) for item in tensors]
        file = ShardFile(
            [_spec(item, paths, source) for item, source in zip(tensors, sources, strict=True)]
        )
        step = step_of(self.checkpoint_id.name) or 0
        checkpoint = InFlightCheckpoint(
            ShardIdentity(step, assigned.rank, Lineage(assigned.run), assigned.ranks),
            file,
            HostCache(),
            sources,
            lambda start: object_section(
                (_object(item, paths, planner) for item in objects), start
            ),
            Condition(),
            pace=NO_FENCE_EXPECTED,
        )
        part = part_folder(self.checkpoint_id, assigned.run)
        name = data_name(assigned.rank)
        try:
            part.mkdir(parents=True, exist_ok=True)
            write_file(checkpoint, part / name, _READER)
            index = checkpoint.index()
            write_index(part, index)
        except BaseException:
            discard_file(part, assigned.rank)
            raise
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                WriteResult(item.index, entry.length, _StorageInfo(name, entry.start, entry.length))
                for item, entry in zip((*tensors, *objects), index.entries, strict=True)
            ]
        )
        return written


def _sweep(final: Path) -> None:
    """Delete what saves of this name have left that were killed or have failed."""
    alive = {run.name for run in _runs}
    name = re.compile(re.escape(f".{final.name}.") + r"(dcp-[0-9a-f]{12})\.part")
    with contextlib.suppress(OSError):
        for path in list(final.parent.iterdir()):
            found = name.fullmatch(path.name)
            if found is not None and found[1] not in alive:
                shutil.rmtree(path, ignore_errors=True)


def _tensor(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor


def _spec(item: WriteItem, paths: Mapping[str, StatePath], source: Tensor) -> ShardSpec:
    data = item.tensor_data
    assert data is not None
    assert data.chunk is not None
    key, dtype, phase = item.index.fqn, data.properties.dtype, source.data_ptr() % ROW_BYTES
    box = (tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return ShardSpec(key, paths.get(key, (key,)), *box, dtype, phase)


def _object(
    item: WriteItem, paths: Mapping[str, StatePath], planner: SavePlanner
) -> tuple[str, StatePath, memoryview]:
    """Key, path and content of an object, which the planner has encoded."""
    content = planner.resolve_data(item)
    assert not isinstance(content, Tensor)
    key = item.index.fqn
    return key, paths.get(key, (key,)), content.getbuffer()


def _wait_for_release(staged: _StagedSave) -> None:
    """Wait until the host cache is free of a save, at most `_RELEASE_TIMEOUT_S`."""
    checkpoint, deadline_s = staged.checkpoint, time.monotonic() + _RELEASE_TIMEOUT_S
    with checkpoint.changed:
        while not checkpoint.changed.wait_for(lambda: checkpoint.is_idle, _POLL_S):
            if staged.has_ended:
                checkpoint.done_with(_READER)
            if time.monotonic() > deadline_s:
                raise CheckpointError("the save before has not ended")


def _once_copied(checkpoint: InFlightCheckpoint, copied: StateDict) -> StateDict:
    checkpoint.take(checkpoint.count - 1)
    return copied


def _on_host(value: Any, views: Mapping[StatePath, Tensor], path: tuple[Any, ...]) -> Any:
    """Rebuild a state with each tensor replaced by its view of the image."""
    if isinstance(value, dict):
        return {key: _on_host(inner, views, (*path, step_to(key))) for key, inner in value.items()}
    if isinstance(value, list):
        return [_on_host(one, views, (*path, i)) for i, one in enumerate(value)]
    if not isinstance(value, Tensor) or path not in views:
        return copy.deepcopy(value)
    host = views[path]
    if isinstance(value, DTensor):
        shape, stride = value.shape, value.stride()
        mesh, placements = value.device_mesh, value.placements
        return DTensor.from_local(
            host, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return host


def _image_views(checkpoint: InFlightCheckpoint) -> dict[StatePath, Tensor]:
    """Views of all tensors in an image of the file, which the checkpoint's copies fill."""
    image, file = checkpoint.claim_image(), checkpoint.file
    return {
        spec.path: image[entry.data : entry.data + spec.nbytes].view(spec.dtype).view(spec.sizes)
        for spec, entry in zip(file.specs, file.entries, strict=True)
    }
