"""Lazy copy of a state for DCP's asynchronous saves."""

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

_READER = "dcp"
_RELEASE_TIMEOUT_S = 600.0


class DcpStager:
    """Copies states into one host buffer, which is in use from `stage` until `release`."""

    def __init__(self) -> None:
        one_of_several = IndependentRank(0, (0, 1), "dcp")  # DCP assigns the writers itself
        self._stager = Stager(one_of_several, buffers=1)
        self._threads = ThreadPoolExecutor(1, "resihp-checkpoint-stage")
        self._checkpoint: InFlightCheckpoint | None = None

    def know(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
        """See `Stager.know`."""
        self._stager.know(optimizer, modules)

    def stage(self, state: StateDict) -> Future[StateDict]:
        """Begin to copy, after the release of the copy before; returns the state on the host."""
        self._wait_for_release()
        collected = self._stager.fit(state)
        captured = self._stager.capture(0, Lineage(""), collected, state, {})
        checkpoint = self._stager.lend(captured, 0.0)
        assert checkpoint is not None, "the only buffer is free"
        checkpoint.taken[_READER] = 0
        self._checkpoint = checkpoint
        numbers = {
            collected.tensors[pick].path: number for number, pick in enumerate(self._stager.picks)
        }
        copied = _on_host(state, checkpoint, numbers, ())
        self._stager.start(checkpoint)
        return self._threads.submit(_once_copied, checkpoint, copied)

    def fence(self, tensors: Sequence[Tensor] | None) -> None:
        """Wait until these tensors may change."""
        if self._checkpoint is not None:
            self._stager.fence(self._checkpoint, tensors)

    def release(self) -> None:
        """Release the buffer."""
        if self._checkpoint is not None:
            self._checkpoint.done_with(_READER)
            self._stager.move_to_huge_pages()

    def close(self) -> None:
        """End the threads."""
        self._stager.close()
        self._threads.shutdown()

    def _wait_for_release(self) -> None:
        checkpoint = self._checkpoint
        if checkpoint is None:
            return
        with checkpoint.changed:
            if not checkpoint.changed.wait_for(lambda: checkpoint.is_idle, _RELEASE_TIMEOUT_S):
                raise CheckpointError("the save before has not ended")


def _once_copied(checkpoint: InFlightCheckpoint, copied: StateDict) -> StateDict:
    if checkpoint.count:
        checkpoint.take(checkpoint.count - 1)
    return copied


def _on_host(
    value: Any, checkpoint: InFlightCheckpoint, numbers: dict[Any, int], path: tuple[Any, ...]
) -> Any:
    """Rebuild a state with each tensor replaced by its view of the buffer."""
    if isinstance(value, dict):
        steps = {key: (key,) if isinstance(key, int) else str(key) for key in value}
        return {
            key: _on_host(inner, checkpoint, numbers, (*path, steps[key]))
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_on_host(one, checkpoint, numbers, (*path, i)) for i, one in enumerate(value)]
    if not isinstance(value, Tensor) or path not in numbers:
        return copy.deepcopy(value)
    host = _view(checkpoint, numbers[path])
    if isinstance(value, DTensor):
        shape, stride = value.shape, value.stride()
        mesh, placements = value.device_mesh, value.placements
        return DTensor.from_local(
            host, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return host


def _view(checkpoint: InFlightCheckpoint, number: int) -> Tensor:
    spec, entry = checkpoint.file.specs[number], checkpoint.file.entries[number]
    content = checkpoint.slot.buffer.tensor[entry.data : entry.data + spec.nbytes]
    return content.view(spec.dtype).view(spec.sizes)
