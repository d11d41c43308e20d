"""What can happen to a chunk on its way changes its checksum."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.checkpoint.format.checksum import ROW_BYTES, checksum
from resihp.checkpoint.format.index import FileIndex, read_index
from resihp.checkpoint.history import Lineage
from resihp.contracts import CheckpointError


@dataclass(frozen=True)
class Chunk:
    """Random bytes, told by their seed."""

    rows: int
    seed: int

    def content(self) -> bytearray:
        """The bytes."""
        return bytearray(random.Random(self.seed).randbytes(self.rows * ROW_BYTES))


chunks = st.builds(Chunk, st.integers(1, 4), st.integers(0, 1 << 30))
unhurried = settings(deadline=None)


def is_seen(before: bytearray, after: bytearray) -> bool:
    return checksum([memoryview(before)]) != checksum([memoryview(after)])


@unhurried
@given(chunk=chunks, at=st.integers(0, 1 << 40), bit=st.integers(0, 7))
def test_a_flipped_bit_is_seen(chunk: Chunk, at: int, bit: int) -> None:
    content = chunk.content()
    content[at % len(content)] ^= 1 << bit
    assert is_seen(chunk.content(), content)


@unhurried
@given(chunk=chunks, start=st.integers(0, 1 << 40), length=st.integers(1, 3 * ROW_BYTES))
def test_zeros_in_place_of_data_are_seen(chunk: Chunk, start: int, length: int) -> None:
    content = chunk.content()
    start %= len(content)
    stop = min(start + length, len(content))
    content[start:stop] = bytes(stop - start)
    assert is_seen(chunk.content(), content) == (content != chunk.content())


@unhurried
@given(chunk=chunks, one=st.integers(0, 3), other=st.integers(0, 3))
def test_sectors_that_changed_places_are_seen(chunk: Chunk, one: int, other: int) -> None:
    content = chunk.content()
    rows = [content[i : i + ROW_BYTES] for i in range(0, len(content), ROW_BYTES)]
    one, other = one % len(rows), other % len(rows)
    rows[one], rows[other] = rows[other], rows[one]
    assert is_seen(content, bytearray().join(rows)) == (one != other)


@unhurried
@given(chunk=chunks, bit=st.integers(0, 63), words=st.sets(st.integers(0, 511), min_size=1))
def test_a_bit_stuck_in_many_words_of_a_sector_is_seen(
    chunk: Chunk, bit: int, words: set[int]
) -> None:
    content = chunk.content()
    for word in words:
        content[word * 8 + bit // 8] |= 1 << bit % 8
    assert is_seen(chunk.content(), content) == (content != chunk.content())


def test_in_parts_or_whole_it_is_the_crc_of_zlib() -> None:
    content = Chunk(4, 0).content()
    view = memoryview(content)
    assert checksum([view]) == zlib.crc32(content)
    assert checksum([view[:ROW_BYTES], view[ROW_BYTES:]]) == zlib.crc32(content)


def index_of(content: bytearray, value: int) -> str:
    nbytes = len(content)
    return FileIndex(0, 0, Lineage("run"), (0,), (), nbytes, (), nbytes, (value,)).to_json()


def edited(text: str, before: str, after: str) -> str:
    """An index as another version would have written it."""
    body = text.rsplit('"crc": ', 1)[0].replace(before, after) + '"crc": '
    return f"{body}{zlib.crc32(body.encode())}}}"


def test_checksums_of_a_later_version_are_named() -> None:
    content = Chunk(1, 2).content()
    text = index_of(content, checksum([memoryview(content)]))
    with pytest.raises(CheckpointError, match="new: unknown kind of checksums: blake9"):
        read_index(edited(text, "crc32", "blake9"), "new")
