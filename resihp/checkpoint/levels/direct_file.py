"""Files written and read past the page cache where the file system allows it."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from ..format.checksum import ROW_BYTES

_DIRECT = getattr(os, "O_DIRECT", 0)
_MOST_PARTS = 512


class DirectFile:
    """Positional reads and writes from several threads at once.

    Direct I/O wants offsets, lengths and memory at multiples of 4096 bytes. Where the file system
    refuses (at opening or at the first access), the same goes through the page cache.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._path, self._flags = path, flags
        self._fd = _open(path, flags)

    @classmethod
    def create(cls, path: Path) -> DirectFile:
        """A file to be written from its start, new or in place of what it held."""
        return cls(path, os.O_RDWR | os.O_CREAT)

    @classmethod
    def existing(cls, path: Path) -> DirectFile:
        """A file to be read."""
        return cls(path, os.O_RDONLY)

    def write(self, parts: Sequence[memoryview], at: int) -> None:
        """All of the parts, one after the other. Raises `OSError`."""
        self._all(lambda rest, where: os.pwritev(self._fd, rest, where), parts, at)

    def read(self, view: memoryview, at: int) -> None:
        """Fill `view`. Raises `OSError`, also where the file ends before."""
        self._all(lambda rest, where: os.preadv(self._fd, rest, where), [view], at)

    def truncate(self, nbytes: int) -> None:
        """Set the length."""
        os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        """Return when the bytes are on the medium."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self._fd)

    def _all(
        self, access: Callable[[list[memoryview], int], int], parts: Sequence[memoryview], at: int
    ) -> None:
        rest, is_cached = [part for part in parts if part], False
        while rest:
            try:
                moved = access(rest[:_MOST_PARTS], at)
            except OSError as problem:
                if problem.errno != errno.EINVAL or is_cached:
                    raise
                self._leave_direct()  # another thread may have done so since the access began
                is_cached = True
                continue
            if not moved:
                raise OSError(errno.EIO, "file ends too early", str(self._path))
            at, rest = at + moved, _beyond(rest, moved)
            if at % ROW_BYTES and rest:
                self._leave_direct()

    def _leave_direct(self) -> None:
        fcntl.fcntl(self._fd, fcntl.F_SETFL, fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~_DIRECT)


def _beyond(parts: Sequence[memoryview], done: int) -> list[memoryview]:
    """What is left of the parts after the first `done` bytes."""
    rest = []
    for part in parts:
        if done < len(part):
            rest.append(part[done:])
        done = max(0, done - len(part))
    return rest


def write_whole(path: Path, content: bytes) -> None:
    """A small file, whole or not at all, and on the medium when this returns."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the medium."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | _DIRECT | os.O_CLOEXEC, 0o644)
    except OSError as problem:
        if problem.errno != errno.EINVAL:
            raise
        return os.open(path, flags | os.O_CLOEXEC, 0o644)
