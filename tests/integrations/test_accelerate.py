"""`resihp.instrument` on what Accelerate's `prepare` returned, and loops with quotas."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from resihp.contracts import ContractError

from .conftest import Run, run_ranks

pytestmark = [pytest.mark.integrations, pytest.mark.filterwarnings("default")]
RANKS = 3


def test_a_slow_rank_is_named(run: Run) -> None:
    training = run("accelerate_loop.py", "--slow-rank", "1")
    training.assert_named(1)
    training.assert_sent(250, loads=100)  # of 50 steps of two microbatches


@pytest.fixture(scope="module")
def loops(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What each rank kept of the loops with and without quotas."""
    import torch

    folder: Path = tmp_path_factory.mktemp("loops")
    run_ranks(f"{__package__}.accelerate_loops", folder, RANKS)
    names = ("undisturbed", "quotas", "resumed", "left", "left-resumed")
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt") for rank in range(RANKS)] for name in names
    }


@pytest.mark.parametrize(("name", "last_quotas"), [("quotas", (5, 3, 1)), ("resumed", (1, 2, 6))])
def test_quotas_train_what_the_undisturbed_loop_trains(
    name: str, last_quotas: tuple[int, ...], loops: dict[str, list[dict[str, Any]]]
) -> None:
    import torch

    ours, theirs = loops[name], loops["undisturbed"]
    first = ours[0]["first"]
    assert last_quotas in ours[0]["quotas"]
    assert ours[0]["told"] == [f"applied {last_quotas}"]
    assert len(ours[0]["taken"]) == len(theirs[0]["taken"]) - first
    for step, counts in enumerate(ours[0]["quotas"]):
        assert [len(rank["taken"][step]) for rank in ours] == [2 * quota for quota in counts]
        taken = sorted(one for rank in ours for one in rank["taken"][step])
        assert taken == sorted(one for rank in theirs for one in rank["taken"][first + step])
    for rank in ours:
        for key, tensor in rank["model"].items():
            torch.testing.assert_close(tensor, theirs[0]["model"][key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "done"), [("left", 0), ("left-resumed", 3)])
def test_a_pass_that_is_left_early_is_followed_by_a_whole_one(
    name: str, done: int, loops: dict[str, list[dict[str, Any]]]
) -> None:
    """Also where a training goes on in the middle of a later one."""
    of_step = [
        sorted(one for rank in step for one in rank)
        for step in zip(*(rank["taken"] for rank in loops[name]), strict=True)
    ]
    assert of_step == ([list(range(18)), list(range(18, 36))] * 3)[done:]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_even_quotas_give_each_rank_its_own_batches(size: int, ranks: int) -> None:
    """However many samples the last batch lacks, which those of the beginning complete."""
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    from resihp.integrations._quotas import QuotaBatches

    for samples, accumulation, rank in product(range(1, 2 * size * ranks), (1, 2, 3), range(ranks)):
        shard = BatchSamplerShard(BatchSampler(range(samples), size, False), ranks, rank)
        own = list(shard)

        def assigned(number: int, *, microbatches: int, rank: int = rank) -> range:
            return range(rank, microbatches, ranks)

        quotas: Any = SimpleNamespace(assigned=assigned)
        loader = SimpleNamespace(batch_sampler=shard)
        QuotaBatches(loader, accumulation, quotas, lambda: 0).use()
        assert list(shard) == own, f"{samples} samples, rank {rank}"


def test_data_of_one_rank_are_refused() -> None:
    import torch
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    from resihp.integrations.accelerate import QuotaSteps

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    data = DataLoader(TensorDataset(torch.zeros(8, 2)))
    prepared = Accelerator(cpu=True).prepare(model, optimizer, data)
    with pytest.raises(ContractError, match="there is one rank"):
        QuotaSteps(*prepared, accumulation=2)


def test_the_quota_of_a_slow_rank_falls(run: Run) -> None:
    training = run("accelerate_quotas.py", "--slow-rank", "1")
    training.assert_named(1)
    printed = re.findall(r"quotas (\d+) (\d+) (\d+)", training.output)
    assert printed[0] == ("4", "4", "4")
    assert int(printed[-1][1]) < 4, training.output
