"""Wrapping of attributes of other packages, and hooks of modules, so that both can be undone."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import ref

_ABSENT = object()
_LAYERS = "resihp_layers"
lock = threading.RLock()
"""Held while torch is patched and restored."""


class Patches:
    """Replaced attributes; `remove` puts back what was there, in whatever order several of these
    are removed.

    An attribute that somebody else has replaced since is left alone. Owners are not kept alive.
    Copies and pickles of these hold nothing to undo.
    """

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def wrap(
        self,
        owner: Any,
        name: str,
        wrapper: Callable[[Any], Any],
        *,
        may_be_none: bool = False,
    ) -> bool:
        """Replace the callable `owner.name` by `wrapper(it)`; return False if there is none.

        `wrapper` is called again where what it wraps is removed. With `may_be_none` it is given
        None where that stands for no callable. Copies and pickles of an `owner` that is neither a
        class nor a module lack the wrapper.
        """
        wrapped = getattr(owner, name, _ABSENT)
        if not callable(wrapped) and not (may_be_none and wrapped is None):
            return False
        key = object()
        with lock:
            layers = _Layers.of(owner, name)
            layers.add(owner, key, wrapper)
        of_owner, of_layers = ref(owner), ref(layers)  # wrappers may hold the owner

        def undo() -> None:
            alive, layers = of_owner(), of_layers()
            if alive is not None and layers is not None:
                with lock:
                    layers.discard(alive, key)

        self._undo.append(undo)
        return True

    def add(self, undo: Callable[[], object]) -> None:
        """Call `undo` in `remove`, as the method `remove` of a hook's handle."""
        self._undo.append(undo)

    def __reduce__(self) -> Any:
        return Patches, ()

    @property
    def is_empty(self) -> bool:
        """True if there is nothing to undo."""
        return not self._undo

    def remove(self) -> None:
        """Undo everything, the newest first; a second call does nothing."""
        with lock:
            while self._undo:
                self._undo.pop()()


class _Layers:
    """Wrappers around one attribute, the innermost first."""

    def __init__(self, owner: Any, name: str) -> None:
        self._name = name
        self._original = getattr(owner, name)
        self._own = vars(owner).get(name, _ABSENT) if hasattr(owner, "__dict__") else _ABSENT
        self._wrappers: dict[object, Callable[[Any], Any]] = {}
        self._shown: Any = None

    @classmethod
    def of(cls, owner: Any, name: str) -> _Layers:
        """Return the wrappers that are there, or none yet."""
        shown = getattr(owner, "__dict__", {}).get(name)
        layers = getattr(shown, _LAYERS, None)  # which others copy, as `functools.wraps` does
        return layers if layers is not None and layers._shown is shown else cls(owner, name)

    def add(self, owner: Any, key: object, wrapper: Callable[[Any], Any]) -> None:
        self._wrappers[key] = wrapper
        self._show(owner)

    def discard(self, owner: Any, key: object) -> None:
        del self._wrappers[key]
        if vars(owner).get(self._name, _ABSENT) is self._shown:
            self._show(owner)

    def _show(self, owner: Any) -> None:
        if not self._wrappers:
            self._restore(owner)
            return
        shown = self._original
        for wrap in self._wrappers.values():
            shown = wrap(shown)
        if not (inspect.isclass(owner) or inspect.ismodule(owner)):
            wrapper, shown = shown, _BoundWrapper(shown)
            if hasattr(wrapper, "__wrapped__"):
                shown.__wrapped__ = wrapper.__wrapped__
            shown.without = partial(self._without, ref(owner))
        setattr(shown, _LAYERS, self)
        _kind(owner).__setattr__(owner, self._name, shown)
        self._shown = shown

    def _restore(self, owner: Any) -> None:
        if self._own is _ABSENT:
            _kind(owner).__delattr__(owner, self._name)
        else:
            _kind(owner).__setattr__(owner, self._name, self._own)
        self._shown = None  # which holds these layers

    def _without(self, owner: Callable[[], Any]) -> tuple[Any, ...]:
        if self._own is _ABSENT:
            return getattr, (owner(), self._name)
        return partial, (self._own,)


def _kind(owner: Any) -> Any:
    """The type whose methods set and delete attributes of `owner`: an object's own may refuse."""
    return type(owner) if inspect.isclass(owner) or inspect.ismodule(owner) else object


def remove_wrappers(copied: Any) -> None:
    """Remove the wrappers in an object that has the attributes of another one, as they are."""
    held = vars(copied)
    for name in [name for name, value in held.items() if isinstance(value, _BoundWrapper)]:
        del held[name]


class _BoundWrapper(partial[Any]):
    """A wrapper in an object, which copies and pickles of the object lack.

    without      returns constructor and arguments of what they hold in its place
    __wrapped__  of the wrapper, if it has that: it tells the parameters
    """

    without: Callable[[], tuple[Any, ...]]
    __wrapped__: Callable[..., Any]

    def __reduce__(self) -> Any:
        return self.without()
