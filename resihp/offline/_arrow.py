"""Parquet files column by column as numpy arrays.

Not over pandas, whose import takes longer than all else, and one column at a time, so that a large
trace is never held twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import ContractError, TraceError


class ParquetColumns:
    """The columns of one or several parquet files of one kind, one after the other, and the
    metadata of each.

    Raises `TraceError` naming a file that cannot be read, and `ContractError` for a column whose
    types in the files do not go together.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        self._paths = tuple(files)
        self._files = [_opened(file) for file in files]
        schemas = [file.schema_arrow for file in self._files]
        self.names = [n for n in schemas[0].names if all(n in s.names for s in schemas[1:])]
        # Metadata added during writing is stored separately.
        self.metadata: list[dict[bytes, bytes]] = [
            {**(file.schema_arrow.metadata or {}), **(file.metadata.metadata or {})}
            for file in self._files
        ]
        self.file_rows = [int(file.metadata.num_rows) for file in self._files]
        self.rows = sum(self.file_rows)

    def release(self) -> None:
        """Give back what reading took; columns that were read stay good."""
        import pyarrow as pa

        pa.default_memory_pool().release_unused()

    def read(self, name: str) -> Any:
        """A column as an Arrow chunked array."""
        import pyarrow as pa

        parts = []
        for path, file in zip(self._paths, self._files, strict=True):
            with readable(path):
                parts.append(file.read(columns=[name], use_threads=False).column(0))
        if len({part.type for part in parts}) > 1:
            parts = _of_one_type(name, parts)
        chunks = [chunk for part in parts for chunk in part.chunks]
        return pa.chunked_array(chunks, parts[0].type) if len(parts) > 1 else parts[0]


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Names the path in what pyarrow raises."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        reason = " ".join(str(error).split()) or "unknown reason"
        raise TraceError(f"{path}: is not a readable parquet file: {reason}") from None


def _opened(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with readable(path):
        # As bytes, since a name need not be UTF-8.
        return pq.ParquetFile(pa.OSFile(os.fsencode(path)))


def _of_one_type(name: str, parts: Sequence[Any]) -> list[Any]:
    """The parts of a column, with the narrowest type that holds the values of all."""
    import pyarrow as pa

    plain = [p.cast(p.type.value_type) if pa.types.is_dictionary(p.type) else p for p in parts]
    schemas = [pa.schema([(name, part.type)]) for part in plain]
    try:
        common = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        return [part.cast(common) for part in plain]
    except pa.ArrowException:
        types = sorted({str(part.type) for part in plain})
        raise ContractError(name, f"the files hold it as {' and '.join(types)}") from None


def is_number(column: Any) -> bool:
    """Test if an Arrow column holds plain numbers."""
    import pyarrow as pa

    return bool(pa.types.is_integer(column.type) or pa.types.is_floating(column.type))


def is_empty(column: Any) -> bool:
    """Test if no row of an Arrow column has a value; NaN is none."""
    import pyarrow as pa

    if column.null_count == len(column):
        return True
    return pa.types.is_floating(column.type) and bool(np.isnan(to_numpy(column)).all())


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
