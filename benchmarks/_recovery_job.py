"""The job that every contender of `benchmarks.recovery` runs, and the record of what it did.

Needs torch alone, so that it runs in the peer's environment too.
"""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

REPLICAS, MICROBATCHES, STEPS = 4, 16, 90
HOLD_S = 0.05
"""A device's time for a microbatch. The real computation is far shorter; the rest is slept, so
that replicas do not slow each other where there are fewer cores than replicas."""

WIDTH, LAYERS = 512, 4
PLACES = {30: 3, 60: 2}
"""Step -> replica that is killed in it, in the middle of its share; later if it has none then."""


def build_model() -> nn.Module:
    """The same in every process; about a million parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4)


@dataclass
class Diary:
    """Writes what one process does and when, on the machine's monotonic clock."""

    replica: int
    path: Path
    may_die: bool = True

    def tell(self, what: str, step: int) -> None:
        """Write a line; it survives the process."""
        line = {"what": what, "step": step, "replica": self.replica, "at": time.monotonic()}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def compute(self, model: nn.Module, step: int, index: int, done: int, share: int) -> None:
        """Forward and backward of microbatch `index`, the `done`-th (from 0) of this share."""
        begun = time.perf_counter()
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(1000 * step + index))
        functional.mse_loss(model(x), x.roll(1, dims=1)).div(MICROBATCHES).backward()
        is_due = any(step >= place for place, rank in PLACES.items() if rank == self.replica)
        if self.may_die and is_due and done == share // 2:
            self.tell("killed", step)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(max(0.0, HOLD_S - (time.perf_counter() - begun)))
        self.tell("microbatch", step)
