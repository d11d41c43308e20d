"""The lazy copy as a stager of torch's: a state goes in, a future of its copy comes out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from resihp.contracts import CheckpointError

from ..history import Lineage
from ..ranks import IndependentRank
from ..staging.in_flight import InFlightCheckpoint
from ..staging.stager import Stager

StateDict: TypeAlias = dict[str, Any]

_UPLOAD = "upload"
_PATIENCE_S = 600.0


class DcpStager:
    """One buffer of the size of this rank's state, held from `stage` until `release`."""

    def __init__(self) -> None:
        one_of_several = IndependentRank(
            0, (0, 1), "torch"
        )  # whose parts it knows, and shares out, itself
        self._stager = Stager(one_of_several, buffers=1)
        self._threads = ThreadPoolExecutor(1, "resihp-checkpoint-stage")
        self._checkpoint: InFlightCheckpoint | None = None

    def know(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
        """See `Stager.know`."""
        self._stager.know(optimizer, modules)

    def stage(self, state: StateDict) -> Future[StateDict]:
        """Begin to copy, once the copy before has been released."""
        self._await_release()
        found = self._stager.fit(state)
        assert found.has_buffers, "the only buffer is free"
        checkpoint = self._stager.lend(0, Lineage(""), found, state, {}, 0.0)
        assert checkpoint is not None
        checkpoint.taken[_UPLOAD] = 0
        self._checkpoint = checkpoint
        where = {found.parts[pick].path: number for number, pick in enumerate(self._stager.picks)}
        copied = _rebuilt(state, checkpoint, where, ())
        self._stager.start(checkpoint)
        return self._threads.submit(_once_copied, checkpoint, copied)

    def fence(self, tensors: Sequence[Tensor] | None) -> None:
        """Wait until these tensors may change."""
        if self._checkpoint is not None:
            self._stager.fence(self._checkpoint, tensors)

    def release(self) -> None:
        """The copy is needed no more."""
        if self._checkpoint is not None:
            self._checkpoint.done_with(_UPLOAD)
            self._stager.settle()

    def close(self) -> None:
        """End the threads."""
        self._stager.close()
        self._threads.shutdown()

    def _await_release(self) -> None:
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        with checkpoint.changed:
            if not checkpoint.changed.wait_for(lambda: checkpoint.is_idle, _PATIENCE_S):
                raise CheckpointError("the save before has not ended")


def _once_copied(checkpoint: InFlightCheckpoint, copied: StateDict) -> StateDict:
    if checkpoint.count:
        checkpoint.take(checkpoint.count - 1)
    return copied


def _rebuilt(
    value: Any, checkpoint: InFlightCheckpoint, where: dict[Any, int], path: tuple[Any, ...]
) -> Any:
    """The state with each tensor replaced by its place in the buffer."""
    if isinstance(value, dict):
        steps = {key: (key,) if isinstance(key, int) else str(key) for key in value}
        return {
            key: _rebuilt(inner, checkpoint, where, (*path, steps[key]))
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_rebuilt(one, checkpoint, where, (*path, i)) for i, one in enumerate(value)]
    if not isinstance(value, Tensor) or path not in where:
        return copy.deepcopy(value)
    host = _at(checkpoint, where[path])
    if isinstance(value, DTensor):
        shape, stride = value.shape, value.stride()
        mesh, placements = value.device_mesh, value.placements
        return DTensor.from_local(
            host, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return host


def _at(checkpoint: InFlightCheckpoint, number: int) -> Tensor:
    place, entry = checkpoint.file.places[number], checkpoint.file.entries[number]
    content = checkpoint.slot.buffer.tensor[entry.data : entry.data + place.nbytes]
    return content.view(place.dtype).view(place.sizes)
