"""Imports of a script's modules before the ranks are forked.

A module is imported first in a child, and in the process that forks only if the import there began
no thread, opened no accelerator, and read no variable that differs between ranks.
"""

from __future__ import annotations

import ast
import importlib
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from .options import Command

_OF_A_RANK = ("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel")


def top_level_imports(command: Command) -> list[str]:
    """List the modules that a script imports at its top level, in their order."""
    try:
        if command.kind == "program":
            return []
        if command.kind == "module":
            return [command.target.rpartition(".")[0]] if "." in command.target else []
        tree = ast.parse(Path(command.target).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.append(node.module)
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return list(dict.fromkeys(found))


def can_be_preloaded(name: str) -> bool:
    """Import a module in this process; whether processes may be forked that have imported it."""
    read: list[str] = []
    kind = type(os.environ)
    before = kind.__getitem__

    def watched(environ: os._Environ[str], key: str) -> str:
        if key.startswith(_OF_A_RANK):
            read.append(key)
        return before(environ, key)

    kind.__getitem__ = watched  # type: ignore[method-assign]
    threads = _native_threads()
    try:
        with _silence():
            importlib.import_module(name)
    except BaseException:  # noqa: BLE001 - a module may do anything when it is imported
        return False
    return not read and _native_threads() <= threads and not _has_opened_an_accelerator()


def preload(name: str) -> None:
    """Import a module, without what it writes and raises."""
    with _silence(), suppress(Exception):
        importlib.import_module(name)


@contextmanager
def _silence() -> Iterator[None]:
    """Drop what this process writes meanwhile."""
    kept = [os.dup(stream) for stream in (1, 2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        yield
    finally:
        for descriptor, stream in zip(kept, (1, 2), strict=True):
            os.dup2(descriptor, stream)
        for descriptor in (*kept, nowhere):
            os.close(descriptor)


def _native_threads() -> int:
    with suppress(OSError):
        return len(os.listdir("/proc/self/task"))
    return threading.active_count()


def _has_opened_an_accelerator() -> bool:
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):
                if os.readlink(f"/proc/self/fd/{entry}").startswith(_ACCELERATORS):
                    return True
    return False
