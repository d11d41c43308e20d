"""For users of torch's distributed checkpoint: our writer and lazy stager in one object.

    writer = LazyWriter("/ckpt/step-000000010")
    dcp.save(state, storage_writer=writer)                   # large direct writes, atomic
    dcp.async_save(state, storage_writer=writer)             # and a lazy copy; fence before
    writer.attach(optimizer)                                 # the optimizer's next step

torch plans and coordinates; what we write is the same as on our own levels.
"""

from __future__ import annotations

import os
import pickle
import threading
import uuid
from collections.abc import Sequence
from concurrent.futures import Future as PythonFuture
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..format.index import FileIndex, IndexEntry
from ..format.metadata import data_name
from ..format.shard_file import ShardFile, ShardSpec
from ..history import Lineage
from ..levels.checkpoint_folder import publish_folder, step_of
from .stager import DcpStager, StateDict
from .stream import write_stream


@dataclass(frozen=True)
class _Assigned:
    """What the coordinator tells each rank."""

    run: str
    rank: int
    ranks: tuple[int, ...]


class _Save(threading.local):
    """The save under way in one thread, where torch runs all of it.

    The next one may begin in another thread while the coordinator publishes this one.
    """

    path: Path | None = None
    run = ""


class LazyWriter(StorageWriter, AsyncStager):
    """A `StorageWriter` for `dcp.save`, and its own `AsyncStager` for `dcp.async_save`.

    path  of the folder to be published; `checkpoint_id` given to torch replaces it

    With `dcp.async_save` the state is copied in the background: call `fence` (or `attach` the
    optimizer) before it changes. A further save waits until the one before has been written.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._path = Path(path)
        self._stager = DcpStager()
        self._save = _Save()

    def attach(self, optimizer: torch.optim.Optimizer, *modules: nn.Module) -> None:
        """Put a fence before each step of the optimizer; see `Checkpointer.attach`."""
        self._stager.know(optimizer, modules)
        optimizer.register_step_pre_hook(lambda *_: self.fence())

    def fence(self, tensors: Sequence[Tensor] | None = None) -> None:
        """Wait until these tensors (None: all) are copied; right before they change."""
        self._stager.fence(tensors)

    def stage(self, state_dict: StateDict) -> PythonFuture[StateDict]:
        """Begin to copy; the future gives the state on the host."""
        return self._stager.stage(state_dict)

    def synchronize_staging(self) -> None:
        """The fence, by torch's name."""
        self.fence()

    def close(self) -> None:
        """End the copying thread."""
        self._stager.close()

    @property
    def checkpoint_id(self) -> Path:
        """The folder."""
        return self._save.path or self._path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it can be a folder of this machine."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new checkpoint begins."""
        if checkpoint_id is not None:
            self._path = Path(checkpoint_id)
        self._save.path = self._path

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to prepare before the plan is known."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Left as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give all ranks a common name for what is not published yet."""
        run, ranks = uuid.uuid4().hex[:12], tuple(range(len(plans)))
        self._save.run = run
        return [replace(p, storage_data=_Assigned(run, i, ranks)) for i, p in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stream this rank's tensors into one file; nothing of it is held but a few chunks."""
        try:
            return self._write(plan, planner)
        finally:
            self._stager.release()

    def _write(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        assigned: _Assigned = plan.storage_data
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        paths = getattr(planner, "mappings", {})
        file = ShardFile([_place(item, paths) for item in tensors])
        entries, section = _section(objects, planner, paths, file.nbytes)
        step = step_of(self.checkpoint_id.name) or 0
        lineage = Lineage(assigned.run)
        index = FileIndex(step, assigned.rank, lineage, assigned.ranks, file.entries, file.nbytes)
        index = replace(index, objects=entries, file_bytes=file.nbytes + len(section))
        part = self._part(assigned.run)
        part.mkdir(parents=True, exist_ok=True)
        write_stream(part, index, file, lambda n: _resolve(planner, tensors[n]), section)
        written: Future[list[WriteResult]] = Future()
        written.set_result(
            [
                _result(item, entry, data_name(assigned.rank))
                for item, entry in zip((*tensors, *objects), index.entries, strict=True)
            ]
        )
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the folder, in place of any of its name; the coordinator alone."""
        metadata.version = CURRENT_DCP_VERSION
        metadata.storage_data = {r.index: r.storage_data for each in results for r in each}
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.checkpoint_id))
        publish_folder(self._part(self._save.run), self.checkpoint_id, pickle.dumps(metadata))

    def _part(self, run: str) -> Path:
        return self.checkpoint_id.with_name(f".{self.checkpoint_id.name}.{run}.part")


def _place(item: WriteItem, paths: dict[str, tuple[str | int, ...]]) -> ShardSpec:
    data = item.tensor_data
    assert data is not None
    assert data.chunk is not None
    path = paths.get(item.index.fqn, (item.index.fqn,))
    box = (tuple(data.size), tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    return ShardSpec(item.index.fqn, path, *box, data.properties.dtype)


def _section(
    items: Sequence[WriteItem],
    planner: SavePlanner,
    paths: dict[str, tuple[str | int, ...]],
    start: int,
) -> tuple[tuple[IndexEntry, ...], bytes]:
    """torch has encoded each value already."""
    contents = [planner.resolve_data(item) for item in items]
    entries, section = [], bytearray()
    for item, content in zip(items, contents, strict=True):
        assert not isinstance(content, Tensor)
        key = item.index.fqn
        encoded = content.getbuffer()
        at = start + len(section)
        entries.append(IndexEntry(key, paths.get(key, (key,)), at, len(encoded)))
        section += encoded
    section += bytes(-len(section) % 4096)
    return tuple(entries), bytes(section)


def _resolve(planner: SavePlanner, item: WriteItem) -> Tensor:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, Tensor)
    return tensor


def _result(item: WriteItem, entry: IndexEntry, file: str) -> WriteResult:
    where = _StorageInfo(file, entry.start, entry.length)
    return WriteResult(index=item.index, size_in_bytes=entry.length, storage_data=where)
