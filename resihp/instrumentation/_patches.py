"""Wrapping of attributes of other packages, so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Patches:
    """Replaced attributes; `remove` puts back what was there, the newest first.

    An attribute that somebody else has replaced since is left alone.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def wrap(self, owner: Any, name: str, wrapper: Callable[[Any], Any]) -> bool:
        """Replace the callable `owner.name` by `wrapper(it)`; return False if there is none."""
        original = getattr(owner, name, None)
        if not callable(original):
            return False
        own = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT
        replacement = wrapper(original)
        setattr(owner, name, replacement)

        def undo() -> None:
            if vars(owner).get(name, _ABSENT) is not replacement:
                return
            if own is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, own)

        self._undo.append(undo)
        return True

    def add(self, undo: Callable[[], object]) -> None:
        """Call `undo` in `remove`, as the method `remove` of a hook's handle."""
        self._undo.append(undo)

    def remove(self) -> None:
        """Undo everything; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
