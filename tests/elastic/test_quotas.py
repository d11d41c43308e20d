"""Plain DDP loops with quotas: the training of the undisturbed job, whatever the source says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from resihp.contracts import ContractError, Layout, PeerLostError, Plan, ServiceError
from resihp.elastic import Quotas
from resihp.elastic.ddp.quotas import QuotaStep
from resihp.testing.local_ranks import LocalRanks
from tests.elastic.quota_loops import (
    MICROBATCHES,
    WIDTH,
    QuotaLoop,
    batch,
    build_model,
    build_optimizer,
    loss_of,
    run,
    tokens_of,
    undisturbed,
)

GRID = Layout.grid(dp=3, pp=1, tp=1, layers=1)


def plan(version: int, *quotas: int, layout: Layout = GRID) -> Plan:
    return Plan(version=version, layout=layout, quotas=quotas)


def play(loop: QuotaLoop, folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank kept of each step and, at the end, of its source."""
    with LocalRanks("quotas", folder) as ranks:
        ranks.start(range(loop.ranks), run, loop, folder)
        assert set(ranks.wait(300).values()) == {0}, ranks.logs()
    return [torch.load(folder / f"rank-{rank}.pt") for rank in range(loop.ranks)]


def assert_same_training(loop: QuotaLoop, kept: list[list[dict[str, Any]]]) -> None:
    for number, gradients in enumerate(undisturbed(loop)):
        steps = [of_rank[number] for of_rank in kept]
        taken = sorted(index for step in steps for index in step["own"])
        assert taken == list(range(MICROBATCHES))
        assert len({(step["quotas"], step["version"]) for step in steps}) == 1
        for step in steps:
            for ours, theirs in zip(step["gradients"], gradients, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_plans_late_twice_old_malformed_and_of_another_layout(tmp_path: Path) -> None:
    """A plan that leaves a rank without microbatches is taken with one for it."""
    loop = QuotaLoop(
        steps=12,
        offers=(
            ServiceError("the sidecar is gone"),
            "no plan at all",
            plan(1, 5, 4, layout=Layout.grid(dp=2, pp=1, tp=1, layers=1)),
            plan(2, 5, 3, 2),
            plan(3, 5, 3, 1),
            plan(3, 4, 4, 1),
            plan(2, 3, 3, 3),
            plan(9, 7, 2, 0),
        ),
        due=((1, 3), (6, 9)),
    )
    kept = play(loop, tmp_path)
    assert_same_training(loop, kept)
    seen = [(step["version"], step["quotas"]) for step in kept[0][:-1]]
    assert seen[:3] == [(0, (3, 3, 3))] * 3
    assert seen[3:5] == [(3, (5, 3, 1))] * 2
    assert seen[-1] == (9, (6, 2, 1))
    end = kept[0][-1]
    assert set(end["told"]) >= {("refused", 1), ("refused", 2), ("applied", 3)}
    assert end["failures"] == 4
    assert kept[1][-1]["failures"] == 0


@pytest.mark.parametrize("kind", ["tokens", "work"])
def test_unequal_microbatches(kind: str, tmp_path: Path) -> None:
    loop = QuotaLoop(kind, offers=(plan(1, 4, 4, 1),), due=((1, 1),), ahead=2)
    kept = play(loop, tmp_path)
    assert_same_training(loop, kept)
    versions = [step["version"] for step in kept[0][:-1]]
    assert (versions[:4], versions[-1]) == ([0] * 4, 1)
    if kind == "work":
        step = loop.steps - 1
        shares = [sum(tokens_of(step, i) for i in of_rank[step]["own"]) for of_rank in kept]
        assert shares[2] < min(shares[:2]) / 2


def test_ranks_that_cannot_agree_any_more_train_on(tmp_path: Path) -> None:
    """No rank waits for the one that is cut off; the quotas stay as they were."""
    loop = QuotaLoop(offers=(plan(1, 4, 4, 1),), due=((1, 1),), deaf_at=3)
    kept = play(loop, tmp_path)
    assert_same_training(loop, kept)
    assert kept[0][-2]["quotas"] == (4, 4, 1)
    assert [of_rank[-1]["failures"] for of_rank in kept] == [1, 1, 1]


@pytest.mark.parametrize("changes", [25, pytest.param(100, marks=pytest.mark.soak)])
def test_many_changes_leave_nothing_behind(changes: int, tmp_path: Path) -> None:
    offers = tuple(plan(v + 1, *((2, 1, 6) if v % 2 else (6, 2, 1))) for v in range(changes))
    loop = QuotaLoop(steps=4 * changes + 4, offers=offers, every=4)
    kept = play(loop, tmp_path)
    assert_same_training(loop, kept)
    for of_rank in kept:
        versions = [step["version"] for step in of_rank[3:-1:4]]
        assert versions == [*range(1, changes + 1), changes]
        early, late = of_rank[changes // 2 : changes * 2], of_rank[-changes - 1 : -1]
        for what in ("threads", "files"):
            assert max(step[what] for step in late) <= max(step[what] for step in early), what


def test_fsdp2(tmp_path: Path) -> None:
    """Ranks with different numbers of microbatches do not wait for each other in between."""
    offer = plan(1, 8, 1, layout=Layout.grid(dp=2, pp=1, tp=1, layers=1))
    loop = QuotaLoop(ranks=2, sharded=True, offers=(offer,), due=((1, 1),))
    kept = play(loop, tmp_path)
    assert_same_training(loop, kept)
    assert kept[0][-2]["quotas"] == (8, 1)


@pytest.fixture
def alone() -> Iterator[None]:
    """A job of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_a_process_group() -> None:
    with pytest.raises(ContractError, match="init_process_group"):
        Quotas(microbatches=2)


@pytest.mark.usefixtures("alone")
def test_fewer_microbatches_than_ranks() -> None:
    with pytest.raises(ContractError, match="must be 1 or more"):
        Quotas(microbatches=0)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"ahead": -1}, "ahead: must be 0 or more, not -1"),
        ({"ahead": 1.5}, "ahead: must be a whole number, not 1.5"),
        ({"microbatches": "2"}, "microbatches: must be a whole number, not '2'"),
        ({"microbatches": 2.0}, "microbatches: must be a whole number, not 2.0"),
    ],
)
def test_numbers_that_are_none(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ContractError) as refused:
        Quotas(**{"microbatches": 2, **given})
    assert str(refused.value) == problem


@pytest.mark.usefixtures("alone")
def test_a_model_that_communicates_in_each_microbatch_is_refused() -> None:
    step = next(Quotas(microbatches=2).steps(1))
    with pytest.raises(ContractError, match="neither DistributedDataParallel nor sharded"):
        step.sync(nn.Linear(2, 2))
    model = DistributedDataParallel(nn.Sequential(nn.Linear(2, 2)))
    model.module.append(nn.SyncBatchNorm(2))
    with pytest.raises(ContractError, match="use GroupNorm"):
        step.sync(model)
    with pytest.raises(ContractError, match="static_graph=True"):
        step.sync(DistributedDataParallel(nn.Linear(2, 2), static_graph=True))
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ContractError, match="several dimensions"):
        step.sync(fully_shard(nn.Linear(2, 2), mesh=mesh))


@pytest.mark.usefixtures("alone")
def test_fsdp2_is_evaluated_before_the_first_step() -> None:
    """It leaves the parameters of the root gathered."""
    model = fully_shard(build_model())
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    for step in Quotas(microbatches=2).steps(1):
        for _ in step:
            with step.sync(model):
                model(torch.ones(1, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("shards_root", [False, True])
def test_fsdp2_is_evaluated_between_backward_and_update(shards_root: bool) -> None:
    """The next step computes with the updated parameters."""
    loop, inner = QuotaLoop(steps=3), build_model()
    fully_shard(inner[0])
    if not shards_root:
        fully_shard(inner[2])
    model, optimizer = fully_shard(inner), build_optimizer(inner)
    expected = undisturbed(loop)
    for step in Quotas(microbatches=MICROBATCHES).steps(loop.steps):
        for index in step:
            with step.sync(model):
                x = batch(loop, step.number, index)
                (loss_of(loop, model, x) * step.scale).backward()
        with torch.no_grad():
            model(x)
        for parameter, gradient in zip(inner.parameters(), expected[step.number], strict=True):
            torch.testing.assert_close(parameter.grad.full_tensor(), gradient)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("fails", [False, True])
def test_fsdp2_leaves_a_step_before_its_end(fails: bool) -> None:
    """Neither its gradients nor its settings get into what comes behind it."""
    loop, inner = QuotaLoop(steps=2), build_model()
    fully_shard(inner[0], reshard_after_forward=True)
    model = fully_shard(inner)
    quotas = Quotas(microbatches=MICROBATCHES)

    def passes(step: QuotaStep, taken: int) -> None:
        for index in islice(step, taken):
            with step.sync(model):
                x = batch(loop, step.number, index)
                (loss_of(loop, model, x) * step.scale).backward()
                if fails and index == taken - 1 and step.number == 7:
                    raise MemoryError

    with pytest.raises(MemoryError) if fails else nullcontext():
        passes(quotas.begin(7), 3)
    quotas.leave_step()
    assert all(isinstance(parameter, DTensor) for parameter in inner.parameters())
    with torch.no_grad():
        model(torch.ones(1, WIDTH))
    assert isinstance(inner[0].weight, DTensor), "forward reshards again"
    expected = undisturbed(loop)
    passes(quotas.begin(0), MICROBATCHES)
    for parameter, gradient in zip(inner.parameters(), expected[0], strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), gradient)  # type: ignore[union-attr]
    quotas.finish()


@pytest.mark.usefixtures("alone")
def test_a_step_that_is_not_taken_to_its_end() -> None:
    steps = Quotas(microbatches=2).steps(2)
    next(iter(next(steps)))
    with pytest.raises(ContractError, match="not all of its microbatches"):
        next(steps)


def taken_at_once(step: QuotaStep) -> Iterator[int]:
    yield from list(step)


def taken_one_ahead(step: QuotaStep) -> Iterator[int]:
    rest = iter(step)
    present = next(rest)
    for index in rest:
        yield present
        present = index
    yield present


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("take", [taken_at_once, taken_one_ahead])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_microbatches_taken_ahead_of_their_passes(
    take: Callable[[QuotaStep], Iterator[int]], microbatches: int
) -> None:
    """Each would count as the last one: with unequal quotas the ranks would wait for each other."""
    model = DistributedDataParallel(nn.Linear(2, 2))
    with pytest.raises(ContractError, match="before the next is taken"):  # noqa: PT012
        for step in Quotas(microbatches=microbatches).steps(1):
            for _ in take(step):
                with step.sync(model):
                    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.usefixtures("alone")
def test_steps_that_a_trainer_begins() -> None:
    quotas = Quotas(microbatches=4, ahead=1)
    assert quotas.assigned(7) == (0, 1, 2, 3)
    assert next(iter(quotas.begin(8))) == 0
    quotas.leave_step()
    assert quotas.assigned(9, microbatches=2) == (0, 1)
    with pytest.raises(ContractError, match="is 1, not 2"):
        quotas.assigned(10)
    step = quotas.begin(9, microbatches=2)
    assert (step.quotas, step.scale) == ((2,), 0.5)
    with pytest.raises(ContractError, match="not all of its microbatches"):
        quotas.begin(10)
    assert step.microbatches == (0, 1)
    quotas.leave_step()
    with pytest.raises(ContractError, match="0 for 1 ranks"):
        quotas.begin(10, microbatches=0)
    quotas.finish()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("work", [[1.0], [1.0, 0.0], [1.0, float("nan")]])
def test_work_that_cannot_be(work: list[float]) -> None:
    with pytest.raises(ContractError, match="2 numbers above 0"):
        next(Quotas(microbatches=2, work=lambda step: work).steps(1))


@pytest.mark.usefixtures("alone")
def test_weights_that_sum_to_nothing() -> None:
    with pytest.raises(ContractError, match="sum to 0"):
        next(Quotas(microbatches=2).steps(1)).scale_for(1.0, 0.0)


@pytest.mark.usefixtures("alone")
def test_a_default_device_is_not_that_of_what_the_ranks_tell_each_other() -> None:
    model, x, taken = DistributedDataParallel(nn.Linear(2, 2)), torch.ones(1, 2), []
    with torch.device("meta"):
        quotas = Quotas(microbatches=2)
        for step in quotas.steps(3):
            for index in step:
                with step.sync(model):
                    model(x).sum().backward()
                taken.append(index)
        assert (taken, quotas.failures, quotas.total(2.0)) == ([0, 1] * 3, 0, 2.0)


@pytest.mark.usefixtures("alone")
def test_weights_that_ranks_cannot_sum_as_they_have_lost_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    quotas = Quotas(microbatches=2)
    monkeypatch.setattr(dist, "all_reduce", fail)
    with pytest.raises(PeerLostError, match="Connection closed by peer"):
        quotas.total(1.0)
