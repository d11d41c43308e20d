"""Real text with a long tail of document lengths: the Python sources of the standard library.

Read from the user's own disk, byte by byte. A document is a top-level definition or method, so
lengths run from a few bytes to many thousands; microbatches are packed to a fixed token budget
and so hold equal tokens but unequal attention work, as in production.
"""

from __future__ import annotations

import random
import re
import sysconfig
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

import torch

from resihp.elastic.models import Packed

VOCABULARY = 256
_DOCUMENT = re.compile(rb"\n(?=    def |def |class |async def )")


@lru_cache(maxsize=1)
def documents() -> tuple[bytes, ...]:
    """Every document of the sources of the standard library, in order."""
    parts: list[bytes] = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        with suppress(OSError):
            parts += _DOCUMENT.split(path.read_bytes())
    return tuple(part for part in parts if len(part) > 1)


class PackedText:
    """Microbatches of `tokens` bytes; a function of (seed, step, index) alone."""

    def __init__(self, *, tokens: int, seed: int) -> None:
        self.tokens, self.seed = tokens, seed
        self._documents = documents()
        if not self._documents:
            raise FileNotFoundError("the standard library has no Python sources here")

    def __call__(self, step: int, index: int) -> Packed:
        """Microbatch `index` of `step`: whole documents, the last one cut to fit.

        Each byte predicts the next one of its document.
        """
        chosen = random.Random(f"{self.seed}/{step}/{index}")
        inputs: list[int] = []
        targets: list[int] = []
        lengths: list[int] = []
        while room := self.tokens - len(inputs):
            document = chosen.choice(self._documents)
            piece = document[: room + 1] if room > 1 else document[:1]
            length = min(len(piece), room)
            inputs += piece[:length]
            targets += [*piece[1 : length + 1], *([-100] if len(piece) <= length else [])]
            lengths.append(length)
        return Packed(torch.tensor(inputs), torch.tensor(targets), tuple(lengths))
