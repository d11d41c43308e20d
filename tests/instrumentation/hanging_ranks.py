"""Ranks of an ordinary data-parallel job under `resihp.instrument`, one of which hangs on order."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

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


def train(rank: int, host: str, port: int, url: str, folder: Path) -> None:
    """Train until killed; hang where `folder/WHERE-RANK` says for how many seconds."""
    torch.set_num_threads(1)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=300))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    model = DistributedDataParallel(Model(rank, folder))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    _kept.append((model, store))
    resihp.instrument(model, optimizer, job="hanging", url=url, interval_s=0.2, heartbeat_s=0.2)
    while True:
        _carry_out(folder / f"loader-{rank}")
        time.sleep(0.02)
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _carry_out(order: Path) -> None:
    if order.exists():
        time.sleep(float(order.read_text()))
        order.unlink()
