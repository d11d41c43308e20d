"""The script of a rank, in its forked process as Python itself would run it."""

from __future__ import annotations

import atexit
import mmap
import os
import runpy
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType, TracebackType

from .options import Command


def pose_as(command: Command, at_start: frozenset[str]) -> None:
    """Set arguments and path as Python does for this command.

    Modules of the standard library that torch has imported, and that are hidden by one beside the
    script, are forgotten: the script's import finds its own.
    """
    sys.argv = [command.target, *command.arguments]
    if command.is_container:
        folder = os.path.abspath(command.target)
    elif sys.flags.safe_path:
        return
    else:
        is_script = command.kind == "script"
        folder = str(Path(command.target).resolve().parent) if is_script else os.getcwd()
    if sys.path[:1] != [folder]:
        sys.path.insert(0, folder)
    for name in sys.stdlib_module_names.intersection(sys.modules) - at_start:
        if _is_hidden(name, folder):
            for each in [one for one in sys.modules if f"{one}.".startswith(f"{name}.")]:
                del sys.modules[each]


def _is_hidden(name: str, folder: str) -> bool:
    """True if `folder` has another module of this name, before which only built-in ones come."""
    known = getattr(sys.modules[name], "__spec__", None)
    here = PathFinder.find_spec(name, [folder])
    if known is None or here is None or not (known.has_location and here.has_location):
        return False
    return os.path.realpath(str(known.origin)) != os.path.realpath(str(here.origin))


class LastExitHandler:
    """Tells the process that forks that a rank has completed its script and its exit handlers.

    What is left is Python's own end, in which torch aborts now and then: a thread of gloo asks for
    the interpreter that is gone (pytorch/pytorch#190489). Exit handlers run from the last to the
    first: this one is made before any module could register one.
    """

    def __init__(self) -> None:
        self._completed: mmap.mmap | None = None
        self._rank = 0
        self._is_expected = False
        atexit.register(self._tell)

    def begin(self, completed: mmap.mmap) -> None:
        """Make this process a rank, which shares a byte with the process that forks."""
        self._completed, self._rank = completed, os.getpid()

    def expect(self) -> None:
        """Note that the script of this rank has ended well."""
        self._is_expected = True

    def _tell(self) -> None:
        is_rank = self._rank == os.getpid()  # and not what the script has forked
        if self._completed is not None and self._is_expected and is_rank:
            self._completed[0] = 1


@dataclass(frozen=True)
class RankScript:
    """Command of a forked child, with its variables and streams; the rest as of the server."""

    command: Command
    variables: Mapping[str, str]
    streams: Sequence[int]
    at_start: frozenset[str]
    last: LastExitHandler

    def run(self) -> None:
        """Become the rank. Returns or raises as the script does."""
        for descriptor, stream in zip(self.streams, (1, 2), strict=True):
            os.dup2(descriptor, stream)
            os.close(descriptor)
        os.environ.update(self.variables)
        command = self.command
        if command.kind == "program":
            for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and then by the program
                signal.signal(ignored, signal.SIG_DFL)
            os.execvp(command.target, [command.target, *command.arguments])
        # Their state is that of the server; `random` reseeds itself, CUDA's generators come later.
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        pose_as(command, self.at_start)
        _show_tracebacks_of_the_script()
        try:
            _run_main(command)
        except SystemExit as end:
            if not end.code:
                self.last.expect()
            raise
        self.last.expect()


def _run_main(command: Command) -> None:
    main = sys.modules["__main__"] = ModuleType("__main__")
    if command.kind == "module":
        # As `python -m` does; `run_module` takes `__main__` away before threads and exit handlers
        # of the module have ended.
        runpy._run_module_as_main(command.target)  # type: ignore[attr-defined]
    elif command.is_container:
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]
    else:
        _run_script(command.target, main)


def _show_tracebacks_of_the_script() -> None:
    """Leave out the frames before the script's first one, of which its author knows nothing; a
    script that Python cannot read has none, and its error tells the line."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        first = frame = trace
        while frame is not None:
            is_of_runpy = frame is first and frame.tb_frame.f_globals.get("__name__") == "runpy"
            if is_of_runpy or frame.tb_frame.f_code.co_filename == __file__:
                first = frame.tb_next
            frame = frame.tb_next
        shown = first if first or isinstance(error, SyntaxError) else trace
        previous(kind, error.with_traceback(shown), shown)

    sys.excepthook = hook


def _run_script(path: str, main: ModuleType) -> None:
    """Run a script as `python PATH` does: as the module `__main__` of this process."""
    path = os.path.abspath(path)
    main.__dict__.update(__file__=path, __builtins__=__builtins__)
    code = compile(Path(path).read_bytes(), path, "exec", dont_inherit=True)
    exec(code, main.__dict__)
