"""What operators of torch are called in a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class NoteOperators(TorchDispatchMode):
    """Gives `note` each operator with its arguments and its result."""

    def __init__(
        self, note: Callable[[Any, tuple[Any, ...], Mapping[str, Any], Any], None]
    ) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, result)
        return result
