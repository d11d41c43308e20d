"""LightGBM by itself, without the libraries for which it has interfaces."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
import threading
from typing import Any

_NAME = "_resihp_lightgbm"
_INTERFACES = frozenset({"sklearn", "pandas", "pyarrow", "dask", "matplotlib", "cffi"})


@functools.cache
def lightgbm() -> Any:
    """A copy of the package `lightgbm` for this library alone, loaded at the first call.

    Whatever LightGBM finds installed it imports, which takes eight times as long and 130 MB more,
    in the middle of a job. A program that imports `lightgbm` gets a whole one all the same.
    """
    found = importlib.util.find_spec("lightgbm")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("No module named 'lightgbm'", name="lightgbm")
    spec = importlib.util.spec_from_file_location(
        _NAME, found.origin, submodule_search_locations=found.submodule_search_locations
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[_NAME] = module
    hidden = _Hidden()
    sys.meta_path.insert(0, hidden)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    finally:
        sys.meta_path.remove(hidden)
    return module


class _Hidden(importlib.abc.MetaPathFinder):
    """Lets this thread import none of `_INTERFACES` that is not imported yet."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in _INTERFACES and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
