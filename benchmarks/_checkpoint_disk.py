"""Limits of the disk: direct writes and nothing else."""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from resihp.checkpoint.levels.direct_file import DirectFile
from resihp.checkpoint.staging.host_buffer import HostBuffer

CHUNK_BYTES, THREADS = 4 << 20, 2
TRIES = 3


def limit_s(folder: Path, nbytes: int) -> dict[str, float]:
    """Median seconds to make `nbytes` of memory durable.

    new    in a new file, including its allocation
    again  over an existing file
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, buffer = folder / "limit", HostBuffer(nbytes // 4096 * 4096)
    noise = torch.randint(0, 255, (CHUNK_BYTES,), dtype=torch.uint8)
    for piece in buffer.tensor.split(CHUNK_BYTES):
        piece.copy_(noise[: len(piece)])
    times: dict[str, list[float]] = {"new": [], "again": []}
    for _ in range(TRIES):
        for kind in ("new", "again"):
            times[kind].append(write_s(path, buffer))
        path.unlink()
        os.sync()
    return {kind: statistics.median(each) for kind, each in times.items()}


def write_s(path: Path, buffer: HostBuffer) -> float:
    """Seconds to make a whole buffer durable."""
    begun = time.perf_counter()
    file = DirectFile.create(path)

    def work(thread: int) -> None:
        for start in range(thread * CHUNK_BYTES, len(buffer.view), THREADS * CHUNK_BYTES):
            file.write([buffer.view[start : start + CHUNK_BYTES]], start)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, range(THREADS)))
    file.sync()
    file.close()
    return time.perf_counter() - begun
