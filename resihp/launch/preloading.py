"""Imports of a script's modules before the ranks are forked.

A module is imported first in a child, and in the process that forks only if the import there left
what a rank would find anew if it imported the module itself: threads, accelerators, descriptors,
generators of random numbers and the process's settings as they were, and no variable read that
differs between ranks. The user's own modules, those that are not installed with Python, may also
not ask for all variables, identity, entropy or the time. Libraries do so for what tells no ranks
apart, as lock files and time stamps of their logs.
"""

from __future__ import annotations

import ast
import importlib
import os
import random
import signal
import sys
import sysconfig
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any

from .options import Command

_OF_A_RANK = (
    *("RANK", "LOCAL_", "WORLD_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "RESIHP_"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
_OF_A_PROCESS = (
    *((os, name) for name in ("getpid", "getppid", "urandom")),
    *((time, name) for name in ("time", "time_ns", "monotonic", "perf_counter")),
    (random, "_urandom"),  # `secrets` and numpy's generators draw from it
    (uuid, "uuid1"),
)
_LIBRARIES = (
    *(Path(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")),
    Path(__file__).parents[1],
)
_CHECKPOINTS = "resihp.checkpoint"
_SAFE_THREADS = {"jemalloc_bg_thd"}  # of pyarrow's allocator, which stops them around a fork
_FOLDERS_OF_LIBRARIES = {"site-packages", "dist-packages"}


def imports_of(command: Command) -> list[str]:
    """List what a script imports at its top level, in its order, and what ranks restore their state
    with, wherever a script imports that."""
    return [] if command.kind == "program" else [*top_level_imports(command), _CHECKPOINTS]


def top_level_imports(command: Command) -> list[str]:
    """List what a script imports at its top level, in its order: modules, and after `from` also
    names, of which the list does not say whether they are modules.

    Those after its first statement that may change the process are left out: settings and the path
    may decide what is imported, and how. Of those in blocks, whether they are reached is known of
    what a `try` begins with.
    """
    try:
        if command.kind == "module":
            return [command.target.rpartition(".")[0]] if "." in command.target else []
        script = Path(command.target)
        tree = ast.parse((script / "__main__.py" if script.is_dir() else script).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    reached = takewhile(lambda node: not _may_change_the_process(node), tree.body)
    found = [name for node in reached for name in _imported(node)]
    return list(dict.fromkeys(found))


def _imported(statement: ast.stmt) -> Iterator[str]:
    """Go through what a statement imports for certain."""
    match statement:
        case ast.Import(names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(str(module), names, 0):
            yield module
            yield from (f"{module}.{alias.name}" for alias in names)
        case ast.Try(body):
            for node in body:
                yield from _imported(node)


def _may_change_the_process(statement: ast.stmt) -> bool:
    """True if a statement calls more than clocks, or sets more than names; definitions do not."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return any(
        (isinstance(node, ast.Call) and not ast.unparse(node.func).startswith("time."))
        or (isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load))
        or isinstance(node, ast.With)
        for node in ast.walk(statement)
    )


def is_imported(name: str) -> bool:
    """Tell whether this process has a module, or a module has this name."""
    owner, _, attribute = name.rpartition(".")
    return name in sys.modules or attribute in getattr(sys.modules.get(owner), "__dict__", {})


def can_be_preloaded(name: str) -> bool:
    """Import a module or name in this process; whether processes may be forked that have it.

    The variables of ranks are removed: a library that copies all of them asks for none of these.
    """
    for key in [key for key in os.environ if key.startswith(_OF_A_RANK)]:
        del os.environ[key]
    found = _watched_calls()
    threads, state = _native_threads(), _state()
    try:
        with _silence():
            _import(name)
    except BaseException:  # noqa: BLE001 - a module may do anything when it is imported
        return False
    return not found and _native_threads() <= threads and _state() == state


def _watched_calls() -> list[str]:
    """Watch from now on what makes a module's content that of one process; returns what it did."""
    found: list[str] = []
    kind = type(os.environ)

    def of_a_rank(key: Any) -> None:
        if isinstance(key, str | bytes) and os.fsdecode(key).startswith(_OF_A_RANK):
            found.append(os.fsdecode(key))

    def of_the_user(name: str) -> None:
        if _is_users_import(sys._getframe(2)):
            found.append(name)

    def of_a_generator(_: random.Random, a: object = None, version: int = 2) -> None:
        if a is None:
            of_the_user("Random")

    _watch(kind, "__getitem__", lambda _, key: of_a_rank(key))
    _watch(kind, "__setitem__", lambda _, key, value: of_a_rank(key))
    _watch(kind, "__iter__", lambda _: of_the_user("environ"))
    for module, name in _OF_A_PROCESS:
        _watch(module, name, lambda *_, called=name, **__: of_the_user(called))
    for name in random.__all__:
        if getattr(getattr(random, name), "__self__", None) is random._inst:
            _watch(random, name, lambda *_, called=name, **__: of_the_user(called))
    for name in ("seed", "setstate"):  # by anyone: each rank is seeded anew
        _watch(random, name, lambda *_, called=name, **__: found.append(called))
    _watch(random.Random, "seed", of_a_generator)
    return found


def _watch(owner: Any, name: str, note: Callable[..., None]) -> None:
    before = getattr(owner, name)

    @wraps(before)
    def watched(*arguments: Any, **named: Any) -> Any:
        note(*arguments, **named)
        return before(*arguments, **named)

    setattr(owner, name, watched)


def _is_users_import(frame: FrameType | None) -> bool:
    """True if the module that is being imported in this frame is not an installed one."""
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith("<frozen importlib"):  # an extension module has no frame
            return False
        if code.co_name == "<module>" and not code.co_filename.startswith("<"):
            return not _is_of_a_library(code.co_filename)
        frame = frame.f_back
    return False


def _is_of_a_library(file: str | None) -> bool:
    """True if a module's file is installed with Python, and not one of the user's own."""
    path = Path(file or "")
    is_installed = not _FOLDERS_OF_LIBRARIES.isdisjoint(path.parts)
    return is_installed or any(map(path.is_relative_to, _LIBRARIES))


def _state() -> dict[str, Any]:
    """Settings of this process, which an import would change once and not again in each rank."""
    umask = os.umask(0o77)
    os.umask(umask)
    generators: dict[str, Any] = {}
    if "numpy" in sys.modules:
        generators["numpy"] = repr(sys.modules["numpy"].random.get_state(legacy=False))
    if "torch" in sys.modules:
        generators["torch"] = sys.modules["torch"].get_rng_state().tolist()
    return {
        **generators,
        "folder": os.getcwd(),
        "umask": umask,
        "path": sys.path[0],  # a rank sets it again
        "signals": [signal.getsignal(number) for number in sorted(signal.valid_signals())],
        "descriptors": _descriptors(),
    }


def preload(name: str) -> None:
    """Import a module or name, without what it writes and raises."""
    with _silence(), suppress(Exception):
        _import(name)


def _import(name: str) -> None:
    """Import a module, or have a library make a name that it makes when it is asked for it, as
    transformers and scipy do with most of what they have."""
    owner, _, attribute = name.rpartition(".")
    if owner and _is_of_a_library(getattr(importlib.import_module(owner), "__file__", None)):
        with suppress(AttributeError):
            getattr(sys.modules[owner], attribute)
            return
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
    """Threads of this process, but for those of libraries that see to forks themselves."""
    with suppress(OSError):
        return sum(map(_counts, Path("/proc/self/task").iterdir()))
    return threading.active_count()


def _counts(thread: Path) -> bool:
    with suppress(OSError):  # it has ended
        return (thread / "comm").read_text().strip() not in _SAFE_THREADS
    return False


def _descriptors() -> dict[str, str]:
    """Files that this process has open: ranks would share their positions, and accelerators."""
    found: dict[str, str] = {}
    with suppress(OSError):
        for entry in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # that of the folder itself
                found[entry] = os.readlink(f"/proc/self/fd/{entry}")
    return found
