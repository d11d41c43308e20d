"""Ranks of an ordinary data-parallel job under `resihp.instrument`, one of which hangs on order."""

from __future__ import annotations

import faulthandler
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import resihp

RANKS = 4
_kept: list[object] = []


class _Hang(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order):
        ctx.order = order
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        _carry_out(ctx.order)
        return gradient, None


class Model(torch.nn.Module):
    """Two layers; the rank `rank` obeys orders in `folder`."""

    def __init__(self, rank: int, folder: Path) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        self.order, self.meeting = folder / f"backward-{rank}", folder / f"collective-{rank}"
        self.others = dist.new_group()

    def forward(self, x):
        if self.meeting.exists():
            dist.all_reduce(torch.zeros(1), group=self.others)  # which the others never enter
        return self.second(_Hang.apply(self.first(x), self.order))


class _Batches(Dataset):
    def __init__(self, order: Path) -> None:
        self.order = order

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index):
        _carry_out(self.order)
        return torch.randn(16, 64)


def train(rank: int, host: str, port: int, url: str, folder: Path) -> None:
    """Train until killed; hang where `folder/WHERE-RANK` says for how many seconds."""
    _train(_store(host, port), rank, url, folder)


def train_by_store_of_rank_0(rank: int, host: str, port: int, url: str, folder: Path) -> None:
    """Train as `train` does, with a store of the process group that rank 0 hosts."""
    launcher = _store(host, port)
    if rank == 0:
        store = _store(host, 0, is_master=True)
        launcher.set("port", str(store.port))
    else:
        store = _store(host, int(launcher.get("port")))
    _train(store, rank, url, folder)


def _store(host: str, port: int, *, is_master: bool = False) -> dist.TCPStore:
    patience = timedelta(seconds=300)
    return dist.TCPStore(host, port, is_master=is_master, timeout=patience, wait_for_workers=False)


def _train(store: dist.TCPStore, rank: int, url: str, folder: Path) -> None:
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(Model(rank, folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _kept.append((model, store))
    resihp.instrument(model, optimizer, job="hanging", url=url, interval_s=0.2, heartbeat_s=0.2)
    loader = DataLoader(_Batches(folder / f"loader-{rank}"), batch_size=None)
    evaluation = DataLoader(_Batches(folder / f"evaluation-{rank}"), batch_size=None)
    for batch in loader:
        time.sleep(0.02)
        with torch.no_grad():  # an evaluation by one rank, with a loader of its own
            next(iter(evaluation))
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def order(path: Path, seconds: float) -> None:
    """Order a rank to stay for `seconds` where the name of `path` says."""
    path.with_suffix(".new").write_text(str(seconds))
    path.with_suffix(".new").rename(path)


def _carry_out(path: Path) -> None:
    if path.exists():
        time.sleep(float(path.read_text()))
        path.unlink()
