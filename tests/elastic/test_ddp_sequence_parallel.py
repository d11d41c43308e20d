"""Replicas whose members share a sequence: norms get partial gradients, which are made whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from resihp.elastic.ddp.replicas import Replicas
from tests.elastic.ddp_faults import LoopFault
from tests.elastic.ddp_loops import Loop, batch, play


def train(model: nn.Module, loop: Loop, begin: Callable[..., Replicas], tell: Any) -> None:
    """A loop without dropout, whose random numbers would be each member's own."""
    model.eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    replicas = begin(model, optimizer)
    for step in replicas.steps(loop.steps):
        for index in step:
            x = batch(step.number, index)
            loss = functional.mse_loss(model(x), x.roll(1, dims=1)) / loop.microbatches
            loss.backward()
            step.report(loss)
            tell(step, index)
        optimizer.step()
        tell(step, None)


@pytest.mark.parametrize("deterministic", [False, True])
def test_norms_train_alike(deterministic: bool, tmp_path: Path) -> None:
    """The second replica is lost when the first has added up its own, and comes back empty."""
    alone = play(Loop(1, train=train), tmp_path / "alone")
    loop = Loop(
        2,
        members=2,
        inner="sequence parallel",
        train=train,
        deterministic=deterministic,
        faults=(LoopFault(2, 1, at="sum"),),
        returns=((1, 1),),
    )
    trace = play(loop, tmp_path / "shared")
    assert trace.exit_codes == dict.fromkeys(range(4), 0), trace.logs
    assert trace.losses == pytest.approx(alone.losses, rel=1e-5), trace.logs
    for model in trace.models.values():
        for key, tensor in model.items():
            torch.testing.assert_close(tensor, alone.models[0][key], rtol=1e-3, atol=1e-5)
