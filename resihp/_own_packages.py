"""Imports of `detector`, `scheduler` and `service`, the packages next to `resihp`.

A training script's folder comes first on `sys.path`. A module `scheduler.py` in it (of learning
rates, say) is what `import scheduler` finds there, and must remain so for the script. ResiHP's own
packages are therefore imported by their location wherever a module of the user may have their name.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

NAMES = ("detector", "scheduler", "service")
_FOLDER = Path(__file__).resolve().parents[1]
_lock = threading.Lock()


def load(name: str) -> ModuleType:
    """ResiHP's package `name`, under a private module name; for processes of the user.

    Works whatever `import NAME` finds, and does not change that.
    """
    private = f"_resihp_{name}"
    with _lock:
        if private in sys.modules:
            return sys.modules[private]
        folder = _FOLDER / name
        spec = importlib.util.spec_from_file_location(
            private, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        if spec is None or spec.loader is None or not folder.is_dir():
            raise ImportError(f"ResiHP's package {name} is missing in {_FOLDER}", name=name)
        module = sys.modules[private] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[private]
            raise
        return module


def pin() -> None:
    """Make `import NAME` find ResiHP's packages; for processes of ResiHP, such as its commands."""
    if not any(isinstance(finder, _OwnPackageFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OwnPackageFinder())


def check(name: str) -> None:
    """Raise `ImportError` if `import NAME` finds another module than ResiHP's package."""
    found = sys.modules.get(name)
    spec = found.__spec__ if found is not None else importlib.util.find_spec(name)
    origin = spec.origin if spec is not None else None
    if origin is None or Path(origin).resolve().parent != _FOLDER / name:
        raise ImportError(
            f"ResiHP's package {name} is hidden by {origin}: rename that module, or import "
            "resihp.offline from another folder",
            name=name,
        )


class _OwnPackageFinder(MetaPathFinder):
    """Finds the packages of `NAMES` in ResiHP's folder, before any folder of `sys.path`."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The package's specification; None for other modules."""
        if fullname not in NAMES:
            return None
        return PathFinder.find_spec(fullname, [str(_FOLDER)])
