"""A shard whose values are still to come, and where they are written: to memory, or to files.

A file takes what the limit on memory has no room for beside the old world. Its tensor is a private
mapping of it: what is written to the file shows there, and only once the new world is trained does
the first update turn its pages into memory, of which the old world has by then let go. Linux
promises to show it; a page that was not yet written through the private mapping is the file's.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from resihp.layout import Param, Range

from ..engine.shard import Shard
from ..engine.sums import Gradients
from .memory import Spill

_log = logging.getLogger("resihp.elastic")


@dataclass(frozen=True)
class Room:
    """Gives out memory for what comes, all of it touched; for what is `spilled`, files of `folder`.

    Touching it costs more than filling it, and so belongs into the preparation. Where a file cannot
    be had, `insists` says that memory has to do.
    """

    spilled: Spill = field(default_factory=Spill)
    folder: Path | None = None
    insists: bool = False
    files: dict[Param, list[torch.Tensor]] = field(default_factory=dict)
    _gradients: list[torch.Tensor] = field(default_factory=list)

    def allot(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape of `like`, for `param` or one of its moments.

        Raises `OSError` if the disk is full, unless it `insists`.
        """
        if param not in self.spilled.state:
            return torch.zeros_like(like)
        seen, written = self._mapped(like, ("private", "shared"))
        self.files.setdefault(param, []).append(written)
        return seen

    def gradient(self, param: Param, like: torch.Tensor) -> torch.Tensor:
        """The same for a gradient, which is let go before memory is short."""
        if param not in self.spilled.gradients:
            return torch.zeros_like(like)
        (gradient,) = self._mapped(like, ("shared",))
        self._gradients.append(gradient)
        return gradient

    @property
    def bytes(self) -> int:
        """What is in files, and would be in memory otherwise."""
        copies = [tensor for tensors in self.files.values() for tensor in tensors]
        return sum(tensor.nbytes for tensor in (*copies, *self._gradients))

    def _mapped(self, like: torch.Tensor, kinds: tuple[str, ...]) -> list[torch.Tensor]:
        if like.numel() == 0:
            return [torch.zeros_like(like) for _ in kinds]
        try:
            return self._in_file(like, kinds)
        except OSError as error:
            if not self.insists:
                raise
            _log.warning("%d bytes more than allowed stay in memory: %s", like.nbytes, error)
            return [torch.zeros_like(like)] * len(kinds)

    def _in_file(self, like: torch.Tensor, kinds: tuple[str, ...]) -> list[torch.Tensor]:
        descriptor, name = tempfile.mkstemp(prefix="resihp-spill-", dir=self.folder)
        try:
            # Without room on the disk a write through a mapping would end the process.
            os.posix_fallocate(descriptor, 0, like.nbytes)
            mapped = {
                kind: torch.from_file(
                    name, shared=kind == "shared", size=like.numel(), dtype=like.dtype
                ).view_as(like)
                for kind in kinds
            }
            mapped["shared"].zero_()
            return [*mapped.values()]
        finally:
            os.close(descriptor)
            os.unlink(name)  # it lives on until the last tensor is let go


@dataclass(frozen=True)
class Draft:
    """A shard that is being filled; `state` is where its values are to be written.

    gradients  room for those of a step whose update it makes, where it shares no tensor with the
               old shard
    """

    shard: Shard
    room: Room = field(default_factory=Room)
    gradients: Gradients = field(default_factory=dict)

    @property
    def ranges(self) -> Mapping[Param, Range]:
        """Range of each parameter held."""
        return self.shard.ranges

    def state(self, param: Param) -> tuple[torch.Tensor, ...]:
        """The parameter and its moments."""
        files = self.room.files.get(param)
        return self.shard.state(param) if files is None else tuple(files)


def unshared(shard: Shard, old: Shard | None) -> Mapping[Param, torch.Tensor]:
    """The tensors of a new shard that are not those of the old one."""
    held = old.tensors if old is not None else {}
    return {p: tensor for p, tensor in shard.tensors.items() if held.get(p) is not tensor}
