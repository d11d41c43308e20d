"""What must not change a step without a word: stops, odd losses, unequal microbatches, bf16."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from resihp.elastic.ddp.replicas import Replicas
from tests.elastic.ddp_faults import LoopFault
from tests.elastic.ddp_loops import WIDTH, Loop, Trace, build_model, play
from tests.elastic.engine_job import BRISK

STEPS, MICROBATCHES = 4, 8
POINTS = ("microbatch", "sum", "vote", "commit", "after")
Begin = Callable[..., Replicas]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Trace:
    """The undisturbed run, summed in the fixed order."""
    return play(Loop(1, deterministic=True), tmp_path_factory.mktemp("exact"))


def assert_same_bits(trace: Trace, exact: Trace) -> None:
    assert trace.losses == exact.losses, trace.logs
    for step in range(STEPS):
        first = step * MICROBATCHES
        assert trace.summed[step] == list(range(first, first + MICROBATCHES)), trace.logs
    for model in trace.models.values():
        assert all(torch.equal(model[key], exact.models[0][key]) for key in model)


@pytest.mark.parametrize(
    "at",
    ["sum", "vote", *(pytest.param(at, marks=pytest.mark.soak) for at in POINTS)],
)
def test_stopped_and_let_go_on_before_it_is_given_up(at: str, exact: Trace, tmp_path: Path) -> None:
    """Slow but alive: the others wait, and nobody is lost."""
    fault = LoopFault(1, 1, at=at, signal=signal.SIGSTOP, resume_s=0.5)
    trace = play(Loop(3, faults=(fault,), deterministic=True), tmp_path)
    assert set(trace.exit_codes.values()) == {0}, trace.logs
    assert trace.alive[STEPS - 1] == [0, 1, 2]
    assert_same_bits(trace, exact)


@pytest.mark.parametrize(
    "at",
    ["vote", "commit", *(pytest.param(at, marks=pytest.mark.soak) for at in POINTS)],
)
def test_stopped_and_let_go_on_when_it_has_been_given_up(
    at: str, exact: Trace, tmp_path: Path
) -> None:
    """It finds that the others have gone on without it, and ends without having touched them."""
    fault = LoopFault(1, 1, at=at, signal=signal.SIGSTOP, resume_s=math.inf)
    trace = play(Loop(3, faults=(fault,), deterministic=True, timeouts=BRISK), tmp_path)
    assert trace.exit_codes == {0: 0, 1: 75, 2: 0}, trace.logs
    assert "rank 1 was given up by the other ranks" in trace.logs
    assert trace.alive[STEPS - 1] == [0, 2]
    assert_same_bits(trace, exact)


def test_a_stopped_member_ends_its_replica_and_stops_nobody_else(tmp_path: Path) -> None:
    """The other member is stuck in an exchange with it, and beats: it is not waited for.

    It ends long before the time-out of that exchange, and so does the stopped one when it goes on.
    """
    alone = play(Loop(1, deterministic=True), tmp_path / "alone")
    fault = LoopFault(3, 1, signal=signal.SIGSTOP, resume_s=math.inf)
    loop = Loop(2, members=2, faults=(fault,), deterministic=True, timeouts=BRISK)
    trace = play(loop, tmp_path, timeout_s=300)
    assert trace.exit_codes == {0: 0, 1: 0, 2: 75, 3: 75}, trace.logs
    assert "rank 2: FencedOutError: it is blocked" in trace.logs
    assert trace.losses == pytest.approx(alone.losses, rel=1e-6)


def train_to_nan(model: nn.Module, loop: Loop, begin: Begin, tell: Any) -> None:
    """One microbatch diverges; the loop skips the update of that step, as many do."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = begin(model, optimizer)
    for step in replicas.steps(loop.steps):
        for index in step:
            x = torch.full((2, WIDTH), 0.1 * index + step.number)
            torch.manual_seed(index)
            loss = functional.mse_loss(model(x), x) / loop.microbatches
            if (step.number, index) == (1, 5):
                loss = loss * math.nan
            loss.backward()
            step.report(loss)
            tell(step, index)
        if not math.isnan(step.loss):
            optimizer.step()
        tell(step, None)


