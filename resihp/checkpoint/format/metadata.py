"""torch's `.metadata` file, built from the indexes of all ranks.

It pickles classes of torch alone, so that `torch.distributed.checkpoint` reads it without resihp.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from urllib.parse import quote, unquote

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from resihp.contracts import CheckpointError

from .index import FileIndex, IndexEntry

METADATA = ".metadata"
"""File whose presence marks a checkpoint as complete."""

LINEAGE = "lineage.json"
"""File with the lineage of the checkpoint, which spares reading an index."""

_NAME = re.compile(r"__\d+(?:_\d+)?(?:\.(.+))?\.(?:distcp|index\.json)")


def data_name(rank: int, run: str = "") -> str:
    """Name of a rank's file; with the run where files of several runs share a folder."""
    return f"__{rank}_0{_infix(run)}.distcp"


def index_name(rank: int, run: str = "") -> str:
    """Name of the index of a rank's file; with the run as in `data_name`."""
    return f"__{rank}{_infix(run)}.index.json"


def run_of(name: str) -> str | None:
    """Run in the name of a file or an index; "" if it has none, None for other names."""
    found = _NAME.fullmatch(name)
    return found and unquote(found[1] or "")


def _infix(run: str) -> str:
    return f".{quote(run, safe='')}" if run else ""


def by_rank(indexes: Iterable[FileIndex], where: object) -> dict[int, FileIndex]:
    """Map the indexes of a checkpoint, or of a node's part of one, by rank.

    Raises `CheckpointError` if one is missing, or if they are of different runs.
    """
    found = {index.rank: index for index in indexes}
    missing = sorted({rank for index in found.values() for rank in index.in_folder} - set(found))
    if missing or not found:
        names = ", ".join(map(index_name, missing)) or "every index"
        raise CheckpointError(f"{where}: {names} missing")
    if len({index.run for index in found.values()}) > 1:
        raise CheckpointError(f"{where}: its files are of different runs")
    return found


def to_metadata(indexes: Sequence[FileIndex], run: str = "") -> bytes:
    """Content of `.metadata`; `run` as in the names of the files."""
    return _pickled(tuple((data_name(i.rank, run), i.tensors, i.objects) for i in indexes))


@lru_cache(maxsize=2)
def _pickled(
    files: tuple[tuple[str, tuple[IndexEntry, ...], tuple[IndexEntry, ...]], ...],
) -> bytes:
    """Cached: consecutive checkpoints of a job differ at most in the lengths of objects."""
    described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    paths: dict[str, tuple[str | int, ...]] = {}
    for name, tensors, objects in files:
        for entry in tensors + objects:
            where = _StorageInfo(name, entry.start, entry.length)
            places[_describe(entry, described)] = where
            paths[entry.key] = tuple(str(s[0]) if isinstance(s, tuple) else s for s in entry.path)
    meta = Metadata(described, paths, places, StorageMeta(), CURRENT_DCP_VERSION)
    return pickle.dumps(meta)


def _describe(
    entry: IndexEntry, described: dict[str, TensorStorageMetadata | BytesStorageMetadata]
) -> MetadataIndex:
    if entry.dtype is None:
        described[entry.key] = BytesStorageMetadata()
        return MetadataIndex(entry.key)
    properties = TensorProperties(dtype=getattr(torch, entry.dtype))
    whole = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
    known = described.setdefault(entry.key, whole)
    assert isinstance(known, TensorStorageMetadata)
    known.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))
    return MetadataIndex(entry.key, entry.offsets, len(known.chunks) - 1)
