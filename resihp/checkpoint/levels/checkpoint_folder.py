"""Folder of checkpoints: atomic publication, and retirement of old checkpoints.

    step-000000042/            complete: `.metadata`, and for each rank a file and its index
    .step-000000043.RUN.part/  being written. RUN names the start of the job and, after a dot, its
                               layout; another lineage of the same step has another RUN. Renamed to
                               .ready.part when it is complete and about to be published; it is
                               locked until then, so that what a killed process left is known.
    .step-000000040.retired/   deleted later; the next checkpoint overwrites its files, which spares
                               the file system the allocation

The rank that finds the index of every rank in place writes `.metadata` and renames the folder.
No rank waits for another, and a checkpoint that a lost rank did not finish is never published.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from threading import Lock
from urllib.parse import quote

from resihp.contracts import CheckpointError, ContractError

from ..format.index import FileIndex, read_index
from ..format.metadata import LINEAGE, METADATA, by_rank, data_name, index_name, to_metadata
from ..history import Lineage, StoredCheckpoint, expired, lineage_json, merged_lineage, read_lineage
from .direct_file import DirectFile, sync_folder, synced_folder, write_whole
from .level import CheckpointReader, Level, valid_keep

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Arguments of Linux's renameat2: names are paths; exchange both."""
_PREFIX = "step-"
_MOST_OPEN = 16
"""Files that a reader holds open."""


def step_name(step: int) -> str:
    """Name of the folder of a step; names sort like steps."""
    return f"{_PREFIX}{step:09d}"


def step_of(name: str) -> int | None:
    """Step of a published folder of this name; None for other names, such as `step-42`."""
    digits = name.removeprefix(_PREFIX)
    step = int(digits) if digits.isdecimal() else 0
    return step if step_name(step) == name else None


def part_folder(final: Path, run: str) -> Path:
    """Folder in which the ranks write before its publication as `final`."""
    return final.with_name(f".{final.name}.{quote(run, safe='')}.part")


def write_index(part: Path, index: FileIndex) -> None:
    """Write the index of a rank's file; file and index are on the medium when this returns.

    A rank that sees the index may publish the folder, which changes its name, before this returns.
    """
    with synced_folder(part):
        write_whole(part / index_name(index.rank), index.to_json().encode())


def publish_folder(part: Path, final: Path, metadata: bytes) -> None:
    """Write `.metadata` and rename a folder to its final name, in place of an existing one.

    A complete checkpoint has that name at any time, if the file system can exchange two names.
    """
    write_whole(part / METADATA, metadata)
    sync_folder(part)
    if os.path.lexists(final):
        _replace(final, part)
    else:
        os.rename(part, final)
    sync_folder(final.parent)


def delete_retired(final: Path) -> None:
    """Delete the checkpoint in whose place another one has been published as `final`."""
    _delete(_retired_folder(final))


class CheckpointFolder(Level):
    """Checkpoints in a folder: those that are complete, unfinished and retired."""

    def __init__(self, folder: str | Path, keep: int) -> None:
        if not str(folder):
            raise ContractError("folder", "is empty; '.' is the current one")
        self.folder = Path(folder).absolute()  # whatever becomes the current one later
        self.name, self._keep = str(folder), valid_keep(keep)

    def checkpoints(self) -> list[StoredCheckpoint]:
        """List the complete checkpoints, by ascending step."""
        return [
            StoredCheckpoint(step, _lineage(path))
            for step, path in self._published()
            if (path / METADATA).exists()
        ]

    def newest_born(self) -> int:
        """`born` of the newest lineage in this folder; 0 for none, or if it cannot be read."""
        with contextlib.suppress(OSError):
            return max((_lineage(path).born for _, path in self._published()), default=0)
        return 0

    def torn(self) -> dict[int, str]:
        """Steps of published folders without `.metadata`, with the reason for messages."""
        return {
            step: f"{path / METADATA} is missing"
            for step, path in self._published()
            if path.is_dir() and not (path / METADATA).exists()
        }

    def open(self, step: int) -> CheckpointReader:
        return FolderReader(self.folder / step_name(step))

    def _published(self) -> list[tuple[int, Path]]:
        try:
            names = sorted(os.listdir(self.folder))
        except FileNotFoundError:
            return []
        found = [(step_of(name), self.folder / name) for name in names]
        return [(step, path) for step, path in found if step is not None]

    def _publish(self, part: Path, own: FileIndex) -> None:
        """Write this rank's index; if it is the last one, publish and retire old checkpoints.

        Raises `CheckpointError` if the folder has this step of a younger lineage, or lacks a file
        that its rank deletes as its save fails.
        """
        write_index(part, own)
        if not all((part / index_name(rank)).exists() for rank in own.in_folder):
            return
        claimed = part.with_suffix(".ready.part")
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_locked(part))
                os.rename(part, claimed)
            except (FileNotFoundError, BlockingIOError):
                return  # another rank is publishing
            stack.callback(shutil.rmtree, claimed, ignore_errors=True)  # unless it is published
            indexes = [own if rank == own.rank else _read(claimed, rank) for rank in own.in_folder]
            for index in indexes:
                _check_length(claimed, index)
            lineage = merged_lineage(index.lineage for index in indexes)
            final = self.folder / step_name(own.step)
            if _lineage(final).born > lineage.born:
                raise CheckpointError(f"{final.name} is there, of a run that began later")
            write_whole(claimed / LINEAGE, lineage_json(lineage))
            publish_folder(claimed, final, to_metadata(indexes))
        self._drop_old(own)

    def _drop_old(self, published: FileIndex) -> None:
        """Retire all but the best `keep` checkpoints, and delete those retired before.

        Older unfinished checkpoints of this job are deleted too: every rank is past them, but one
        of a former layout that is publishing one right now.
        """
        self._delete_retired()
        self._retire_expired(self._keep, spared=published.step)
        for path in self._parts_of(published.run):
            step = step_of(path.name.split(".")[1])
            if step is not None and step < published.step:
                _delete_unpublished(path)

    def _retire_expired(self, keep: int, *, spared: int = -1) -> None:
        """Retire all but the best `keep` checkpoints and the one of step `spared`."""
        for step in expired(self.checkpoints(), keep) - {spared}:
            with contextlib.suppress(FileNotFoundError):  # retired by another rank
                _retire(self.folder / step_name(step))

    def _delete_retired(self) -> None:
        for path in self.folder.glob(".step-*.retired"):
            _delete(path)

    def _sweep(self, run: str) -> None:
        """Delete unfinished checkpoints of former runs of the job."""
        for path in set(self.folder.glob(".step-*.part")) - set(self._parts_of(run)):
            _delete_unpublished(path)

    def _parts_of(self, run: str) -> list[Path]:
        """List the unfinished checkpoints of this run, in any layout."""
        job = quote(run.partition(".")[0], safe="")
        return [path for path in self.folder.glob(".step-*.part") if path.name.split(".")[2] == job]

    def _reuse(self, target: Path) -> None:
        """Move a retired file of the same name to `target`, to overwrite it without allocation."""
        for path in self.folder.glob(f".step-*.retired/{target.name}"):
            if path.parent.is_symlink():
                continue  # the folder was moved elsewhere, and is not ours any more
            try:
                os.rename(path, target)
            except OSError:
                continue  # deleted by another rank
            if _is_used_here_alone(target):
                return
            target.unlink()


