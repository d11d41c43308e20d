"""Events of a profiler file one after the other, so that a file of any size fits in memory."""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from resihp.contracts import TraceError

_GZIP = b"\x1f\x8b"
_CHUNK = 1 << 20
_MOST = 1 << 26
"""Characters of the longest value that is not a list of events."""
_AFTER = tuple(",]} \n\r\t")
_BLANK = re.compile(r"[\s,]*")


class EventStream:
    """Iterates over the events of one file, and raises `TraceError` where it is no profiler trace.

    header   the other entries of the document, by name; complete after the iteration
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: dict[str, Any] = {}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        try:
            with _opened(self.path) as file:
                yield from self._document(_JsonText(file))
        except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
            raise TraceError(f"{self.path}: is not readable JSON: {error}") from None

    def _document(self, text: _JsonText) -> Iterator[dict[str, Any]]:
        start, has_events = text.take(), False
        if start == "[":
            yield from self._events(text)
            return
        if start != "{":
            raise ValueError(f"begins with {start!r}")
        while text.peek() != "}":
            name = text.value()
            if text.take() != ":":
                raise ValueError(f"no colon after {name!r}")
            if name == "traceEvents" and text.peek() == "[":
                text.take()
                has_events = True
                yield from self._events(text)
            else:
                self.header[str(name)] = text.value()
        if not has_events:
            raise TraceError(f"{self.path}: is not a profiler trace (no list of traceEvents)")

    def _events(self, text: _JsonText) -> Iterator[dict[str, Any]]:
        while text.peek() != "]":
            event = text.value()
            if isinstance(event, dict):
                yield event
        text.take()


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    with path.open("rb") as file:
        is_packed = file.read(2) == _GZIP
        file.seek(0)
        raw: Any = gzip.GzipFile(fileobj=file) if is_packed else file
        yield io.TextIOWrapper(raw, encoding="utf-8", errors="replace")


class _JsonText:
    """JSON values read from a file of which only a part is in memory. Raises `ValueError`."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._text, self._at = "", 0
        self._decode = json.JSONDecoder(strict=False).raw_decode

    def peek(self) -> str:
        """The next character that is neither blank nor a comma."""
        while True:
            found = _BLANK.match(self._text, self._at)
            assert found is not None
            self._at = found.end()
            if self._at < len(self._text):
                return self._text[self._at]
            if not self._more():
                raise ValueError("it ends in the middle")

    def take(self) -> str:
        """Passes that character."""
        character = self.peek()
        self._at += 1
        return character

    def value(self) -> Any:
        """The next value."""
        self.peek()
        while True:
            try:
                value, end = self._decode(self._text, self._at)
            except json.JSONDecodeError:
                if len(self._text) - self._at > _MOST:
                    raise
                if not self._more():
                    raise
                continue
            # A number that does not end with a mark may go on in the next part of the file.
            is_open = self._text[end : end + 1] not in _AFTER
            if is_open and not isinstance(value, str | dict | list) and self._more():
                continue
            self._at = end
            return value

    def _more(self) -> bool:
        """Reads at least as much as is left, so that a long value is not read again and again."""
        left = self._text[self._at :]
        part = self._file.read(max(_CHUNK, len(left)))
        self._text, self._at = left + part, 0
        return bool(part)
