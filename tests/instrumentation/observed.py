"""A loop under `resihp.instrument` in one process, with the records that it makes."""

from __future__ import annotations

import torch
from torch import nn

import resihp
from resihp.contracts import Op, TelemetryBatch
from tests.hooks.conftest import Sidecar

FORWARD, BACKWARD, OPTIMIZER = int(Op.FORWARD), int(Op.BACKWARD), int(Op.OPTIMIZER)


class Model(nn.Module):
    """Two layers, whose output takes the form `form`."""

    def __init__(self, form=lambda y: y) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.form = form
        self.broken = False

    def forward(self, x=None, **kwargs):
        if self.broken:
            raise ValueError("broken batch")
        if x is None:
            x = kwargs["inputs_embeds"]
        return self.form(self.second(torch.relu(self.first(x))))


class Observed:
    """A loop under `instrument`, with the records that reach the sidecar."""

    def __init__(self, target=None, optimizer=True, sidecar=None, **options) -> None:
        self.sidecar = sidecar or Sidecar()
        self.model = target if target is not None else Model()
        own = isinstance(optimizer, bool)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3) if own else optimizer
        self.monitor = resihp.instrument(
            self.model,
            self.optimizer if optimizer else None,
            client=self.sidecar,
            **{"job": "loop", "rank": 0, **options},
        )

    def step(self, microbatches: int = 1) -> None:
        for _ in range(microbatches):
            self.model(torch.ones(2, 3, 4)).square().sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def records(self) -> TelemetryBatch:
        self.monitor.close(300.0)
        return self.sidecar.records

    def passes(self) -> list[tuple[int, int, int]]:
        """(step, op, microbatch) of each record, in order."""
        records = self.records()
        return list(
            zip(
                records.step.tolist(),
                records.op.tolist(),
                records.microbatch.tolist(),
                strict=True,
            )
        )


def one_step(step: int, microbatches: int = 1) -> list[tuple[int, int, int]]:
    passes = [(step, op, m) for m in range(microbatches) for op in (FORWARD, BACKWARD)]
    return [*passes, (step, OPTIMIZER, -1)]
