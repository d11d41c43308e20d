"""Local sockets by which the ranks of a job on one host find each other, and the frames on them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import struct
import sys
import tempfile
import threading
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

SLOTS = 4
"""Addresses of a job: where a stopped process holds one, the next is used."""
SILENCE_S = 2.0
"""Time without a sign of life after which the node's sender counts as stopped."""
MOST_BYTES = 4 << 20
"""Largest content of a frame."""
_HEAD = struct.Struct("!BI")
_CREDENTIALS = struct.Struct("3i")
_READ_BYTES = 1 << 18
_BACKLOG = 256


class FrameKind(IntEnum):
    """Kinds of frames; an answer has the kind of its request."""

    WELCOME = 1
    WAIT = 2
    TELEMETRY = 3
    HEARTBEAT = 4
    FLUSH = 5


class Frame(NamedTuple):
    """One message between a rank and the node's sender."""

    kind: FrameKind
    content: bytes


class FrameSocket:
    """A connected stream socket that carries frames: kind, length, content.

    `send` may be called from several threads, `receive` from one. Both raise `OSError`, of which
    `ConnectionError` means that the other end closed, or sent something that is no frame.
    """

    def __init__(self, raw: socket.socket, timeout_s: float) -> None:
        raw.settimeout(timeout_s)
        self._raw = raw
        self._received = bytearray()
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._raw.fileno()

    def send(self, kind: FrameKind, content: bytes = b"") -> None:
        """Send one frame; with a time-out of 0, one that the buffer of the socket has room for."""
        with self._sending:
            self._raw.sendall(_HEAD.pack(kind, len(content)) + content)

    def receive(self) -> list[Frame]:
        """Read once; return the frames that are complete now, perhaps none."""
        data = self._raw.recv(_READ_BYTES)
        if not data:
            raise ConnectionError("the other end has closed the connection")
        self._received += data
        frames = []
        while len(self._received) >= _HEAD.size:
            kind, size = _HEAD.unpack_from(self._received)
            if kind not in FrameKind.__members__.values() or size > MOST_BYTES:
                raise ConnectionError("the other end has sent no frame")
            end = _HEAD.size + size
            if len(self._received) < end:
                break
            frames.append(Frame(FrameKind(kind), bytes(self._received[_HEAD.size : end])))
            del self._received[:end]
        return frames

    def shutdown(self) -> None:
        """End the connection for both ends; from any thread."""
        with contextlib.suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this process's copy of the socket."""
        self._raw.close()


class NodeListener:
    """A listening socket at one address of a job; `lock` is held as long as it is open."""

    def __init__(self, raw: socket.socket, lock: int | None) -> None:
        self._raw, self._lock = raw, lock

    def fileno(self) -> int:
        """File descriptor, for a selector."""
        return self._raw.fileno()

    def accept(self) -> FrameSocket:
        """Accept a rank of the same user. Raises `OSError`."""
        raw, _ = self._raw.accept()
        try:
            _require_same_user(raw)
        except OSError:
            raw.close()
            raise
        return FrameSocket(raw, 0.0)

    def close(self) -> None:
        """Close this process's copy of the socket: with the last one the address is free."""
        self._raw.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


class NodeAddress:
    """Addresses at which the ranks of one user, job, run and sidecar meet on a host.

    On Linux they are names of the abstract namespace, which vanish with the process that listens,
    and of which containers with a network of their own have their own. Elsewhere they are socket
    files, whose stale ones are told by a lock that vanishes with the process.

    folder  of the socket files; None: the abstract namespace
    """

    def __init__(self, job: str, url: str, folder: Path | None = None) -> None:
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        digest = hashlib.sha256("\n".join((job, url, run)).encode()).hexdigest()[:24]
        if folder is None and sys.platform != "linux":
            folder = Path(tempfile.gettempdir()) / f"resihp-{os.getuid()}"
        self._folder = folder
        self._name = f"resihp-{os.getuid()}-{digest}" if folder is None else digest[:16]

    @staticmethod
    def is_possible() -> bool:
        """Return whether this system has such sockets."""
        return hasattr(socket, "AF_UNIX") and hasattr(os, "getuid")

    def connect(self, slot: int) -> FrameSocket | None:
        """Connect to the sender at an address; None if nobody accepts the connection.

        Raises `OSError`: it does not answer in time, or belongs to another user.
        """
        raw = socket.socket(socket.AF_UNIX)
        try:
            raw.settimeout(SILENCE_S)
            raw.connect(self._at(slot))
            _require_same_user(raw)
            found = FrameSocket(raw, SILENCE_S)
            if [frame.kind for frame in found.receive()] != [FrameKind.WELCOME]:
                raise ConnectionError("another program answers")
        except (ConnectionError, FileNotFoundError):
            raw.close()
            return None
        except OSError:
            raw.close()
            raise
        return found

    def listen(self, slot: int) -> NodeListener | None:
        """Listen at an address; None if another process does. Raises `OSError`."""
        lock = None
        raw = socket.socket(socket.AF_UNIX)
        try:
            if self._folder is not None:
                lock = self._locked(self._folder, slot)
            raw.bind(self._at(slot))
            raw.listen(_BACKLOG)
            raw.setblocking(False)
        except OSError as error:
            raw.close()
            if lock is not None:
                os.close(lock)
            if error.errno in (errno.EADDRINUSE, errno.EWOULDBLOCK):
                return None
            raise
        return NodeListener(raw, lock)

    def _at(self, slot: int) -> str:
        if self._folder is None:
            return f"\0{self._name}-{slot}"
        return str(self._folder / f"{self._name}-{slot}")

    def _locked(self, folder: Path, slot: int) -> int:
        """Lock a socket file and remove what a process that died has left of it; the lock's
        descriptor."""
        import fcntl  # not on every system

        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid() or folder.stat().st_mode & 0o077:
            raise PermissionError(f"{folder} is not this user's own")
        lock = os.open(f"{self._at(slot)}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._at(slot))
        except OSError:
            os.close(lock)
            raise
        return lock


def _require_same_user(raw: socket.socket) -> None:
    """Raise `PermissionError` if the other end is known to be another user's.

    Where the system does not tell, the folder of the socket files is closed to others.
    """
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return
    _, user, _ = _CREDENTIALS.unpack(raw.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
    if user != os.getuid():
        raise PermissionError("the other end belongs to another user")
