"""Notices that this node is about to be taken away: signals, a file, an address."""

from __future__ import annotations

import logging
import signal
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from resihp._shutdown import start_thread

_log = logging.getLogger("resihp.launch")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NOTICED_STATUS = 128 + signal.SIGTERM
"""Exit status of launchers whose job was ended by a notice, and may be started again."""
_NO_CONTENT_YET = 404


class PreemptionNotice:
    """The first notice that comes; later ones change nothing.

    file        notice from the moment it exists
    url         asked in a thread: status 200 with a body is a notice, any other answer none
    interval_s  between two looks at file and address
    why         clause that names the notice; None as long as there is none
    status      exit status of the launcher after it
    """

    def __init__(
        self, file: Path | None = None, url: str | None = None, *, interval_s: float = 2.0
    ) -> None:
        self.why: str | None = None
        self.status = int(NOTICED_STATUS)
        self._file, self._url, self._interval_s = file, url, interval_s
        self._closed = threading.Event()
        self._has_failed = False

    def start(self) -> None:
        """Handle signals, in the main thread, and look for the other notices from now on."""
        for number in SIGNALS:
            signal.signal(number, self.handle_signal)
        if self._file is not None or self._url:
            thread = threading.Thread(target=self._run, name="resihp-preemption", daemon=True)
            start_thread(thread, self._closed.set)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Take a signal as the notice. Does nothing else: the main thread may be anywhere."""
        if self.why is None:
            self.status = 128 + number
            self.why = f"got {signal.Signals(number).name}"

    def look(self) -> None:
        """Look at file and address once."""
        why = self._in_file() or self._at_url()
        if why and self.why is None:
            self.why = why

    def close(self) -> None:
        """Stop looking."""
        self._closed.set()

    def _run(self) -> None:
        while self.why is None:
            self.look()
            if self._closed.wait(self._interval_s):
                return

    def _in_file(self) -> str | None:
        if self._file is None or not self._file.exists():
            return None
        with suppress(OSError, IndexError):
            return f"found {self._file}: {_first_line(self._file.read_text(errors='replace'))}"
        return f"found {self._file}"

    def _at_url(self) -> str | None:
        if not self._url:
            return None
        import urllib3  # only where it is asked for

        try:
            answer = urllib3.request(
                "GET", self._url, timeout=self._interval_s, retries=False, redirect=False
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            self._warn(str(error))
            return None
        if answer.status == 200 and answer.data.strip():
            return f"notice of {self._url}: {_first_line(answer.data.decode(errors='replace'))}"
        if answer.status not in (200, _NO_CONTENT_YET):
            self._warn(f"status {answer.status}")
        return None

    def _warn(self, problem: str) -> None:
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        _log.log(level, "no answer on preemption from %s: %s", self._url, problem)


def _first_line(text: str) -> str:
    """First line of a notice. Raises `IndexError` if it is empty."""
    return text.strip().splitlines()[0][:200]
