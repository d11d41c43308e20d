"""Node-local disk: large aligned direct writes, published by renaming a folder."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread

from resihp.contracts import ContractError

from ..format.metadata import data_name, index_name
from ..staging.in_flight import InFlightCheckpoint
from ..staging.zero_copy import WRITERS, ZeroCopyChunks
from .checkpoint_folder import CheckpointFolder, part_folder, step_name
from .direct_file import DirectFile

RUN_CHUNKS = 4
"""Chunks that a thread claims at a time and writes with one call if possible.

The kernel splits a large write into enough requests to keep the disk busy, and fewer calls need
less of the interpreter lock.
"""

_FULL = (errno.ENOSPC, errno.EDQUOT)


class LocalDisk(CheckpointFolder):
    """Checkpoints in a folder, in torch's distributed format.

    keep   number of complete checkpoints that stay; one more exists while it is being written. A
           disk without room for that keeps fewer, and at least one.
    ranks  the ranks that write into this folder; None: all of the job. A folder that only the
           ranks of one node see holds the files of that node; with a `keep` of 2 all nodes have one
           checkpoint in common at any time.
    """

    def __init__(
        self, folder: str | Path, *, keep: int = 2, ranks: Collection[int] | None = None
    ) -> None:
        super().__init__(folder, keep)
        if ranks is not None and not ranks:
            raise ContractError("ranks", "at least one writes into the folder; None: all do")
        self._ranks = () if ranks is None else tuple(sorted(ranks))
        if self._ranks:
            self.patience = 0  # nodes are at most one checkpoint apart
        self._swept_for = ""
        self._fits, self._enough_bytes = 0, 0

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Write this rank's file and index; the last rank to finish publishes the folder."""
        me = checkpoint.identity
        if me.rank == min(self._ranks or me.ranks) and self._swept_for != me.lineage.run:
            self._sweep(me.lineage.run)
        self._swept_for = me.lineage.run
        self._make_room(checkpoint)
        part = part_folder(self.folder / step_name(me.step), me.lineage.run)
        target = part / data_name(me.rank)
        try:
            part.mkdir(parents=True, exist_ok=True)
            self._reuse(target)
            _create(target)
            write_file(checkpoint, target, self.name)
            checkpoint.hold_stored(target)
            if self._ranks:
                checkpoint.await_agreement(self.name)
            self._publish(part, replace(checkpoint.index(), beside=self._ranks))
        except BaseException as problem:
            discard_file(part, me.rank)
            if isinstance(problem, OSError) and problem.errno in _FULL:
                self._note_full(checkpoint.file.nbytes)
            raise

    def _note_full(self, nbytes: int) -> None:
        """Record how many checkpoints fit, and the free space from which on more may fit."""
        with contextlib.suppress(OSError):
            self._delete_retired()
            self._fits = len(self.checkpoints())
            self._enough_bytes = _free_bytes(self.folder) + nbytes

    def _make_room(self, checkpoint: InFlightCheckpoint) -> None:
        """On a full disk, retire the oldest checkpoints first; at least one stays.

        Nodes are at most one checkpoint apart: where there are several, the last but one stays
        until all ranks are known to put this one, and thus to have the one before.
        """
        if self._fits and not self.folder.exists():
            self._fits = 0
        if self._fits and _free_bytes(self.folder) >= self._enough_bytes:
            self._fits = 0
        if not self._fits:
            return
        keep = max(1, self._fits - 1)
        if keep == 1 and self._ranks and not set(self._ranks) >= set(checkpoint.identity.ranks):
            checkpoint.await_agreement(self.name)
        self._retire_expired(keep)


def write_file(checkpoint: InFlightCheckpoint, target: Path, level: str) -> None:
    """Write a rank's file; it is on the medium when this returns."""
    file = DirectFile.create(target)
    try:
        _in_threads(_FileWrite(checkpoint, file, level).run)
        file.write([memoryview(checkpoint.section)], checkpoint.file.nbytes)
        file.truncate(checkpoint.file.nbytes + len(checkpoint.section))
        file.sync()
    finally:
        file.close()


def _in_threads(work: Callable[[], None]) -> None:
    """Run `work` in `WRITERS` threads; raises the first exception after all have ended.

    An executor would accept no work at the end of the program, where torch and our own levels
    still finish their saves.
    """
    problems: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as problem:  # noqa: BLE001 - raised below
            problems.append(problem)

    threads = [Thread(target=run, name="resihp-checkpoint-disk") for _ in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if problems:
        raise problems[0]


class _FileWrite:
    """Chunks of a checkpoint that several threads write, roughly in order."""

    def __init__(self, checkpoint: InFlightCheckpoint, file: DirectFile, level: str) -> None:
        self._checkpoint, self._file, self._level = checkpoint, file, level
        self._lock = Lock()
        self._at_once = max(1, min(RUN_CHUNKS, checkpoint.count // WRITERS))
        self._next, self._prefix = 0, 0
        self._written: set[int] = set()
        self._is_broken = Event()

    def run(self) -> None:
        """Write until no chunk is left or a write fails."""
        chunks = ZeroCopyChunks(self._checkpoint, self._is_broken)
        try:
            while run := self._claim():
                for written in chunks.write(run[0], run[-1] + 1, self._put):
                    self._finish(written)
        except BaseException:
            with self._checkpoint.changed:  # the other thread may wait for room that never comes
                self._is_broken.set()
                self._checkpoint.changed.notify_all()
            raise

    def _put(self, parts: Sequence[memoryview], chunk: int) -> None:
        self._file.write(parts, self._checkpoint.file.chunks[chunk][0])

    def _claim(self) -> range:
        """Claim the next run of chunks; empty at the end."""
        with self._lock:
            first = self._next
            if not self._is_broken.is_set():
                self._next = min(first + self._at_once, self._checkpoint.count)
            return range(first, self._next)

    def _finish(self, written: range) -> None:
        """Release the prefix of chunks that is written."""
        with self._lock:
            self._written.update(written)
            while self._prefix in self._written:
                self._prefix += 1
            self._checkpoint.done_with(self._level, self._prefix)


def _free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def _create(target: Path) -> None:
    """Create a file unless it exists, again if a rank that gives up deletes the empty folder."""
    while True:
        target.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            return target.touch()


def discard_file(part: Path, rank: int) -> None:
    """Delete a rank's unfinished file and before it the index, which says that the file is whole;
    delete the folder if it is empty then."""
    with contextlib.suppress(OSError):
        (part / index_name(rank)).unlink(missing_ok=True)
        (part / data_name(rank)).unlink(missing_ok=True)
        part.rmdir()
