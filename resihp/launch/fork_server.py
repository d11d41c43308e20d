"""A process that has imported torch, and forks the ranks of a node from itself.

`ForkServer` is the launcher's end of it. A rank so started is at its script's first line after some
20 ms, in place of the seconds that the import of torch takes. Once the ranks run, the server also
imports those modules of the script that are safe to import before a fork, for the next start.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import logging
import mmap
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from .options import Command
from .preloading import can_be_preloaded, imports_of, is_imported, preload
from .rank_processes import kill_group, signal_group
from .rank_script import LastExitHandler, RankScript, pose_as

_log = logging.getLogger("resihp.launch")
_PRELOADED = ("torch", "torch.distributed", "torch._dynamo")  # the first update imports the last
_EVENT_BYTES = 1 << 10
_MOST_DESCRIPTORS = 3
_CLOSE_S = 1.0
_OF_OTHERS = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Signals that a cluster's manager may send to all processes of a job, for ranks to end well."""
_CRASHES = {signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL}
_PR_SET_PDEATHSIG = 1
_PACKAGES = Path(__file__).parents[2]
_START = """\
import sys
at_start = frozenset(sys.modules)
if not sys.flags.safe_path:
    del sys.path[0]  # the current folder, whose files are the script's business
sys.path.append(sys.argv[2])
from resihp.launch.fork_server import serve
serve(int(sys.argv[1]), at_start)
"""


@dataclass(frozen=True)
class Started:
    """A rank's process has begun."""

    key: str
    pid: int


@dataclass(frozen=True)
class Ended:
    """A rank's process has ended: its exit status, or minus the signal that killed it.

    crash  signal by which Python crashed as it ended, after a script that had completed: the status
           is that of the script, 0
    """

    key: str
    status: int
    crash: int | None = None


