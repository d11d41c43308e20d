"""Table of the beats of a host's processes, in memory that they share."""

from __future__ import annotations

import fcntl
import hashlib
import mmap
import os
import secrets
import struct
from contextlib import suppress
from pathlib import Path

import numpy as np

from resihp.contracts import ContractError

from .liveness import Beat

_FOLDER = Path("/dev/shm")
_PREFIX = "resihp-beats-"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_RANKS = 131_072
_BLOCK = 512  # ranks, whose words fill a page of memory
_BLOCKS = _RANKS // _BLOCK
_BYTES = 8 * _RANKS + _BLOCKS
_HOLDS = 1 << 63  # in the word of a process that holds a lock
_NUMBERS = 1 << 31
_LOCK = struct.Struct("hhqqi4x")  # struct flock


class HostTable:
    """Beats of the processes of one job on one host, by rank; each process writes its own.

    host  identity of the host: equal in all processes that share the table

    Each process holds a lock, which the kernel releases when the process ends, whatever ends it.
    Processes that it has forked hold it too: then the end shows once they have ended as well.

    A file that no process has open any more is deleted by the next process of the same user.
    """

    def __init__(self, job: str) -> None:
        """Open the table of `job`, a secret of its processes.

        Where no memory can be shared, the process has a table, and so a host, to itself.
        """
        self._path = _FOLDER / f"{_PREFIX}{os.geteuid()}-{job}"
        self._file: int | None = None
        try:
            _delete_unused(self._path)
            self._file = _open_locked(self._path)
            os.posix_fallocate(self._file, 0, _BYTES)  # a write beyond free memory ends a process
            memory = mmap.mmap(self._file, _BYTES)
            self.host = _identity(os.fstat(self._file))
        except OSError:
            memory = mmap.mmap(-1, _BYTES)
            self.host = secrets.token_hex(8)
        # One aligned word for each rank, so that none is read half written.
        self._words = np.frombuffer(memory, dtype=np.uint64, count=_RANKS)
        # One byte for each block of ranks that has one here: the others are not searched.
        self._used = np.frombuffer(memory, dtype=np.uint8, count=_BLOCKS, offset=8 * _RANKS)
        self._rank, self._word = 0, 0

    def enter(self, rank: int, number: int) -> None:
        """Be process `number` of `rank`, whose beats follow."""
        if rank >= _RANKS:
            raise ContractError("RANK", f"must be below {_RANKS:,}, not {rank}")
        self._rank, self._word = rank, number << 32
        self._used[rank // _BLOCK] = 1
        with suppress(OSError):  # it is watched by its beats alone
            self._lock(fcntl.F_OFD_SETLK, rank, number)
            self._word |= _HOLDS

    def beat(self, count: int) -> None:
        """Write beat number `count`, at least 1, of this process."""
        self._words[self._rank] = self._word | count

    def read(self) -> dict[int, Beat]:
        """Latest beat of each process by rank."""
        # Copies: numpy raises where others write while it searches.
        blocks = np.flatnonzero(self._used.copy())
        copied = self._words.reshape(_BLOCKS, _BLOCK)[blocks]
        rows, columns = np.nonzero(copied)
        ranks = blocks[rows] * _BLOCK + columns
        words = zip(ranks.tolist(), copied[rows, columns].tolist(), strict=True)
        return {rank: self._decode(rank, word) for rank, word in words}

    def _decode(self, rank: int, word: int) -> Beat:
        number, count = word >> 32 & _NUMBERS - 1, word & 0xFFFFFFFF
        has_ended = bool(word & _HOLDS) and rank != self._rank and self._is_free(rank, number)
        # One that closes the table says so before it gives its lock back.
        return Beat(number, count, has_ended and bool(int(self._words[rank]) & _HOLDS))

    def _is_free(self, rank: int, number: int) -> bool:
        try:
            return self._lock(fcntl.F_OFD_GETLK, rank, number) == fcntl.F_UNLCK
        except OSError:
            return False

    def _lock(self, command: int, rank: int, number: int) -> int:
        """Ask for the lock of a process; returns the kind of lock of another that stands against
        it."""
        asked = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number * _RANKS + rank, 1, 0)
        if self._file is None:
            raise OSError("the table is not shared")
        kind: int = _LOCK.unpack(fcntl.fcntl(self._file, command, asked))[0]
        return kind

    def close(self) -> None:
        """Close the table; the last process to do so deletes it. Others await the next beat."""
        if self._file is None:
            return
        if self._word & _HOLDS:
            self._word &= _HOLDS - 1
            self._words[self._rank] &= np.uint64(_HOLDS - 1)
        with suppress(OSError):
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._path.unlink()
        os.close(self._file)
        self._file = None


def _open_locked(path: Path) -> int:
    """Open `path`, and hold it against deletion until this process ends."""
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(file, fcntl.LOCK_SH)
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(file).st_ino:
                return file
        os.close(file)  # it was deleted between the two calls


def _delete_unused(path: Path) -> None:
    """Delete tables of jobs that have been killed; `path` is this job's."""
    for other in path.parent.glob(f"{_PREFIX}{os.geteuid()}-*"):
        if other == path:
            continue
        with suppress(OSError):
            file = os.open(other, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                other.unlink()
            finally:
                os.close(file)


def _identity(status: os.stat_result) -> str:
    """Identity of a file among the hosts of a job: containers of one host may share no memory."""
    where = f"{_BOOT.read_text()}/{status.st_dev}/{status.st_ino}"
    return hashlib.sha256(where.encode()).hexdigest()[:16]
