"""Parquet files column by column as numpy arrays.

Not over pandas, whose import takes longer than all else, and one column at a time, so that a large
trace is never held twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


class ParquetColumns:
    """The columns of one or several parquet files of one kind, one after the other, and the
    metadata of each.

    Raises what pyarrow raises for files that it cannot read.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        import pyarrow.parquet as pq

        self._files = [pq.ParquetFile(file) for file in files]
        schemas = [file.schema_arrow for file in self._files]
        self.names = [n for n in schemas[0].names if all(n in s.names for s in schemas[1:])]
        # Metadata added during writing is stored separately.
        self.metadata: list[dict[bytes, bytes]] = [
            {**(file.schema_arrow.metadata or {}), **(file.metadata.metadata or {})}
            for file in self._files
        ]
        self.rows = sum(file.metadata.num_rows for file in self._files)

    def release(self) -> None:
        """Give back what reading took; columns that were read stay good."""
        import pyarrow as pa

        pa.default_memory_pool().release_unused()

    def read(self, name: str) -> Any:
        """A column as an Arrow chunked array."""
        import pyarrow as pa

        parts = [file.read(columns=[name], use_threads=False).column(0) for file in self._files]
        chunks = [chunk for part in parts for chunk in part.chunks]
        return pa.chunked_array(chunks, parts[0].type) if len(parts) > 1 else parts[0]


def is_number(column: Any) -> bool:
    """Test if an Arrow column holds plain numbers."""
    import pyarrow as pa

    return bool(pa.types.is_integer(column.type) or pa.types.is_floating(column.type))


def to_numpy(column: Any) -> NDArray[Any]:
    """The values of an Arrow column of plain numbers; NaN where a decimal one is empty.

    The column may be a chunked one; one of whole numbers must not hold empty values.
    """
    chunks = getattr(column, "chunks", [column])
    parts = [_part(chunk) for chunk in chunks if len(chunk)]
    if len(parts) == 1:
        return parts[0]
    empty = np.empty(0, column.type.to_pandas_dtype())
    return np.concatenate(parts) if parts else empty


def _part(chunk: Any) -> NDArray[Any]:
    if chunk.null_count:
        chunk = chunk.fill_null(float("nan"))
    return np.from_dlpack(chunk)