def test_a_loss_that_is_not_a_number_is_one_on_all_replicas(tmp_path: Path) -> None:
    """Also if the replica that has computed it dies, and another one computes it again."""
    alone = play(Loop(1, train=train_to_nan, deterministic=True), tmp_path / "alone")
    fault = LoopFault(1, 1, at="sum")
    trace = play(Loop(3, train=train_to_nan, faults=(fault,), deterministic=True), tmp_path)
    assert [step for step, loss in trace.losses.items() if math.isnan(loss)] == [1]
    assert all(trace.losses[step] == alone.losses[step] for step in (0, 2, 3)), trace.logs
    for model in trace.models.values():
        assert all(torch.equal(model[key], alone.models[0][key]) for key in model)


def tokens(step: int, index: int) -> int:
    """Microbatches of very different sizes."""
    return 1 + (7 * step + 5 * index) % 11


def train_by_token(model: nn.Module, loop: Loop, begin: Begin, tell: Any) -> None:
    """Losses are sums over tokens; the weights make the step a mean over its tokens."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replicas = begin(model, optimizer)
    for step in replicas.steps(loop.steps):
        for index in step:
            torch.manual_seed(100 * step.number + index)
            count = tokens(step.number, index)
            x = torch.randn(count, WIDTH)
            loss = (model(x) - x.roll(1, dims=1)).square().mean(dim=1).sum()
            loss.backward()
            step.report(loss, weight=count)
            tell(step, index)
        assert step.weight == sum(tokens(step.number, i) for i in range(loop.microbatches))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        tell(step, None)


def by_hand(steps: int) -> list[float]:
    """The same training without us: one batch of all tokens a step, their mean loss."""
    model, losses = build_model(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        parts = []
        for index in range(MICROBATCHES):
            torch.manual_seed(100 * step + index)
            x = torch.randn(tokens(step, index), WIDTH)
            parts.append((model(x) - x.roll(1, dims=1)).square().mean(dim=1))
        loss = torch.cat(parts).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("at", ["", "microbatch", "vote", "commit"])
def test_microbatches_of_unequal_token_counts(at: str, tmp_path: Path) -> None:
    faults = (LoopFault(1, 1, at=at),) if at else ()
    trace = play(Loop(3, train=train_by_token, faults=faults), tmp_path)
    assert [trace.losses[step] for step in range(STEPS)] == pytest.approx(by_hand(STEPS), rel=1e-5)


def train_in_bf16(model: nn.Module, loop: Loop, begin: Begin, tell: Any) -> None:
    """Autocast, a gradient scaler, clipping, a schedule; the state of all goes to newcomers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    replicas = begin(model, optimizer, state={"schedule": schedule, "scaler": scaler})
    for step in replicas.steps(loop.steps):
        for index in step:
            torch.manual_seed(100 * step.number + index)
            x = torch.randn(4, WIDTH)
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.mse_loss(model(x), x.roll(1, dims=1)) / loop.microbatches
            scaler.scale(loss).backward()
            step.report(loss)
            tell(step, index)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        tell(step, None)


def test_mixed_precision_clipping_and_schedules(tmp_path: Path) -> None:
    steps = 8
    alone = play(Loop(1, train=train_in_bf16, steps=steps, deterministic=True), tmp_path / "alone")
    faults = (LoopFault(1, 1, at="sum"), LoopFault(0, 6), LoopFault(2, 6))
    loop = Loop(
        3, train=train_in_bf16, steps=steps, faults=faults, returns=((1, 2),), deterministic=True
    )
    trace = play(loop, tmp_path)
    assert trace.losses == alone.losses, trace.logs
    assert trace.models[1].keys() == alone.models[0].keys()
    assert all(torch.equal(trace.models[1][k], v) for k, v in alone.models[0].items())
