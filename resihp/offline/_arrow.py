"""Arrow columns as numpy arrays, without the detour over pandas (whose import takes longest)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_number(column: Any) -> bool:
    """Whether an Arrow column holds plain numbers."""
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
    values: NDArray[Any] = np.from_dlpack(chunk)
    return values
