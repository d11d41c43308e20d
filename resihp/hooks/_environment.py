"""Environment variables: numbers of ranks, and what is allowed."""

from __future__ import annotations

import os

_OFF = ("0", "false", "no", "off")


def allowed_by_environment(name: str) -> bool:
    """Return whether a variable, as RESIHP_PROBES, allows what it names: the default."""
    return os.environ.get(name, "").strip().lower() not in _OFF


def ranks_by_environment(*names: str) -> int | None:
    """Return the number of ranks in the first of these variables that is set, WORLD_SIZE or
    LOCAL_WORLD_SIZE; None if none is, or if it is no number above 0."""
    text = next((given for name in names if (given := os.environ.get(name))), "")
    return int(text) or None if text.isdecimal() else None
