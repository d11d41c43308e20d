"""Server of the checkpoints in a node's memory, for the ranks of all nodes."""

from __future__ import annotations

import mmap
import secrets
from contextlib import suppress
from pathlib import Path

from resihp.checkpoint.format.index import FileIndex, read_index
from resihp.checkpoint.format.metadata import data_name, index_name
from resihp.checkpoint.levels.checkpoint_folder import step_name
from resihp.checkpoint.levels.host_memory import ImageStore, MemoryImage
from resihp.checkpoint.levels.peer_server import PeerServer
from resihp.contracts import CheckpointError

_KEEP = 2  # copies of each rank's file
_IDLE_S = 600.0  # a rank that saves more rarely connects anew
_MOST_PARSED = 1024


def serve_memory(folder: Path, host: str) -> PeerServer:
    """Serve the checkpoints of a node's folder, and copies that ranks of another node send.

    host  address to listen on

    Its `token` has to be set to that of the job.
    """
    images = FolderImages(folder)
    return PeerServer(ImageStore(_KEEP), images, (host, 0), secrets.token_hex(16), _IDLE_S)


class FolderImages(ImageStore):
    """Files of the complete checkpoints of `NodeMemory`, as images. Holds none in memory."""

    def __init__(self, folder: Path) -> None:
        super().__init__(1)
        self._folder = folder
        self._parsed: dict[tuple[Path, int], FileIndex] = {}

    def indexes(self) -> list[FileIndex]:
        """List the indexes of all files."""
        found = []
        for path in sorted(self._folder.glob("step-*/__*.index.json")):
            with suppress(OSError, UnicodeError, CheckpointError):
                found.append(self._index(path))
        return found

    def get(self, rank: int, step: int) -> MemoryImage:
        """Return the file of a rank. Raises `CheckpointError` if it is not there."""
        folder = self._folder / step_name(step)
        try:
            index = self._index(folder / index_name(rank))
            with (folder / data_name(rank)).open("rb") as file:
                view = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"rank {rank} of step {step} is not in memory") from error
        split = index.tensor_bytes
        return MemoryImage(index, [view[:split]], bytes(view[split:]), _nothing)

    def _index(self, path: Path) -> FileIndex:
        """The index in a file, parsed once as long as that does not change."""
        key = path, path.stat().st_mtime_ns
        if key not in self._parsed:
            if len(self._parsed) >= _MOST_PARSED:
                self._parsed.clear()
            self._parsed[key] = read_index(path.read_text(), str(path))
        return self._parsed[key]


def _nothing() -> None:
    """Release an image whose memory is freed with its last view."""
