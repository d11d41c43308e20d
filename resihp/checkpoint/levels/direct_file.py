"""Direct I/O: files written and read past the page cache if the file system allows it."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ..format.checksum import ROW_BYTES

_DIRECT = getattr(os, "O_DIRECT", 0)
_MOST_PARTS = 512


class DirectFile:
    """Positional reads and writes, by several threads at once.

    Direct I/O needs offsets, lengths and addresses that are multiples of 4096 bytes. If the file
    system refuses it, when opening or at an access, the page cache is used.
    """

    def __init__(self, path: Path, flags: int) -> None:
        self._path, self._flags = path, flags
        self._fd = _open(path, flags)

    @classmethod
    def create(cls, path: Path) -> DirectFile:
        """Open a file for writing; existing content is overwritten in place."""
        return cls(path, os.O_RDWR | os.O_CREAT)

    @classmethod
    def existing(cls, path: Path) -> DirectFile:
        """Open a file for reading."""
        return cls(path, os.O_RDONLY)

    def write(self, parts: Sequence[memoryview], at: int) -> None:
        """Write all parts, contiguously from offset `at`. Raises `OSError`."""
        self._all(lambda rest, where: os.pwritev(self._fd, rest, where), parts, at)

    def read(self, view: memoryview, at: int) -> None:
        """Fill `view` from offset `at`. Raises `OSError`, also if the file ends too early."""
        self._all(lambda rest, where: os.preadv(self._fd, rest, where), [view], at)

    def truncate(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        """Wait until all bytes are on the medium."""
        os.fsync(self._fd)

    def close(self) -> None:
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
    """Return the parts without their first `done` bytes."""
    rest = []
    for part in parts:
        if done < len(part):
            rest.append(part[done:])
        done = max(0, done - len(part))
    return rest


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file atomically; it is on the medium when this returns."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    with open(partial, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def sync_folder(path: Path) -> None:
    """Wait until the entries of a folder are on the medium."""
    with synced_folder(path):
        pass


@contextlib.contextmanager
def synced_folder(path: Path) -> Iterator[None]:
    """Wait, after the block, until the entries of a folder are on the medium.

    The folder may get another name in the block, or be deleted.
    """
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield
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
