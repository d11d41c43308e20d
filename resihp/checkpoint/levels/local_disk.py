"""Node-local disk: large aligned direct writes, published by renaming a folder."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Lock

from resihp.contracts import ContractError

from ..format.metadata import data_name
from ..history import StoredCheckpoint
from ..staging.in_flight import InFlightCheckpoint
from ..staging.zero_copy import ZeroCopyChunks
from .checkpoint_folder import (
    FolderReader,
    drop_old,
    found_in,
    part_folder,
    publish,
    reuse,
    step_name,
    steps_in,
    sweep,
    torn_in,
)
from .direct_file import DirectFile
from .level import CheckpointReader, valid_keep

WRITERS = 2
"""Threads; while one sums chunks the other keeps the disk busy."""

RUN_CHUNKS = 4
"""Chunks that a thread takes at once and, where it can, writes with one call.

The kernel makes of it as many requests as keep the disk busy, and Python, on which training waits,
runs less."""


class LocalDisk:
    """Checkpoints in a folder, in torch's distributed format.

    keep   how many complete ones stay; one more is on disk while it is written
    ranks  which ranks write into this very folder; None: all of the job. A folder that only the
           ranks of one node see holds the parts of that node.
    """

    after_disk = False
    patience = 1

    def __init__(
        self, folder: str | Path, *, keep: int = 2, ranks: Collection[int] | None = None
    ) -> None:
        if not str(folder):
            raise ContractError("folder", "is empty; '.' is the current one")
        if ranks is not None and not ranks:
            raise ContractError("ranks", "at least one writes into the folder; None: all do")
        self.folder, self.name = Path(folder), str(folder)
        self._keep, self._ranks = (
            valid_keep(keep),
            tuple(sorted(ranks)) if ranks is not None else None,
        )
        self._swept_for = ""

    def put(self, checkpoint: InFlightCheckpoint) -> None:
        """Write this rank's file beside those of the others; the last one publishes."""
        me = checkpoint.identity
        ranks = self._ranks or me.ranks
        part = part_folder(self.folder, me.step, me.lineage.run)
        self._sweep(me.lineage.run, is_first=me.rank == min(ranks))
        target = part / data_name(me.rank)
        reuse(self.folder, target)
        try:
            self._write(checkpoint, target)
            if checkpoint.uploads:
                checkpoint.stored = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            index = replace(checkpoint.index(), ranks=ranks)
            if publish(self.folder, part, index):
                drop_old(self.folder, self._keep, index)
        except BaseException:
            _discard(target)
            raise

    def found(self) -> list[StoredCheckpoint]:
        """The complete checkpoints in this folder."""
        return found_in(self.folder)

    def torn(self) -> dict[int, str]:
        """Steps whose checkpoint has been damaged so that it is not found, and how."""
        return torn_in(self.folder)

    def steps(self) -> list[int]:
        """Steps of which this folder holds a complete checkpoint."""
        return steps_in(self.folder)

    def open(self, step: int) -> CheckpointReader:
        """Raises `OSError` or `CheckpointError` where it cannot be read."""
        return FolderReader(self.folder / step_name(step))

    def close(self) -> None:
        """Nothing to let go of."""

    def _write(self, checkpoint: InFlightCheckpoint, target: Path) -> None:
        file = DirectFile.create(target)
        try:
            work = _DiskWrite(checkpoint, file, self.name)
            with ThreadPoolExecutor(WRITERS, "resihp-checkpoint-disk") as pool:
                futures = [pool.submit(work.run) for _ in range(WRITERS)]
            for future in futures:  # all have ended: none writes once the descriptor is closed
                future.result()
            file.write([memoryview(checkpoint.section)], checkpoint.file.nbytes)
            file.truncate(checkpoint.file.nbytes + len(checkpoint.section))
            file.sync()
        finally:
            file.close()

    def _sweep(self, run: str, *, is_first: bool) -> None:
        if is_first and self._swept_for != run:
            sweep(self.folder, run)
        self._swept_for = run


class _DiskWrite:
    """Chunks of a checkpoint that several threads write, in order as far as they can."""

    def __init__(self, checkpoint: InFlightCheckpoint, file: DirectFile, level: str) -> None:
        self._checkpoint, self._file, self._level = checkpoint, file, level
        self._lock = Lock()
        self._at_once = max(1, min(RUN_CHUNKS, checkpoint.count // WRITERS))
        self._next, self._prefix = 0, 0
        self._written: set[int] = set()
        self._is_broken = False

    def run(self) -> None:
        """Until no chunk is left, or one could not be written."""
        straight = ZeroCopyChunks(self._checkpoint)
        try:
            while run := self._claim():
                straight.write(run[0], run[-1] + 1, self._put)
                self._finish(run)
        except BaseException:
            self._is_broken = True
            raise

    def _put(self, parts: Sequence[memoryview], chunk: int) -> None:
        self._file.write(parts, self._checkpoint.file.chunks[chunk][0])

    def _claim(self) -> range:
        """What is next; nothing once all is taken."""
        with self._lock:
            first = self._next
            self._next = (
                first if self._is_broken else min(first + self._at_once, self._checkpoint.count)
            )
            return range(first, self._next)

    def _finish(self, run: range) -> None:
        with self._lock:
            self._written.update(run)
            while self._prefix in self._written:
                self._prefix += 1
            self._checkpoint.done_with(self._level, self._prefix)


def _discard(target: Path) -> None:
    """Give the room of an unfinished file back; the folder too, once it is empty."""
    with contextlib.suppress(OSError):
        target.unlink(missing_ok=True)
        target.parent.rmdir()
