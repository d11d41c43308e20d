"""Ranks of an ordinary data-parallel job, with hooks and nothing else of ours."""

from __future__ import annotations

import faulthandler
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resihp.contracts import Job, Layout
from resihp.hooks import Monitor

RANKS = 4
JOB = Job(name="ddp", layout=Layout.grid(dp=RANKS, pp=1, tp=1, layers=2), microbatches=2 * RANKS)


_kept: list[object] = []
"""Until the process has ended: torch's destructors may wait for its threads with the GIL held."""


def order(folder: Path, rank: int, what: str, seconds: float = 0.0) -> Path:
    """Order a rank to `pause` in an evaluation, to `hang` in a backward pass or to `stop`. The file
    returned is gone once the rank has carried it out."""
    path = folder / f"{what}-{rank}"
    path.with_suffix(".new").write_text(str(seconds))
    return path.with_suffix(".new").rename(path)


def train(rank: int, host: str, port: int, url: str, folder: Path) -> None:
    """Train until all ranks are ordered to stop."""
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in "ab")))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    monitor = Monitor(job=JOB, url=url, rank=rank, interval_s=0.2, heartbeat_s=0.2)

    def microbatch(seconds: Path | None) -> None:
        with monitor.forward(seq_lens=[32, 32]):
            time.sleep(0.005)
            loss = model(torch.randn(16, 64)).square().mean()
        with monitor.backward():
            _carry_out(seconds)
            loss.backward()

    @monitor.step
    def step() -> None:
        with model.no_sync():
            microbatch(folder / f"hang-{rank}")
        microbatch(None)
        with monitor.optimizer():
            optimizer.step()
            optimizer.zero_grad()

    stop = torch.zeros(1)
    while not stop:
        step()
        _carry_out(folder / f"pause-{rank}")
        stop[0] = float((folder / f"stop-{rank}").exists())
        dist.all_reduce(stop)
    _kept.append((model, store))


def _carry_out(order: Path | None) -> None:
    if order is not None and order.exists():
        time.sleep(float(order.read_text()))
        order.unlink()
