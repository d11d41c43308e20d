"""What the disk itself can do: direct writes and nothing else."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from resihp.checkpoint.levels.direct_file import DirectFile
from resihp.checkpoint.staging.host_buffer import HostBuffer

CHUNK_BYTES, THREADS = 4 << 20, 4


def limit_s(folder: Path, nbytes: int) -> dict[str, float]:
    """Seconds to make `nbytes` durable: in a new file, and in place of an old file's bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "limit"
    buffer = HostBuffer(CHUNK_BYTES * THREADS)
    buffer.tensor.copy_(torch.randint(0, 255, (len(buffer.view),), dtype=torch.uint8))
    try:
        return {kind: _write_s(path, buffer, nbytes) for kind in ("new", "again")}
    finally:
        path.unlink()
        os.sync()


def _write_s(path: Path, buffer: HostBuffer, nbytes: int) -> float:
    begun = time.perf_counter()
    file = DirectFile.create(path)

    def work(thread: int) -> None:
        view = buffer.view[thread * CHUNK_BYTES : (thread + 1) * CHUNK_BYTES]
        for start in range(thread * CHUNK_BYTES, nbytes, THREADS * CHUNK_BYTES):
            file.write(view, start)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    file.sync()
    file.close()
    return time.perf_counter() - begun
