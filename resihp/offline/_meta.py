"""Reader of the YAML file with facts that a trace does not hold."""

from __future__ import annotations

from pathlib import Path

from resihp.contracts import TraceError


def read_meta(trace: Path) -> dict[str, str]:
    """The `name: value` lines of the YAML file that belongs to a trace; empty if there is none.

    `trace-X.parquet` belongs to `meta-X.yaml`; else `<stem>.yaml` or `meta.yaml` in its folder.
    """
    names = (trace.stem.replace("trace", "meta", 1), trace.stem, "meta")
    for name in names:
        for suffix in (".yaml", ".yml"):
            path = trace.with_name(name + suffix)
            if path.is_file():
                return _parse(path)
    return {}


def whole_number(meta: dict[str, str], name: str) -> int:
    """A size of at least 1 from the facts; 1 where it is not given. Raises `TraceError`."""
    try:
        number = int(meta.get(name, "1"))
    except ValueError:
        number = 0
    if number < 1:
        raise TraceError(f"meta: {name} must be a whole number above 0, not {meta[name]!r}")
    return number


def _parse(path: Path) -> dict[str, str]:
    facts = {}
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from None
    for line in lines:
        text = line.split("#", 1)[0].strip()
        if text in ("", "---"):
            continue
        name, colon, value = text.partition(":")
        if not colon:
            raise TraceError(f"{path}: expected 'name: value', not {text!r}")
        facts[name.strip()] = value.strip().strip("'\"")
    return facts
