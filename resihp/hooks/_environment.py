"""Environment variables: numbers of ranks, and what is allowed."""

from __future__ import annotations

import os

from resihp.contracts import ContractError

_OFF = ("0", "false", "no", "off")


def allowed_by_environment(name: str) -> bool:
    """Return whether a variable, as RESIHP_PROBES, allows what it names: the default."""
    return os.environ.get(name, "").strip().lower() not in _OFF


def ranks_by_environment(*names: str) -> int | None:
    """Return the number of ranks in the first of these variables that is set, WORLD_SIZE or
    LOCAL_WORLD_SIZE; None if none is, or if it is no number above 0."""
    text = next((given for name in names if (given := os.environ.get(name))), "")
    return int(text) or None if text.isdecimal() else None


def rank_of_process(given: int | None) -> int:
    """Return the given rank, else that of the launcher, RANK, else 0."""
    if given is None:
        text = os.environ.get("RANK", "0")
        if not text.isdigit():
            raise ContractError("RANK", f"must be a whole number, 0 or more, not {text!r}")
        return int(text)
    if given < 0:
        raise ContractError("rank", f"must be 0 or more, not {given}")
    return given