class FolderReader(CheckpointReader):
    """Reads a published checkpoint past the page cache.

    Files are opened when they are read. A few stay open, which keeps them readable once the folder
    is deleted; a checkpoint may have more files than the process may open.
    """

    def __init__(self, folder: Path) -> None:
        paths = sorted(folder.glob("__*.index.json"))
        found = [read_index(path.read_text(), f"{folder}, {path.name}") for path in paths]
        self.indexes = by_rank(found, folder)
        self._folder, self._lock = folder, Lock()
        self._files: dict[int, DirectFile] = {}

    def read(self, rank: int, start: int, into: memoryview) -> None:
        path = self._folder / data_name(rank)
        with self._lock:
            if rank not in self._files and len(self._files) < _MOST_OPEN:
                self._files[rank] = DirectFile.existing(path)
            kept = self._files.get(rank)
        file = kept or DirectFile.existing(path)
        try:
            file.read(into, start)
        finally:
            if file is not kept:
                file.close()

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _read(folder: Path, rank: int) -> FileIndex:
    return read_index((folder / index_name(rank)).read_text(), f"{folder}, rank {rank}")


def _check_length(folder: Path, index: FileIndex) -> None:
    path = folder / data_name(index.rank)
    length = path.stat().st_size if path.exists() else 0
    if length != index.file_bytes:
        raise CheckpointError(f"{path} has {length} of {index.file_bytes} bytes")


def _lineage(folder: Path) -> Lineage:
    """Read the lineage of a published checkpoint; `UNKNOWN` for one of torch's own writer.

    Falls back to the indexes if the lineage file is missing or damaged.
    """
    with contextlib.suppress(OSError):
        lineage = read_lineage((folder / LINEAGE).read_bytes())
        if lineage is not None:
            return lineage
    indexes = []
    for path in folder.glob("__*.index.json"):
        with contextlib.suppress(OSError, UnicodeError, CheckpointError):
            indexes.append(read_index(path.read_text(), str(path)))
    return merged_lineage(index.lineage for index in indexes)


def _retired_folder(final: Path) -> Path:
    return final.with_name(f".{final.name}.retired")


def _retire(folder: Path) -> None:
    retired = _retired_folder(folder)
    _delete(retired)
    os.rename(folder, retired)


def _replace(final: Path, part: Path) -> None:
    """Give a folder its final name, and retire the one that had it."""
    retired = _retired_folder(final)
    if _exchange(part, final):
        _delete(retired)
        with contextlib.suppress(OSError):  # another job has swept it
            os.rename(part, retired)
        return
    _retire(final)
    try:
        os.rename(part, final)
    except OSError:
        os.rename(retired, final)
        raise


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; False if the system or the file system cannot."""
    call = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(one), os.fsencode(other)
    return call is not None and not call(_AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE)


def _delete(path: Path) -> None:
    """Delete a file or folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()


def _delete_unpublished(part: Path) -> None:
    """Delete an unfinished checkpoint, unless a rank is publishing it right now."""
    with contextlib.suppress(OSError), _locked(part) as is_locked:
        if is_locked or not part.name.endswith(".ready.part"):
            shutil.rmtree(part, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, whatever its name becomes, until the end of the block or of the process.

    Yields False if the file system knows no locks. Raises `BlockingIOError` if another thread or
    process has locked it, and `FileNotFoundError`.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_locked = True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            is_locked = False
        yield is_locked
    finally:
        with contextlib.suppress(OSError):  # closing is not enough if a child was forked meanwhile
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


def _is_used_here_alone(path: Path) -> bool:
    """Return True for a writable file under this name alone that is open nowhere else.

    A hard link, a file behind a symbolic link, or a reader that opened the file before its
    retirement must not see it change. The kernel grants no write lease on a file that is open
    elsewhere. The signal that breaks a lease is set to one that is ignored by default.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
            return False
        fcntl.fcntl(fd, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except (OSError, AttributeError):
        return False
    finally:
        os.close(fd)
    return True
