"""Data iterators with a cursor: the same microbatches whatever becomes of the layout."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from resihp.contracts import ContractError, Layout, Plan
from resihp.elastic.models import Packed
from resihp.elastic.optim import Optimizer
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.reshard.transfer import distribute_replicated_state
from resihp.elastic.step import Cursor, IteratorData, Setup
from resihp.elastic.step.shard import initial_shard
from resihp.elastic.trainer import Trainer
from tests.elastic.test_models import MODELS, OPTIMIZER, SHAPE, batch
from tests.elastic.threads import on_ranks, train

MICROBATCHES = 3


class Shuffled:
    """An endless iterator whose next microbatch depends on all that it has drawn before."""

    def __init__(self) -> None:
        self._random, self.drawn = random.Random(0), 0

    def __next__(self) -> Packed:
        self.drawn += 1
        return batch(self._random.randrange(100), 0)

    def state_dict(self) -> dict[str, Any]:
        version, words, gauss = self._random.getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        words = tuple(state["words"].tolist())
        self._random.setstate((state["version"], words, state["gauss"]))


def test_microbatches_can_be_asked_for_again_until_the_step_is_finished() -> None:
    data = IteratorData(Shuffled(), MICROBATCHES)
    assert isinstance(data, Cursor)
    assert not isinstance(batch, Cursor)
    first = [data(0, index).tokens for index in range(MICROBATCHES)]
    began = data.state_dict()
    assert torch.equal(data(0, 1).tokens, first[1])
    data.finish(0)
    second = data(1, 0).tokens

    again = IteratorData(Shuffled(), MICROBATCHES)
    again.load_state_dict(began)
    assert torch.equal(again(0, 2).tokens, first[2])
    again.finish(0)
    again.finish(1)  # by a rank that was given none of its microbatches
    data.finish(1)
    assert torch.equal(again(2, 0).tokens, data(2, 0).tokens)
    assert not torch.equal(second, data(2, 0).tokens)


class Counting:
    """An iterator that gives the very state that it changes, and keeps the one that it is given."""

    def __init__(self) -> None:
        self.state = {"drawn": 0}

    def __next__(self) -> Packed:
        self.state["drawn"] += 1
        return batch(self.state["drawn"], 0)

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def test_the_state_of_a_step_is_that_of_its_begin() -> None:
    data = IteratorData(Counting(), MICROBATCHES)
    data(0, 0)
    assert data.state_dict() == {"drawn": 0}
    data.finish(0)
    data(1, 0)
    assert data.state_dict() == {"drawn": 3}

    joined = IteratorData(Counting(), MICROBATCHES)
    joined.load_state_dict({"drawn": 3})
    joined(1, 0)
    assert joined.state_dict() == {"drawn": 3}


class Ending(Shuffled):
    """As it is, but ends after four microbatches."""

    def __next__(self) -> Packed:
        if self.drawn == 4:
            raise StopIteration
        return super().__next__()


def test_an_iterator_that_ends_within_a_step_is_named() -> None:
    data = IteratorData(Ending(), MICROBATCHES)
    data.finish(0)
    with pytest.raises(ContractError, match="data: ended after 1 of 3 microbatches of the step"):
        data(1, 0)


def test_data_with_another_number_of_microbatches_is_refused() -> None:
    setup = Setup(MODELS["llama"], OPTIMIZER, IteratorData(Shuffled(), MICROBATCHES))
    plan = Plan(version=0, layout=Layout.grid(dp=1, pp=1, tp=1, layers=SHAPE.layers), quotas=(4,))
    with pytest.raises(ContractError, match="data: takes 3 microbatches per step, the job has 4"):
        Trainer(setup, plan, SimpleNamespace(rank=0), None)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", [OPTIMIZER, Optimizer(torch.optim.NAdam, lr=1e-2)])
def test_a_rank_that_comes_in_takes_over_step_scalars_and_cursor(optimizer: Optimizer) -> None:
    """Ranks 0 and 1 have trained; rank 2 comes into the next generation, and goes on like them."""
    steps, old = 2, Layout.grid(dp=2, pp=1, tp=1, layers=SHAPE.layers)
    sources = {rank: IteratorData(Shuffled(), MICROBATCHES) for rank in range(3)}
    setups = {rank: Setup(MODELS["llama"], optimizer, data) for rank, data in sources.items()}

    def trained(factory: ProcessGroupFactory) -> tuple[int, torch.Tensor, torch.Tensor]:
        setup, rank = setups[factory.rank], factory.rank
        group = factory.group("transit", (0, 1, 2))
        shard = None
        if rank < 2:
            shard = run.shards[rank]
            for step in range(steps):
                sources[rank].finish(step)
        groups = build_layout_groups(factory, NEXT, setup.model.parameters, name="next")
        new = initial_shard(setup.model, setup.optimizer, groups)
        for held in new.slices:
            new.reserve(held)
        completed = distribute_replicated_state(
            group, setup, steps if rank < 2 else 0, old=shard, new=new, source=0
        )
        return completed, new.scalars(), sources[rank](completed, 0).tokens

    plan = Plan(version=0, layout=old, quotas=(2, 1))
    run = train(Setup(MODELS["llama"], optimizer, batch), plan, steps)
    expected = run.shards[0].scalars()
    assert expected.isfinite().all()
    found = on_ranks((0, 1, 2), trained)
    for completed, scalars, tokens in found.values():
        assert completed == steps
        assert torch.equal(scalars, expected)
        assert torch.equal(tokens, found[0][2])


NEXT = Layout.grid(dp=3, pp=1, tp=1, layers=SHAPE.layers)
