"""Random numbers are those of the unsharded tensor, whichever window of it is computed."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from resihp.contracts import ContractError
from resihp.elastic.models import Gpt2, Packed
from resihp.elastic.models.randomness import Dropout, random_bits, stream_key
from tests.elastic.test_models import PLAIN, SHAPE

MASK = 2**64 - 1


def squares(key: int, counter: int) -> int:
    """The generator of arXiv 2004.06278, over Python's unbounded integers."""
    x = y = counter * key & MASK
    z = y + key & MASK
    for add in (y, z, y):
        x = x * x + add & MASK
        x = (x >> 32 | x << 32) & MASK
    return (x * x + z & MASK) >> 32


@given(st.integers(-(2**63), 2**63 - 1), st.integers(1, 4), st.integers(1, 5), st.integers(1, 6))
def test_bits_are_those_of_the_published_generator(key: int, a: int, b: int, c: int) -> None:
    bits = random_bits(key, (a, b, c), ((0, a), (0, b), (0, c))).flatten().tolist()
    assert bits == [squares(key, counter) for counter in range(a * b * c)]


@given(st.data())
def test_a_window_is_a_window_of_the_whole(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(1, 6), min_size=1, max_size=3))
    edges = [sorted(data.draw(st.tuples(*[st.integers(0, size)] * 2))) for size in shape]
    window = [(start, stop) for start, stop in edges]
    whole = random_bits(stream_key(1, "x"), shape, [(0, size) for size in shape])
    for dim, (start, stop) in enumerate(window):
        whole = whole.narrow(dim, start, stop - start)
    assert torch.equal(random_bits(stream_key(1, "x"), shape, window), whole)


def test_dropout_keeps_the_mean_and_differs_in_each_place_and_time() -> None:
    ones, tokens = torch.ones(200, 300), torch.zeros(1)

    def masked(seed: int = 0, step: int = 0, index: int = 0, place: str = "a") -> torch.Tensor:
        packed = Packed(tokens, tokens, (1,), step, index)
        return Dropout(0.25, seed, place)(ones, packed)

    first = masked()
    assert torch.equal(first, masked())
    assert first.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(first.mean()) == pytest.approx(1.0, abs=0.01)
    for other in (masked(seed=1), masked(step=1), masked(index=1), masked(place="b")):
        both = (first > 0) & (other > 0)
        assert float(both.float().mean()) == pytest.approx(0.75**2, abs=0.01)


def test_gpt2_says_what_it_cannot_be() -> None:
    with pytest.raises(ContractError, match="tied"):
        Gpt2(SHAPE, context=8)
    with pytest.raises(ContractError, match="dropout"):
        Gpt2(PLAIN, context=8, dropout=1.0)