class ForkServer:
    """The launcher's end: starts and ends ranks. The ranks end with the launcher."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = start_python(theirs.fileno(), environment)
        self._socket = ours
        self._alive: dict[str, int | None] = {}  # a pid once it is known

    def start(
        self, key: str, command: Command, variables: Mapping[str, str], streams: Sequence[int]
    ) -> None:
        """Start a process whose stdout and stderr are `streams`; `key` names it from now on.

        variables  added to the environment that the server was started with
        """
        self._alive[key] = None
        self._send(
            {"start": key, "command": asdict(command), "variables": dict(variables)}, streams
        )

    def signal(self, key: str, number: int) -> None:
        """Send a signal to a process: SIGKILL also to those that it has started.

        Other signals are those processes' own business, as a worker of a data loader that ends
        before its rank makes the rank fail. A program, which may be a shell, shares its signals.
        """
        if key in self._alive:
            self._send({"signal": number, "key": key})

    def preload(self, command: Command) -> None:
        """Import what the script imports, as far as that is safe, for processes to come."""
        self._send({"preload": asdict(command)})

    def wait(self, timeout_s: float) -> None:
        """Wait until `events` has something to tell, or for a time."""
        with selectors.PollSelector() as selector:  # which takes any descriptor, and no further one
            selector.register(self._socket, selectors.EVENT_READ)
            selector.select(timeout_s)

    def events(self) -> list[Started | Ended]:
        """Take what has happened; if the server died, all its processes have ended by SIGKILL,
        and what they have started is killed here."""
        found: list[Started | Ended] = []
        while True:
            try:
                message = self._socket.recv(_EVENT_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except OSError:
                message = b""
            if not message:
                _log.error("the process that forks the ranks has ended, and they with it")
                self._kill_groups()
                found += [Ended(key, -signal.SIGKILL) for key in sorted(self._alive)]
                self._alive.clear()
                return found
            told = json.loads(message)
            if "pid" in told:
                self._alive[told["key"]] = told["pid"]
                found.append(Started(told["key"], told["pid"]))
            else:
                del self._alive[told["key"]]
                found.append(Ended(told["key"], told["status"], told["crash"]))

    @property
    def is_alive(self) -> bool:
        """True if the server can start processes."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the server and all its processes: it kills them, or they end with it."""
        self._socket.close()
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:  # an extension module may hold the interpreter
            self._process.kill()
            self._process.wait()
            self._kill_groups()

    def _kill_groups(self) -> None:
        """Kill what the processes of a lost server have started; they themselves end with it."""
        for pid in self._alive.values():
            if pid is not None:
                with suppress(ProcessLookupError, PermissionError):
                    kill_group(pid)

    def _send(self, message: Mapping[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send a message as a file: a command line is longer than what a socket takes at once."""
        with _file_in_memory() as file:
            file.write(json.dumps(message).encode())
            file.flush()
            with suppress(ConnectionError):  # `events` tells that the server is gone
                socket.send_fds(self._socket, [b"m"], [file.fileno(), *descriptors])


def _file_in_memory() -> IO[bytes]:
    if hasattr(os, "memfd_create"):  # on Linux
        return os.fdopen(os.memfd_create("resihp-message"), "w+b")
    return tempfile.TemporaryFile()


def start_python(control: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the process that forks, in a session of its own; `control` is its end of the socket."""
    return subprocess.Popen(
        [sys.executable, "-u", "-c", _START, str(control), str(_PACKAGES)],
        env=dict(environment),
        pass_fds=[control],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


class _Server:
    """The process that forks. It has no state but its children, and one thread when it forks.

    While it imports a module of the script, a second thread notes the ends of ranks, passes signals
    on and ends the process with the launcher. What would fork waits for the end of the import.
    Signals to all processes of the job do not end it, as it takes its children along.

    at_start  modules that Python imports before any script
    last      handler that runs after all others when a rank exits
    """

    def __init__(
        self, control: socket.socket, at_start: frozenset[str], last: LastExitHandler
    ) -> None:
        self._control, self._at_start, self._last = control, at_start, last
        self._folder = os.getcwd()
        self._keys: dict[int, str] = {}
        self._completed: dict[int, mmap.mmap] = {}  # a byte that the rank sets
        self._programs: set[int] = set()
        self._to_import: list[str] = []
        self._tried: set[str] = set()  # what was refused once is refused again
        self._trial: tuple[int, str] | None = None  # the child that imports a module, and its name
        self._accepted: str | None = None  # module whose trial has succeeded
        self._held: list[tuple[dict[str, Any], list[int]]] = []  # messages that came meanwhile
        self._handlers: dict[int, Any] = {}  # of the children
        self._signals, self._wakeup = socket.socketpair()
        for end in (self._signals, self._wakeup):
            end.setblocking(False)

    def serve(self) -> RankScript:
        """Serve until the launcher is gone; in a forked child, return what it has to run."""
        gc.disable()  # a fifth of an import's time, and what is imported stays
        signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._handlers = {each: signal.signal(each, signal.SIG_IGN) for each in _OF_OTHERS}
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while True:
                may_import = bool(self._to_import) and self._trial is None
                is_waiting = may_import or bool(self._held) or self._accepted is not None
                ready = {key.fileobj for key, _ in selector.select(0 if is_waiting else None)}
                self._reap()
                if self._control in ready:
                    self._held.append(self._receive())
                if self._held:
                    if task := self._obey(*self._held.pop(0)):
                        return task
                elif self._accepted is not None:
                    self._import(self._accepted)
                else:
                    self._try_next()

    def _import(self, name: str) -> None:
        """Import a module of the script, and attend to the launcher and to ranks meanwhile."""
        self._accepted = None
        imported, importing = socket.socketpair()
        attendant = threading.Thread(target=self._attend, args=(imported,))
        attendant.start()
        try:
            preload(name)
        finally:
            importing.close()
            attendant.join()
            imported.close()
        with suppress(OSError):  # deleted meanwhile, or closed to this user
            os.chdir(self._folder)  # that of the ranks, and of a script's relative path

    def _attend(self, imported: socket.socket) -> None:
        """Do what needs no fork, until the import ends."""
        with selectors.DefaultSelector() as selector:
            for end in (self._control, self._signals, imported):
                selector.register(end, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                self._reap()
                if self._control in ready:
                    message, descriptors = self._receive()
                    if "signal" in message and not self._held:
                        self._signal(message)
                    else:  # a signal may be for a rank that is to be forked
                        self._held.append((message, descriptors))
                if imported in ready:
                    return

    def _receive(self) -> tuple[dict[str, Any], list[int]]:
        """Take the next message and its descriptors; end this process if the launcher has ended."""
        data, descriptors = b"", list[int]()
        with suppress(OSError):
            data, descriptors, _, _ = socket.recv_fds(self._control, 1, _MOST_DESCRIPTORS)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)  # a program gets copies of its own
        if not data:
            self._kill_all()
            os._exit(0)  # there is nothing to clean up, which takes Python a second with torch
        file, *streams = descriptors
        with os.fdopen(file, "rb") as content:
            content.seek(0)
            return json.loads(content.read()), streams

    def _obey(self, message: dict[str, Any], descriptors: list[int]) -> RankScript | None:
        if "start" in message:
            return self._fork(message, descriptors)
        if "signal" in message:
            self._signal(message)
        if "preload" in message:
            command = Command(**message["preload"])
            pose_as(command, self._at_start)
            self._to_import = imports_of(command)
        return None

    def _signal(self, message: dict[str, Any]) -> None:
        for pid, key in self._keys.items():
            if key != message["key"]:
                continue
            if message["signal"] == signal.SIGKILL or pid in self._programs:
                signal_group(pid, message["signal"])
            else:
                os.kill(pid, message["signal"])

    def _fork(self, message: dict[str, Any], descriptors: list[int]) -> RankScript | None:
        gc.freeze()  # the ranks need not look through what is here, nor copy its pages for that
        completed = mmap.mmap(-1, 1)
        if pid := self._forked():
            self._completed[pid] = completed
            for descriptor in descriptors:
                os.close(descriptor)
            self._keys[pid] = message["start"]
            if message["command"]["kind"] == "program":
                self._programs.add(pid)
            self._tell({"key": message["start"], "pid": pid})
            return None
        gc.enable()
        command = Command(**message["command"])
        self._last.begin(completed)
        return RankScript(command, message["variables"], descriptors, self._at_start, self._last)

    def _forked(self) -> int:
        """Fork; returns 0 in the child, a process of its own that has missed no signal."""
        server, mask = os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, _OF_OTHERS)
        try:
            if not (pid := os.fork()):
                self._leave(server)
            return pid
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def _leave(self, server: int) -> None:
        """Turn this forked child into a process of its own that ends with the server."""
        os.setsid()
        end_with(server)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        for end in (self._control, self._signals, self._wakeup):
            end.close()
        for _, descriptors in self._held:  # streams of other ranks
            for descriptor in descriptors:
                os.close(descriptor)

    def _reap(self) -> None:
        """Take the ends of children; what a failed one has started is killed before it is told.

        A module that is being imported may have children of its own, for whose ends it waits.
        """
        with suppress(BlockingIOError):
            self._signals.recv(4096)
        trial, module = self._trial or (0, "")
        for pid in [*self._keys, *([trial] if trial else [])]:
            ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None:
                continue
            if ended.si_status and pid != trial:
                signal_group(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            if pid == trial:
                self._trial, self._accepted = None, module if status == 0 else None
                continue
            self._programs.discard(pid)
            self._tell({"key": self._keys.pop(pid), **self._end_of(pid, status)})

    def _end_of(self, pid: int, wait_status: int) -> dict[str, int | None]:
        """Status and crash of an `Ended`."""
        status = os.waitstatus_to_exitcode(wait_status)
        with self._completed.pop(pid) as completed:
            is_after_all = -status in _CRASHES and completed[0] != 0
        return (
            {"status": 0, "crash": -status} if is_after_all else {"status": status, "crash": None}
        )

    def _tell(self, message: Mapping[str, Any]) -> None:
        with suppress(OSError):  # the launcher is gone, which `serve` notices
            self._control.send(json.dumps(message).encode())

    def _kill_all(self) -> None:
        for pid in self._keys:
            signal_group(pid, signal.SIGKILL)

    def _try_next(self) -> None:
        """Begin the import of the next of the script's modules, in a child, while nothing waits.

        A module whose import never ends is the last one.
        """
        while self._to_import and self._trial is None:
            name = self._to_import.pop(0)
            if name in self._tried or is_imported(name):
                continue
            self._tried.add(name)
            pid = self._forked()
            if pid == 0:
                os.nice(10)
                os._exit(0 if can_be_preloaded(name) else 1)
            self._trial = (pid, name)


def end_with(parent: int) -> None:
    """Have this process killed when its parent ends, however that ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def serve(control: int, at_start: frozenset[str] = sys.stdlib_module_names) -> None:
    """Serve the launcher until it ends; returns or raises in a rank, as its script does.

    control   descriptor of this process's end of the socket
    at_start  modules that Python imports before any script
    """
    last = LastExitHandler()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for CUDA must not start it
    given = dict(os.environ)
    for name in _PRELOADED:
        importlib.import_module(name)
    os.environ.clear()  # torch sets variables of its own, which are then defaults of the script's
    os.environ.update(given)
    _Server(socket.socket(fileno=control), at_start, last).serve().run()
