"""Waiting for data loaders: records of op DATA, and the position of a rank that hangs in one."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from resihp.contracts import Op
from tests.hooks.conftest import until
from tests.instrumentation.observed import Observed, one_step

DATA = int(Op.DATA)
LOADERS = torch.utils.data.dataloader


class Batches(Dataset):
    """Batches of one model's input; `reading` is called before each."""

    def __init__(self, count: int = 3, reading=lambda index: None) -> None:
        self.count, self.reading = count, reading

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index):
        self.reading(index)
        return torch.ones(2, 3, 4)


def train(loop: Observed, loader, microbatches: int = 1) -> None:
    for number, batch in enumerate(loader, 1):
        loop.model(batch).square().sum().backward()
        if number % microbatches == 0:
            loop.optimizer.step()
            loop.optimizer.zero_grad()


def data_of(loop: Observed) -> list[tuple[int, float]]:
    """(step, ms) of each record of a loader."""
    records = loop.records()
    data = records.op == DATA
    return list(zip(records.step[data].tolist(), records.compute_ms[data].tolist(), strict=True))


@pytest.mark.parametrize("workers", [0, 1])
def test_the_time_of_a_loader_is_a_record_of_the_step_that_it_is_for(observe, workers):
    loop = observe()
    train(loop, DataLoader(Batches(), batch_size=None, num_workers=workers))
    loaded = [[(step, DATA, -1), *one_step(step)] for step in (1, 2)]
    assert loop.passes() == [*one_step(0), *loaded[0], *loaded[1]]
    records = loop.records()
    data = records.op == DATA
    assert (records.compute_ms[data] > 0).all()
    assert np.isnan(records.wait_ms[data]).all()
    assert loop.monitor.stats.failures == 0


def test_each_microbatch_has_its_own_data(observe, hands):
    loop = observe(clock=hands.clock)
    slowly = Batches(4, lambda index: hands.pass_ms(10.0 * index))
    train(loop, DataLoader(slowly, batch_size=None), microbatches=2)
    assert data_of(loop) == [(0, 10.0), (1, 20.0), (1, 30.0)]


def test_batches_that_are_fetched_ahead_are_one_record(observe, hands):
    loop = observe(clock=hands.clock)
    loop.step()
    slowly = Batches(3, lambda index: hands.pass_ms(20.0))
    train(loop, list(DataLoader(slowly, batch_size=None)), microbatches=3)
    assert data_of(loop) == [(1, 60.0)]


@pytest.mark.parametrize("around_the_loader", [True, False])
def test_an_evaluation_leaves_no_data(observe, hands, around_the_loader):
    loop = observe(clock=hands.clock)
    loop.step()
    slowly = Batches(3, lambda index: hands.pass_ms(20.0))
    with torch.set_grad_enabled(not around_the_loader):
        for batch in DataLoader(slowly, batch_size=None):
            with torch.no_grad():
                loop.model(batch)
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)


def test_a_pass_without_gradients_on_the_same_batch_keeps_its_data(observe, hands):
    loop = observe(clock=hands.clock)
    loop.step()
    slowly = Batches(3, lambda index: hands.pass_ms(20.0))
    for batch in DataLoader(slowly, batch_size=None):
        with torch.no_grad():
            reference = loop.model(batch)
        (loop.model(batch) - reference).sum().backward()
        loop.optimizer.step()
    assert data_of(loop) == [(1, 20.0), (2, 20.0), (3, 20.0)]


def test_a_batch_of_an_evaluation_leaves_no_data_to_the_next(observe, hands):
    loop = observe(clock=hands.clock)
    loop.step()
    loader = iter(DataLoader(Batches(3, lambda index: hands.pass_ms(20.0)), batch_size=None))
    with torch.no_grad():
        loop.model(next(loader))
    loop.model(next(loader)).sum().backward()
    assert data_of(loop) == [(1, 20.0)]


def test_loaders_of_other_threads_do_not_count(observe):
    loop = observe()
    loop.step()
    thread = threading.Thread(target=list, args=(DataLoader(Batches(), batch_size=None),))
    thread.start()
    thread.join(300)
    loop.step()
    assert loop.passes() == one_step(0) + one_step(1)


def test_a_loader_inside_a_loader_counts_once(observe):
    class Outer(IterableDataset):
        def __iter__(self):
            return iter(DataLoader(Batches(), batch_size=None))

    loop = observe()
    train(loop, DataLoader(Outer(), batch_size=None))
    assert [step for step, op, _ in loop.passes() if op == DATA] == [1, 2]
    assert loop.monitor.stats.failures == 0


def test_an_error_of_a_dataset_passes_through(observe):
    def fail(index):
        if index == 1:
            raise KeyError("document 1")

    loop = observe()
    with pytest.raises(KeyError, match="document 1"):
        train(loop, DataLoader(Batches(reading=fail), batch_size=None))
    loop.step()
    assert [record for record in loop.passes() if record[1] != DATA] == one_step(0) + one_step(1)
    assert loop.monitor._recording.open is None


def test_a_rank_that_sits_in_a_loader_says_so(observe):
    loop = observe(heartbeat_s=0.02, interval_s=60)
    seen = []

    def stay(index):
        if index != 1:
            return
        loop.sidecar.asks_for_stacks = True
        until(lambda: any(beat.stack for beat in loop.sidecar.heartbeats))
        seen.append(next(beat for beat in loop.sidecar.heartbeats if beat.stack))

    train(loop, DataLoader(Batches(reading=stay), batch_size=None))
    (beat,) = seen
    assert (beat.position.op, beat.position.step) == (Op.DATA, 1)
    here = [frame for frame in beat.stack if frame.startswith("test_data_loaders.py:")]
    functions = [frame.split(" in ")[1] for frame in here if "<" not in frame]
    assert functions[:3] == ["stay", "__getitem__", "train"]
    assert not any(frame.startswith("_data_loaders.py") for frame in beat.stack)


def test_remove_leaves_loaders_as_they_were(observe):
    before = LOADERS._BaseDataLoaderIter.__next__, DataLoader.__iter__
    loop = observe()
    loader = iter(DataLoader(Batches(), batch_size=None))
    assert LOADERS._BaseDataLoaderIter.__next__ is not before[0]
    loop.monitor.remove()
    assert (LOADERS._BaseDataLoaderIter.__next__, DataLoader.__iter__) == before
    train(loop, loader)
    assert loop.passes() == []


def test_a_torch_with_other_loaders(observe, monkeypatch, caplog):
    monkeypatch.delattr(LOADERS, "_BaseDataLoaderIter")
    loop = observe()
    monkeypatch.undo()
    train(loop, DataLoader(Batches(2), batch_size=None))
    assert [op for _, op, _ in loop.passes() if op != DATA] == [op for _, op, _ in 2 * one_step(0)]
    assert caplog.text.count("does not show its data loaders") == 1
