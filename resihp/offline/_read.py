"""Detection of the format of a trace, and its reader."""

from __future__ import annotations

from pathlib import Path

from resihp.contracts import ContractError, TraceError

from ._arrow import ParquetColumns, readable
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
    files = [path]
    if path.is_dir():
        named = (file for file in path.iterdir() if file.name.endswith((".parquet", *_JSON)))
        files = sorted(file for file in named if file.is_file())
    if not files:
        raise TraceError(f"{path}: the folder holds no .parquet, .json or .json.gz file")
    json = [_is_json(file) for file in files]
    if any(json) and not all(json):
        raise TraceError(f"{path}: the folder mixes parquet and JSON files")
    try:
        if not all(json):
            return _parquet_trace(path, files)
        from .kineto import kineto_trace

        return kineto_trace(path, files)
    except ContractError as error:
        raise TraceError(f"{path}: {error}") from None


_ACCEPTED = (
    "parquet (a recording of ResiHP, or in the layout of the published what-if traces), JSON of "
    "the PyTorch profiler (also gzipped), or a folder with one such file for each rank"
)


def _is_json(file: Path) -> bool:
    """By name, or by how it begins; parquet otherwise. Raises `TraceError` if it is neither."""
    if file.name.endswith(_JSON):
        return True
    if file.name.endswith(".parquet"):
        return False
    try:
        with file.open("rb") as opened:
            start = opened.read(64)
    except OSError as error:
        raise TraceError(f"{file}: cannot be read: {error.strerror}") from None
    if start.startswith(b"PAR1"):
        return False
    if start.startswith(b"\x1f\x8b") or start.lstrip()[:1] in (b"{", b"["):
        return True
    raise TraceError(f"{file}: is {_kind(file, start)}; accepted are {_ACCEPTED}")


def _kind(file: Path, start: bytes) -> str:
    """The kind of a file that is no trace."""
    if not start:
        return "an empty file"
    if b"\0" in start:
        return "a binary file of an unknown format"
    return "a CSV file" if file.suffix == ".csv" else "a text file of an unknown format"


def _parquet_trace(path: Path, files: list[Path]) -> Trace:
    with readable(path):
        columns = ParquetColumns(files)
        trace = _trace_of_columns(path, columns)
        columns.release()
        return trace


def _trace_of_columns(path: Path, columns: ParquetColumns) -> Trace:
    from ._resihp_parquet import JOB_KEY, own_trace
    from ._whatif import whatif_trace

    if any(JOB_KEY in metadata for metadata in columns.metadata):
        return own_trace(path, columns)
    if "optype" in columns.names:
        return whatif_trace(path, columns)
    raise TraceError(
        f"{path}: is neither a ResiHP recording (no {JOB_KEY.decode()} in its metadata) "
        "nor a what-if trace (no optype column)"
    )
