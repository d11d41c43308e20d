"""Real text with a long tail of document lengths: the Python sources of the standard library.

Read from the user's own disk, byte by byte. A document is a top-level definition or method, so
lengths run from a few bytes to many thousands; microbatches are packed to a fixed token budget
and so hold equal tokens but unequal attention work, as in production.
"""

from __future__ import annotations

import random
import re
import sysconfig
from functools import lru_cache
from pathlib import Path

import torch

from resihp.elastic.models import Packed

VOCABULARY = 256
_DOCUMENT = re.compile(rb"\n(?=    def |def |class |async def )")


@lru_cache(maxsize=1)
def documents(folder: Path | None = None) -> tuple[bytes, ...]:
    """Every document of the sources in `folder` (default: the standard library), in order."""
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    parts = (part for path in sorted(root.glob("*.py")) for part in _DOCUMENT.split(_read(path)))
    return tuple(part for part in parts if len(part) > 1)


class PackedText:
    """Microbatches of `tokens` bytes; a function of (seed, step, index) alone."""

    def __init__(self, *, tokens: int, seed: int, folder: Path | None = None) -> None:
        self.tokens, self.seed = tokens, seed
        self._documents = documents(folder)
        if not self._documents:
            raise FileNotFoundError(f"no Python sources in {folder}")

    def __call__(self, step: int, index: int) -> Packed:
        """Microbatch `index` of `step`: whole documents, the last one cut to fit."""
        chosen = random.Random(f"{self.seed}/{step}/{index}")
        pieces: list[bytes] = []
        room = self.tokens
        while room:
            document = chosen.choice(self._documents)
            pieces.append(document[: room + 1] if room > 1 else document[:1])
            room -= min(len(pieces[-1]), room)
        return _pack(pieces, self.tokens)


def _pack(pieces: list[bytes], tokens: int) -> Packed:
    """Each byte predicts the next one of its document."""
    inputs: list[int] = []
    targets: list[int] = []
    lengths: list[int] = []
    for piece in pieces:
        length = min(len(piece), tokens - len(inputs))
        inputs += piece[:length]
        targets += [*piece[1 : length + 1], *([-100] if len(piece) <= length else [])]
        lengths.append(length)
    return Packed(torch.tensor(inputs), torch.tensor(targets), tuple(lengths))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
