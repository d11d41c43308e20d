"""What can happen to a chunk on its way changes its checksum."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from resihp.checkpoint.format.checksum import ROW_BYTES, checksum

chunks = st.builds(
    lambda rows, seed: bytearray(random.Random(seed).randbytes(rows * ROW_BYTES)),
    st.integers(1, 4),
    st.integers(0, 1 << 30),
)


@given(chunk=chunks, at=st.integers(0, 1 << 40), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen(chunk: bytearray, at: int, bit: int) -> None:
    before = checksum(memoryview(chunk))
    chunk[at % len(chunk)] ^= 1 << bit
    assert checksum(memoryview(chunk)) != before


@given(chunk=chunks, start=st.integers(0, 1 << 40), length=st.integers(1, 3 * ROW_BYTES))
def test_zeros_in_place_of_data_are_seen(chunk: bytearray, start: int, length: int) -> None:
    before, old = checksum(memoryview(chunk)), bytes(chunk)
    start %= len(chunk)
    part = slice(start, min(start + length, len(chunk)))
    chunk[part] = bytes(part.stop - part.start)
    assert (checksum(memoryview(chunk)) != before) == (bytes(chunk) != old)


@given(chunk=chunks, one=st.integers(0, 3), other=st.integers(0, 3))
def test_sectors_that_changed_places_are_seen(chunk: bytearray, one: int, other: int) -> None:
    rows = [chunk[i : i + ROW_BYTES] for i in range(0, len(chunk), ROW_BYTES)]
    one, other = one % len(rows), other % len(rows)
    rows[one], rows[other] = rows[other], rows[one]
    same = one == other
    assert (checksum(memoryview(b"".join(rows))) == checksum(memoryview(chunk))) == same


@given(chunk=chunks, bit=st.integers(0, 63), words=st.sets(st.integers(0, 511), min_size=1))
def test_a_bit_stuck_in_many_words_of_a_sector_is_seen(
    chunk: bytearray, bit: int, words: set[int]
) -> None:
    before, old = checksum(memoryview(chunk)), bytes(chunk)
    for word in words:
        chunk[word * 8 + bit // 8] |= 1 << bit % 8
    assert (checksum(memoryview(chunk)) != before) == (bytes(chunk) != old)
