"""What a `Checkpointer` is asked for, checked at once rather than while training runs."""

from __future__ import annotations

from collections.abc import Sequence

from resihp.contracts import ContractError

from .levels.level import Level
from .policy import EveryStep, SavePolicy


def check(
    levels: Sequence[Level], policy: SavePolicy | None, buffers: int | None, niceness: int
) -> None:
    """Raises `ContractError` for what cannot work."""
    if not isinstance(levels, Sequence) or not all(hasattr(level, "put") for level in levels):
        raise ContractError("levels", "a list of levels, e.g. [LocalDisk(folder)]")
    if not levels:
        raise ContractError("levels", "at least one is needed, e.g. LocalDisk(folder)")
    if len({level.name for level in levels}) < len(levels):
        raise ContractError("levels", "two have the same name")
    if isinstance(policy, type) or not hasattr(policy or EveryStep(), "is_due"):
        raise ContractError("policy", f"e.g. EveryStep() or Every(10), not {policy!r}")
    if buffers is not None and (not isinstance(buffers, int) or buffers < 1):
        raise ContractError("buffers", f"at least one, not {buffers!r}")
    if not 0 <= niceness <= 19:
        raise ContractError("niceness", f"from 0 to 19, not {niceness!r}")
