"""Ranks of a data-parallel job that truly compute, and read their data through memory.

Nothing is emulated, so that what the kernel does to a rank is what the records show. A pass takes
some milliseconds of one core; between steps a rank sleeps, so that a few of them share two cores.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

RANKS = 3
PAGES = 300
"""Pages of the data that a forward pass reads."""
DATA_BYTES = 48 << 20
_kept: list[object] = []


def write_data(file: Path) -> None:
    """Write the data of a rank to a disk, and leave none of it in memory."""
    with file.open("wb") as written:
        written.write(os.urandom(1 << 20) * (DATA_BYTES >> 20))
        os.fsync(written.fileno())
        os.posix_fadvise(written.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Computing(nn.Module):
    """A model whose passes take `matmuls` products of matrices, after reading its data."""

    def __init__(self, data: mmap.mmap, matmuls: int) -> None:
        super().__init__()
        self.layer = nn.Linear(192, 192)
        self.data, self.matmuls = data, matmuls
        self.draw = random.Random(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(PAGES):
            self.data[self.draw.randrange(len(self.data))]
        for _ in range(self.matmuls):
            x = torch.tanh(self.layer(x))
        return x


def train(rank: int, host: str, port: int, url: str, job: str, folder: Path) -> None:
    """Train until the file `stop` is there, on one core each; the step is in the file `step`."""
    import resihp

    torch.set_num_threads(1)
    torch.manual_seed(0)
    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    while not (folder / "go").exists():
        time.sleep(0.02)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=120))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    with (folder / f"data-{rank}").open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for page in range(0, len(data), mmap.PAGESIZE):  # all of it is in memory from the start
        data[page]
    data.madvise(mmap.MADV_RANDOM)
    model = DistributedDataParallel(Computing(data, matmuls=40))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = resihp.instrument(
        model, optimizer, job=job, url=url, heartbeat_s=0.2, interval_s=0.2, probes=False
    )
    _kept.append((model, store))
    stop = torch.zeros(1)
    step = 0
    while not stop:
        time.sleep(0.08)
        model(torch.randn(96, 192)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if rank == 0:
            with contextlib.suppress(OSError):
                (folder / "step").write_text(str(step))
        stop[0] = float((folder / "stop").exists())
        dist.all_reduce(stop)
    print(monitor.stats, flush=True)  # noqa: T201 the log of a test
    monitor.close(10.0)
    dist.barrier()
