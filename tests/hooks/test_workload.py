"""The work of a microbatch is the same whichever way its lengths are written."""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import ContractError
from resihp.hooks._workload import Features, features, snapshot

rows_of_lengths = st.lists(
    st.lists(st.integers(1, 9), min_size=1, max_size=5), min_size=1, max_size=3
)


def expected(lengths):
    return Features(
        sum(lengths), len(lengths), sum(n * n for n in lengths), max(lengths, default=0)
    )


def block_mask(rows, *, causal, padding):
    """(rows, positions, positions), true where a position attends to another."""
    size = max(map(sum, rows)) + padding
    mask = np.zeros((len(rows), size, size), bool)
    for row, lengths in enumerate(rows):
        at = 0
        for n in lengths:
            block = np.tril(np.ones((n, n), bool)) if causal else np.ones((n, n), bool)
            mask[row, at : at + n, at : at + n] = block
            at += n
    return mask


def kinds(array):
    yield array
    yield torch.from_numpy(array)


@pytest.mark.parametrize("integer", [np.int16, np.int32, np.int64])
def test_lists_of_elements_of_arrays(integer):
    lengths = [131_072, 65_536, 0] if integer is not np.int16 else [300, 200, 0]
    for array in kinds(np.array(lengths, integer)):
        assert features(snapshot(list(array), None, None)) == expected(lengths[:2])


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(0, 10_000), max_size=30))
def test_lengths_and_their_cumulative_sum(lengths):
    work = expected([n for n in lengths if n])
    assert features(snapshot(lengths, None, None)) == work
    assert features(snapshot(tuple(lengths), None, None)) == work
    cumulative = np.cumsum([0, *lengths])
    assert features(snapshot(None, cumulative.tolist(), None)) == work
    for array in kinds(np.array(lengths, np.int32)):
        assert features(snapshot(array, None, None)) == work
    for array in kinds(cumulative.astype(np.int32)):
        assert features(snapshot(None, array, None)) == work


@settings(deadline=None, max_examples=50)
@given(lengths=st.lists(st.integers(1, 20), min_size=1, max_size=6), padding=st.integers(0, 3))
def test_a_padding_mask(lengths, padding):
    mask = np.zeros((len(lengths), max(lengths) + padding), np.int64)
    for row, n in enumerate(lengths):
        mask[row, :n] = 1
    for array in (*kinds(mask), *kinds(mask.astype(bool)), *kinds(mask.astype(np.float32))):
        assert features(snapshot(None, None, array)) == expected(lengths)


@settings(deadline=None, max_examples=50)
@given(rows=rows_of_lengths, causal=st.booleans(), padding=st.integers(0, 3))
def test_a_mask_of_what_attends_to_what(rows, causal, padding):
    mask = block_mask(rows, causal=causal, padding=padding)
    work = expected([n for lengths in rows for n in lengths])
    additive = torch.where(torch.from_numpy(mask), 0.0, float("-inf")).to(torch.bfloat16)
    for array in (*kinds(mask), additive, *kinds(np.stack([mask, mask], 1))):
        assert features(snapshot(None, None, array)) == work


CAUSAL = np.tril(np.ones((8, 8), bool))
BEGINNING, END = np.arange(8) < 5, np.arange(8) >= 3


@pytest.mark.parametrize(
    ("mask", "lengths"),
    [
        (CAUSAL & BEGINNING, [5]),
        (CAUSAL & BEGINNING & BEGINNING[:, None], [5]),
        (CAUSAL & END, [5]),
        (BEGINNING & np.ones((8, 8), bool), [5]),
        (BEGINNING & np.ones((1, 8), bool), [5]),
        (CAUSAL & ~np.tril(np.ones((8, 8), bool), -3), [8]),
        (CAUSAL | (np.arange(8) < 3), [8]),
        (np.abs(np.subtract.outer(np.arange(8), np.arange(8))) < 2, [8]),
        (np.zeros((8, 8), bool), []),
    ],
    ids=[
        "causal, padding after the tokens",
        "causal, padding attends to nothing",
        "causal, padding before the tokens",
        "bidirectional, padding after the tokens",
        "one line for all positions",
        "sliding window",
        "prefix",
        "bidirectional window",
        "nothing",
    ],
)
def test_a_mask_of_one_sequence(mask, lengths):
    for array in kinds(np.stack([mask, mask])):
        assert features(snapshot(None, None, array)) == expected(lengths * 2)


def test_a_snapshot_is_not_touched_by_what_happens_to_the_buffer_later():
    for buffer in (np.array([3, 4]), torch.tensor([3, 4]), [3, 4]):
        taken = snapshot(buffer, None, None)
        buffer[0] = 100
        assert features(taken).tokens == 7


@pytest.mark.parametrize("lengths", [[-1, 2], [1.5], ["a"]])
def test_what_cannot_be_lengths(lengths):
    with pytest.raises((ContractError, TypeError)):
        features(snapshot(lengths, None, None))


def test_one_form_at_a_time_and_masks_of_known_shape():
    with pytest.raises(ContractError, match="only one"):
        snapshot([1], [0, 1], None)
    with pytest.raises(ContractError, match="dimensions"):
        snapshot(None, None, np.ones(3))


class DeviceTensor:
    """Lengths of two sequences on a CUDA device."""

    is_cuda, device = True, "cuda:3"

    def detach(self):
        return self

    def to(self, device, *, non_blocking):
        assert (device, non_blocking) == ("cpu", True)
        return [5, 2]


@pytest.mark.parametrize("is_captured", [False, True])
def test_lengths_on_another_device_than_the_current_one(monkeypatch, is_captured):
    current, asked = ["cuda:0"], []

    @contextmanager
    def device(chosen):
        current.append(chosen)
        yield
        current.pop()

    def capturing():
        asked.append(("capture", current[-1]))
        return is_captured

    def event():
        return SimpleNamespace(
            record=lambda: asked.append(("event", current[-1])), query=lambda: True
        )

    cuda = SimpleNamespace(device=device, is_current_stream_capturing=capturing, Event=event)
    monkeypatch.setattr("torch.cuda", cuda)
    taken = snapshot(DeviceTensor(), None, None)
    assert current == ["cuda:0"]
    if is_captured:
        assert taken is None
        assert asked == [("capture", "cuda:3")]
    else:
        assert taken.ready()
        assert features(taken) == Features(7, 2, 29, 5)
        assert asked == [("capture", "cuda:3"), ("event", "cuda:3")]


def test_works_of_a_step_without_end_take_little_memory(make_monitor, sidecar, monkeypatch):
    monkeypatch.setattr("resihp.hooks._batcher._MOST_WORKS", 4)
    monitor = make_monitor()
    for index in range(20):
        with monitor.forward(seq_lens=[index]):
            pass
    for index in (19, 0):
        with monitor.backward(index=index):
            pass
    monitor.close()
    assert sidecar.records.tokens.tolist() == [*range(20), 19, -1]
