"""Output of a rank: passed on, written to files, and its last lines kept."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from .options import Output

_LAST_LINES = 20
_NAMES = {1: "stdout", 2: "stderr"}


class RankOutput:
    """Both streams of one rank.

    A stdout that is only passed on is the launcher's own. Everything else goes through pipes, which
    threads read until all processes that hold them have ended.

    descriptors  what the rank gets as stdout and stderr; `started` closes those of this process
    """

    def __init__(self, output: Output, *, rank: int, local_rank: int, attempt: int) -> None:
        self._lines: deque[bytes] = deque(maxlen=_LAST_LINES)
        self._opened: list[int] = []
        self._readers: list[threading.Thread] = []
        self.descriptors: list[int] = []
        for stream in (1, 2):
            file = _file(output, stream, local_rank, attempt)
            is_shown = output.is_shown(local_rank, stream)
            if stream == 1 and is_shown and file is None:
                self.descriptors.append(sys.stdout.fileno())
                continue
            read, write = os.pipe()
            self.descriptors.append(write)
            self._opened.append(write)
            prefix = f"[rank{rank}]: ".encode() if file is not None else b""
            targets = (read, stream, file, is_shown, prefix)
            reader = threading.Thread(
                target=self._pass_on, args=targets, name=f"resihp-{_NAMES[stream]}", daemon=True
            )
            reader.start()
            self._readers.append(reader)

    def started(self) -> None:
        """Close the rank's ends of the pipes here: it has them, or never will."""
        for descriptor in self._opened:
            os.close(descriptor)
        self._opened.clear()

    def last_lines(self) -> str:
        """The end of the rank's stderr."""
        for reader in self._readers:
            reader.join(timeout=1.0)  # a child of the rank may keep the pipe open
        return b"".join(self._lines).decode(errors="replace").rstrip()

    def _pass_on(
        self, read: int, stream: int, file: BinaryIO | None, is_shown: bool, prefix: bytes
    ) -> None:
        shown = (sys.stdout if stream == 1 else sys.stderr).buffer
        with os.fdopen(read, "rb") as lines:
            for line in lines:
                if stream == 2:
                    self._lines.append(line)
                with suppress(OSError, ValueError):  # a full disk or a closed terminal
                    if file is not None:
                        file.write(line)
                        file.flush()
                with suppress(OSError, ValueError):
                    if is_shown:
                        shown.write(prefix + line)
                        shown.flush()
        if file is not None:
            with suppress(OSError):
                file.close()


def _file(output: Output, stream: int, local_rank: int, attempt: int) -> BinaryIO | None:
    """The file of a stream, where torchrun puts it."""
    if output.folder is None or not output.is_written(local_rank, stream):
        return None
    folder: Path = output.folder / f"attempt_{attempt}" / str(local_rank)
    folder.mkdir(parents=True, exist_ok=True)
    return (folder / f"{_NAMES[stream]}.log").open("ab")
