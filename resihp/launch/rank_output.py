"""Output of a rank: passed on, written to files, and its last lines kept."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from .options import Output

_log = logging.getLogger("resihp.launch")
PATIENCE_S = 1.0
"""Longest wait for the output of a rank that has ended: a child may keep its pipe open."""
_LAST_LINES = 60
_LONGEST_LINE = 1 << 14
"""Bytes from which on a line is passed on in parts, of which the last one is kept."""
_READ_BYTES = 1 << 16
_MOST_HELD = 6 * _READ_BYTES
"""Bytes that two pipes, a read of each and their lines that are not whole hold at most."""
_NAMES = {1: "stdout", 2: "stderr"}


class RankOutput:
    """Both streams of one rank.

    A stdout that is only passed on is the launcher's own. Everything else goes through pipes, which
    threads read until all processes that hold them have ended. A stream whose file cannot be made,
    as on a full disk, is passed on instead.

    descriptors  what the rank gets as stdout and stderr; `started` closes those of this process
    """

    def __init__(self, output: Output, *, rank: int, local_rank: int, attempt: int) -> None:
        self._lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._opened: list[int] = []
        self._readers: dict[int, threading.Thread] = {}
        self._taken, self._passed = {1: 0, 2: 0}, {1: 0, 2: 0}  # bytes, before and after a write
        self.descriptors: list[int] = []
        for stream in (1, 2):
            is_written = output.is_written(local_rank, stream)
            file = _file(output, stream, local_rank, attempt)
            is_shown = output.is_shown(local_rank, stream) or (is_written and file is None)
            if stream == 1 and is_shown and not is_written:
                self.descriptors.append(sys.stdout.fileno())
                continue
            read, write = os.pipe()
            self.descriptors.append(write)
            self._opened.append(write)
            prefix = f"[rank{rank}]: ".encode() if is_written else b""
            targets = (read, stream, file, is_shown, prefix)
            reader = threading.Thread(
                target=self._pass_on, args=targets, name=f"resihp-{_NAMES[stream]}", daemon=True
            )
            reader.start()
            self._readers[stream] = reader

    def started(self) -> None:
        """Close the rank's ends of the pipes here: it has them, or never will."""
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened.clear()

    def pass_on_rest(self, until_s: float) -> None:
        """Wait until all that a rank which has ended wrote is passed on, or a monotonic time."""
        for reader in self._readers.values():
            reader.join(max(0.0, until_s - time.monotonic()))

    @property
    def is_complete(self) -> bool:
        """True if all processes that held the pipes have ended, and their output is passed on."""
        return not any(reader.is_alive() for reader in self._readers.values())

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that were read, and those of them that were passed on."""
        return sum(self._taken.values()), sum(self._passed.values())

    def last_lines(self) -> str:
        """The end of the rank's stderr."""
        self.pass_on_rest(time.monotonic() + PATIENCE_S)
        return b"".join(self._lines).decode(errors="replace").rstrip()

    def _pass_on(
        self, read: int, stream: int, file: BinaryIO | None, is_shown: bool, prefix: bytes
    ) -> None:
        shown = (sys.stdout if stream == 1 else sys.stderr).buffer
        for line in _lines(read):
            self._taken[stream] += len(line)
            if stream == 2:
                self._keep(line)
            with suppress(OSError, ValueError):  # a full disk or a closed terminal
                if file is not None:
                    file.write(line)
                    file.flush()
            with suppress(OSError, ValueError):
                if is_shown:
                    shown.write(prefix + line)
                    shown.flush()
            self._passed[stream] += len(line)
        os.close(read)
        if file is not None:
            with suppress(OSError):
                file.close()

    def _keep(self, line: bytes) -> None:
        """Keep a line; the next state of a progress bar takes the place of the one before."""
        if self._lines and not self._lines[-1].endswith(b"\n"):
            self._lines.pop()
        self._lines.append(line)


def pass_on_all(outputs: Iterable[RankOutput]) -> None:
    """Wait until all that ranks which have ended wrote is passed on, however slowly it is taken.

    A child of a rank may keep its pipe open for ever: what it writes is not waited for.
    """
    most = {output: output.progress[1] + _MOST_HELD for output in outputs}
    seen: dict[RankOutput, tuple[int, int]] = {}
    while True:
        until_s = time.monotonic() + PATIENCE_S
        for output in most:
            output.pass_on_rest(until_s)
        left = {
            output: output.progress
            for output, limit in most.items()
            if not output.is_complete and output.progress[1] < limit
        }
        if left == seen and all(taken == passed for taken, passed in left.values()):
            return
        seen = left


def _lines(read: int) -> Iterator[bytes]:
    """Read lines, each as soon as it is whole, and as such the states of a progress bar, which
    returns to the start of its line before the next one; long lines in parts."""
    held = b""
    while data := os.read(read, _READ_BYTES):
        *whole, held = (held + data).splitlines(keepends=True)
        if held.endswith(b"\n"):  # after "\r" the other half of an end of line may follow
            whole, held = [*whole, held], b""
        yield from whole
        if len(held) > _LONGEST_LINE:
            yield held
            held = b""
    if held:
        yield held


def _file(output: Output, stream: int, local_rank: int, attempt: int) -> BinaryIO | None:
    """The file of a stream, where torchrun puts it; None if it is not written, or cannot be."""
    if output.folder is None or not output.is_written(local_rank, stream):
        return None
    folder: Path = output.folder / f"attempt_{attempt}" / str(local_rank)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / f"{_NAMES[stream]}.log").open("ab")
    except OSError as error:
        _warn(folder.parent, error.strerror or repr(error))
        return None


@cache
def _warn(folder: Path, why: str) -> None:
    """Warn once of each folder and reason."""
    _log.warning("%s: %s: output of ranks is passed on and not written there", folder, why)
