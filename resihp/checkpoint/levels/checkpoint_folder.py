"""A folder of checkpoints: how one becomes visible as a whole, and how old ones go.

    step-000000042/            complete: `.metadata`, and for each rank a file and its index
    .step-000000043.RUN.part/  being written; RUN keeps a restarted job apart from its former self,
                               and what follows a dot in it one layout of the job from another.
                               As .ready.part it is complete and about to be published.
                               The same step of another lineage has another RUN.
    .step-000000040.retired/   dropped; its files serve the next checkpoint as room on disk

Whichever rank finds the index of every rank in place writes `.metadata` and renames the folder, so
nobody waits for anybody, and a checkpoint that a lost rank did not finish never becomes visible.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

from resihp.contracts import CheckpointError

from ..format.index import FileIndex, read_index
from ..format.metadata import LINEAGE, METADATA, data_name, index_name, to_metadata
from ..history import Lineage, StoredCheckpoint, expired, lineage_json, merged_lineage, read_lineage
from .direct_file import DirectFile, sync_folder, write_whole

_PREFIX = "step-"


def step_name(step: int) -> str:
    """The folder of a step; names sort as steps do."""
    return f"{_PREFIX}{step:09d}"


def step_of(name: str) -> int | None:
    """The step of a folder that has been published under this name."""
    digits = name.removeprefix(_PREFIX)
    return int(digits) if name.startswith(_PREFIX) and digits.isdecimal() else None


def found_in(root: Path) -> list[StoredCheckpoint]:
    """The complete checkpoints, in the order of their steps."""
    if not root.is_dir():
        return []
    found = [(step_of(path.name), path) for path in sorted(root.iterdir())]
    return [
        StoredCheckpoint(step, _lineage(path))
        for step, path in found
        if step is not None and (path / METADATA).exists()
    ]


def torn_in(root: Path) -> dict[int, str]:
    """What is wrong with folders that have the name of a complete checkpoint and are none."""
    steps = {step_of(path.name): path for path in root.glob(f"{_PREFIX}*")}
    return {
        step: f"{path / METADATA} is missing"
        for step, path in steps.items()
        if step is not None and path.is_dir() and not (path / METADATA).exists()
    }


def steps_in(root: Path) -> list[int]:
    """Steps with a complete checkpoint, ascending."""
    return [found.step for found in found_in(root)]


def part_folder(root: Path, step: int, run: str) -> Path:
    """Where the ranks write before publication; created where it is missing."""
    part = root / f".{step_name(step)}.{run}.part"
    part.mkdir(parents=True, exist_ok=True)
    return part


def publish(root: Path, part: Path, own: FileIndex) -> bool:
    """Put this rank's index in place, and publish if it is the last one. Whether it was."""
    write_whole(part / index_name(own.rank), own.to_json().encode())
    sync_folder(part)
    if not all((part / index_name(rank)).exists() for rank in own.ranks):
        return False
    claimed = part.with_suffix(".ready.part")
    try:
        os.rename(part, claimed)
    except FileNotFoundError:
        return False  # another rank, as late as this one, is about to publish
    indexes = [own if rank == own.rank else _read(claimed, rank) for rank in own.ranks]
    lineage = merged_lineage(index.lineage for index in indexes)
    if _lineage(root / step_name(own.step)).born > lineage.born:
        shutil.rmtree(claimed, ignore_errors=True)  # late, from a past that was given up
        return False
    write_whole(claimed / LINEAGE, lineage_json(lineage))
    publish_folder(claimed, root / step_name(own.step), to_metadata(indexes))
    return True


def publish_folder(part: Path, final: Path, metadata: bytes) -> None:
    """Make a folder visible under its name, in place of any that has it."""
    write_whole(part / METADATA, metadata)
    sync_folder(part)
    if os.path.lexists(final):
        _retire(final)
    os.rename(part, final)
    sync_folder(final.parent)


def drop_old(root: Path, keep: int, published: FileIndex) -> None:
    """Retire what is abandoned and all but the best `keep`; delete what was retired before.

    What this lineage left unfinished before the published one goes, too: every rank is past it.
    """
    for path in root.glob(".step-*.retired"):
        _delete(path)
    for step in expired(found_in(root), keep) - {published.step}:
        _retire(root / step_name(step))
    for path in _parts_of(root, published.run):
        step_of_part = step_of(path.name.split(".")[1])
        is_ready = path.name.endswith(".ready.part")
        if step_of_part is not None and step_of_part < published.step and not is_ready:
            shutil.rmtree(path, ignore_errors=True)


def sweep(root: Path, run: str) -> None:
    """Delete what a former run of the job left unfinished."""
    for path in set(root.glob(".step-*.part")) - set(_parts_of(root, run)):
        shutil.rmtree(path, ignore_errors=True)


def _parts_of(root: Path, run: str) -> list[Path]:
    """What this run has begun, in whichever layout."""
    job = run.partition(".")[0]
    return [path for path in root.glob(".step-*.part") if path.name.split(".")[2] == job]


def reuse(root: Path, target: Path) -> None:
    """Move a retired file of the same name to `target`: writing it anew allocates nothing."""
    for path in root.glob(f".step-*.retired/{target.name}"):
        try:
            os.rename(path, target)
        except OSError:
            continue  # deleted in between
        if _is_read_elsewhere(target):
            target.unlink()
            continue
        return


class FolderReader:
    """A published checkpoint, read past the page cache."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[int, DirectFile] = {}
        self.indexes: Mapping[int, FileIndex] = _read_all(folder)
        for rank in self.indexes:
            self._files[rank] = DirectFile.existing(folder / data_name(rank))

    def read(self, rank: int, start: int, into: memoryview) -> None:
        """Bytes of a rank's file."""
        self._files[rank].read(into, start)

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()


def _read_all(folder: Path) -> dict[int, FileIndex]:
    paths: Sequence[Path] = sorted(folder.glob("__*.index.json"))
    found = [read_index(path.read_text(), f"{folder}, {path.name}") for path in paths]
    indexes = {index.rank: index for index in found}
    if len({index.run for index in found}) > 1:
        raise CheckpointError(f"{folder}: its files are of different runs")
    missing = sorted({rank for index in found for rank in index.ranks} - set(indexes))
    if missing or not indexes:
        names = ", ".join(index_name(rank) for rank in missing) or "every index"
        raise CheckpointError(f"{folder}: {names} missing")
    return indexes


def _read(folder: Path, rank: int) -> FileIndex:
    return read_index((folder / index_name(rank)).read_text(), f"{folder}, rank {rank}")


def _lineage(folder: Path) -> Lineage:
    """Of one that has been published; without a past where torch's own writer was at work.

    The indexes know it, too, where the file that says it is gone or damaged.
    """
    with contextlib.suppress(OSError):
        told = read_lineage((folder / LINEAGE).read_bytes())
        if told is not None:
            return told
    indexes = []
    for path in folder.glob("__*.index.json"):
        with contextlib.suppress(OSError, UnicodeError, CheckpointError):
            indexes.append(read_index(path.read_text(), str(path)))
    return merged_lineage(index.lineage for index in indexes)


def _retire(folder: Path) -> None:
    retired = folder.with_name(f".{folder.name}.retired")
    _delete(retired)
    os.rename(folder, retired)


def _delete(path: Path) -> None:
    """Whatever it is; what cannot be deleted stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_read_elsewhere(path: Path) -> bool:
    """Whether somebody has the file open: the kernel grants a write lease only if nobody has.

    A reader that opened it before it was retired must not see it change. The signal that breaks a
    lease is set to one that is ignored.
    """
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):
        return True
    finally:
        os.close(fd)
    return False
