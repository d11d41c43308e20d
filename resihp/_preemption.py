"""Notices that this node, or process, is about to be taken away: signals, a file, an address."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from types import FrameType
from typing import Any

from resihp._shutdown import start_thread
from resihp.contracts import ContractError

_log = logging.getLogger("resihp.preemption")
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
NOTICED_STATUS = 128 + signal.SIGTERM
"""Exit status of processes that were ended by a notice, and may be started again."""
FILE, URL, SECONDS = "RESIHP_PREEMPTION_FILE", "RESIHP_PREEMPTION_URL", "RESIHP_PREEMPTION_SECONDS"
"""Variables for a process without a launcher; a launcher gives its ranks a file of its own."""
_NO_CONTENT_YET = 404
_LATEST_S = datetime(9999, 12, 31, tzinfo=UTC).timestamp()


class PreemptionNotice:
    """The first notice that comes; later ones change nothing.

    file        notice from the moment it exists
    url         asked in a thread: status 200 with a body is a notice, any other answer none
    window_s    seconds that a notice leaves which names no time; None: not known
    interval_s  between two looks at file and address
    why         clause that names the notice; None as long as there is none
    status      exit status of the process after it
    until_s     `time.monotonic` at which the node is gone; inf while that is not known
    """

    def __init__(
        self,
        file: Path | None = None,
        url: str | None = None,
        *,
        window_s: float | None = None,
        interval_s: float = 2.0,
    ) -> None:
        self.why: str | None = None
        self.status = int(NOTICED_STATUS)
        self.until_s = inf
        self._file, self._url, self._interval_s = file, url, interval_s
        self._window_s = inf if window_s is None else window_s
        self._then: Callable[[float], None] = lambda until_s: None
        self._noticed, self._is_closed = threading.Event(), False
        self._handlers_before: dict[int, Any] = {}
        self._has_failed = False

    @classmethod
    def of_environment(cls, given: Mapping[str, str]) -> PreemptionNotice:
        """Read the variables above. Raises `ContractError` for seconds that are no number."""
        file, url, seconds = given.get(FILE), given.get(URL), given.get(SECONDS)
        try:
            window_s = float(seconds) if seconds else None
        except ValueError:
            raise ContractError(SECONDS, f"must be a number, not {seconds!r}") from None
        return cls(Path(file) if file else None, url or None, window_s=window_s)

    def start(
        self,
        then: Callable[[float], None] | None = None,
        *,
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        """Handle `signals`, in the main thread, and look for the other notices from now on.

        then  called once in a thread, with `until_s`
        """
        self._then = then or self._then
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                self._handlers_before[number] = signal.signal(number, self.handle_signal)
        if self._file is not None or self._url or then is not None:
            thread = threading.Thread(target=self._run, name="resihp-preemption", daemon=True)
            start_thread(thread, self.close)

    def handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Take a signal as the notice. Reads nothing: the main thread may be anywhere, in `close`
        with the event's lock too."""
        if self.why is None and not self._is_closed:
            self.status = 128 + number
            self.until_s = time.monotonic() + self._window_s
            self.why = f"got {signal.Signals(number).name}"
            self._noticed.set()

    def look(self) -> None:
        """Look at file and address once."""
        found = self._in_file() or self._at_url()
        if found and self.why is None:
            self.why, left_s = found
            self.until_s = time.monotonic() + left_s

    def close(self) -> None:
        """Stop looking, and in the main thread handle signals as before `start`."""
        self._is_closed = True
        self._noticed.set()
        if threading.current_thread() is threading.main_thread():
            while self._handlers_before:
                number, before = self._handlers_before.popitem()
                if signal.getsignal(number) == self.handle_signal:
                    signal.signal(number, before or signal.SIG_DFL)  # None: not set by Python

    def forward(self, file: Path) -> None:
        """Write the notice to `file`, where other processes of this host look for it."""
        text = ""
        if self.until_s < inf:
            until_s = min(time.time() + self.until_s - time.monotonic(), _LATEST_S)
            text = json.dumps({"time": datetime.fromtimestamp(until_s, UTC).isoformat()})
        new = file.with_suffix(".new")
        new.write_text(text)
        new.rename(file)

    def _run(self) -> None:
        while self.why is None and not self._is_closed:
            self.look()
            if self.why is None:
                self._noticed.wait(self._interval_s)
        if self.why is None:
            return
        if self.until_s == inf and (found := self._in_file()) is not None:
            self.until_s = time.monotonic() + found[1]  # a launcher writes it before it signals
        self._then(self.until_s)

    def _in_file(self) -> tuple[str, float] | None:
        """Return the notice, and the seconds that it leaves."""
        if self._file is None:
            return None
        try:
            text, written_s = self._file.read_text(errors="replace"), self._file.stat().st_mtime
        except OSError:
            if not os.path.exists(self._file):
                return None
            return f"found {self._file}", self._window_s
        line = _first_line(text)
        left_s = self._left_s(text, written_s)
        return f"found {self._file}" + (f": {line}" if line else ""), left_s

    def _at_url(self) -> tuple[str, float] | None:
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
            text = answer.data.decode(errors="replace")
            return f"notice of {self._url}: {_first_line(text)}", self._left_s(text, time.time())
        if answer.status not in (200, _NO_CONTENT_YET):
            self._warn(f"status {answer.status}")
        return None

    def _left_s(self, text: str, written_s: float) -> float:
        until_s = end_of_window(text, written_s)
        if until_s is None:
            until_s = written_s + self._window_s
        return until_s - time.time()

    def _warn(self, problem: str) -> None:
        level = logging.DEBUG if self._has_failed else logging.WARNING
        self._has_failed = True
        _log.log(level, "no answer on preemption from %s: %s", self._url, problem)


def end_of_window(text: str, written_s: float) -> float | None:
    """Unix time at which the node is gone by the `text` of a notice; None: it names none.

    The text is a number of seconds from `written_s` on, a time in ISO 8601, or a JSON object with
    one of them as `seconds` or `time`, as AWS answers. Numbers beyond all calendars name none.

    >>> end_of_window("120", 1000.0), end_of_window('{"seconds": 30}', 1000.0)
    (1120.0, 1030.0)
    >>> end_of_window('{"action": "terminate", "time": "1970-01-01T00:20:00Z"}', 1000.0)
    1200.0
    >>> end_of_window("maintenance", 1000.0)
    """
    found: object = text.strip()
    with suppress(ValueError):
        document = json.loads(text)
        found = document
        if isinstance(document, dict):
            found = document.get("seconds", document.get("time"))
    if isinstance(found, int | float) and not isinstance(found, bool):
        return written_s + found if abs(found) < _LATEST_S else None
    with suppress(TypeError, ValueError):
        time_given = datetime.fromisoformat(str(found))
        aware = time_given if time_given.tzinfo else time_given.replace(tzinfo=UTC)
        return aware.timestamp()
    return None


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:200]
