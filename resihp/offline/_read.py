"""Finds out what a trace is and reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from resihp.contracts import ContractError, TraceError

from ._trace import Trace

_JSON = (".json", ".json.gz")


def read_trace(path: str | Path) -> Trace:
    """The recorded job in a file, or in a folder with one file for each rank.

    Reads ResiHP's own parquet, parquet in the layout of the published what-if traces, and the
    JSON (also gzipped) of the PyTorch profiler. Raises `TraceError` with one clear line.
    """
    path = Path(path)
    if not path.exists():
        raise TraceError(f"{path}: no such file or folder")
    files = sorted(f for f in path.iterdir() if _is_trace(f)) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path}: the folder holds no .parquet, .json or .json.gz file")
    json = [file.name.endswith(_JSON) for file in files]
    if any(json) and not all(json):
        raise TraceError(f"{path}: the folder mixes parquet and JSON files")
    try:
        return _json_trace(path, files) if all(json) else _parquet_trace(path, files)
    except ContractError as error:
        raise TraceError(f"{path}: {error}") from None


def _is_trace(file: Path) -> bool:
    return file.is_file() and file.name.endswith((".parquet", *_JSON))


def _json_trace(path: Path, files: list[Path]) -> Trace:
    from ._kineto import kineto_trace

    return kineto_trace(path, files)


def _parquet_trace(path: Path, files: list[Path]) -> Trace:
    from ._own import JOB_KEY, own_trace
    from ._whatif import whatif_trace

    table = _table(path, files)
    if JOB_KEY in (table.schema.metadata or {}):
        return own_trace(path, table)
    if "optype" in table.column_names:
        return whatif_trace(path, table)
    raise TraceError(
        f"{path}: is neither a ResiHP recording (no {JOB_KEY.decode()} in its metadata) "
        "nor a what-if trace (no optype column)"
    )


def _table(path: Path, files: list[Path]) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        tables = [pq.ParquetFile(file).read(use_threads=False) for file in files]
        if len(tables) == 1:
            return tables[0]
        return pa.concat_tables(tables, promote_options="permissive")
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else "unknown reason"
        raise TraceError(f"{path}: is not a readable parquet file: {reason}") from None
