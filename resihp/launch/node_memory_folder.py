"""A folder in this node's memory that holds checkpoints for as long as the launcher lives."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType

_MEMORY = Path("/dev/shm")
_PREFIX = "resihp-run-"


class NodeMemoryFolder:
    """A new folder in tmpfs, deleted at the end; those of launchers that were killed are deleted
    at the beginning.

    path  None where this system has no tmpfs
    """

    def __init__(self) -> None:
        self.path: Path | None = None
        self._lock: int | None = None

    def __enter__(self) -> NodeMemoryFolder:
        if not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
            return self
        for folder in _MEMORY.glob(f"{_PREFIX}*"):
            _delete_abandoned(folder)
        hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=_MEMORY))  # not to be swept yet
        self._lock = os.open(hidden, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = hidden.rename(_MEMORY / hidden.name[1:])
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        if self.path is not None and self._lock is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)

    def newest_step(self) -> int:
        """Step of the newest complete checkpoint, -1 if there is none."""
        if self.path is None:
            return -1
        names = (folder.name.partition("-")[2] for folder in self.path.glob("step-*"))
        return max((int(name) for name in names if name.isdecimal()), default=-1)


def _delete_abandoned(folder: Path) -> None:
    """Delete the folder of a launcher that has ended without doing so."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(descriptor)
