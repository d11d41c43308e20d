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

from ..lineage import Lineage
from ..ranks import Alone
from ..staging.filling import Filling
from ..staging.stage import Staging

StateDict: TypeAlias = dict[str, Any]

_UPLOAD = "upload"
_PATIENCE_S = 600.0


class Stager:
    """One buffer of the size of this rank's state, held from `stage` until `release`."""

    def __init__(self) -> None:
        one_of_several = Alone(0, (0, 1), "torch")  # whose parts it knows, and shares out, itself
        self._staging = Staging(one_of_several, buffers=1)
        self._threads = ThreadPoolExecutor(1, "resihp-checkpoint-stage")
        self._filling: Filling | None = None

    def know(self, optimizer: torch.optim.Optimizer, modules: Sequence[nn.Module]) -> None:
        """See `Staging.know`."""
        self._staging.know(optimizer, modules)

    def stage(self, state: StateDict) -> Future[StateDict]:
        """Begin to copy, once the copy before has been released."""
        self._await_release()
        found = self._staging.fit(state)
        assert found.has_buffers, "the only buffer is free"
        filling = self._staging.lend(0, Lineage(""), found, state, {}, 0.0)
        assert filling is not None
        filling.taken[_UPLOAD] = 0
        self._filling = filling
        where = {found.parts[pick].path: number for number, pick in enumerate(self._staging.picks)}
        copied = _rebuilt(state, filling, where, ())
        self._staging.start(filling)
        return self._threads.submit(_once_copied, filling, copied)

    def fence(self, tensors: Sequence[Tensor] | None) -> None:
        """Wait until these tensors may change."""
        if self._filling is not None:
            self._staging.fence(self._filling, tensors)

    def release(self) -> None:
        """The copy is needed no more."""
        if self._filling is not None:
            self._filling.done_with(_UPLOAD)
            self._staging.settle()

    def close(self) -> None:
        """End the threads."""
        self._staging.close()
        self._threads.shutdown()

    def _await_release(self) -> None:
        filling = self._filling
        if filling is None:
            return
        with filling.changed:
            if not filling.changed.wait_for(lambda: filling.is_idle, _PATIENCE_S):
                raise CheckpointError("the save before has not ended")


def _once_copied(filling: Filling, copied: StateDict) -> StateDict:
    if filling.count:
        filling.take(filling.count - 1)
    return copied


def _rebuilt(value: Any, filling: Filling, where: dict[Any, int], path: tuple[Any, ...]) -> Any:
    """The state with each tensor replaced by its place in the buffer."""
    if isinstance(value, dict):
        steps = {key: (key,) if isinstance(key, int) else str(key) for key in value}
        return {
            key: _rebuilt(inner, filling, where, (*path, steps[key]))
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_rebuilt(one, filling, where, (*path, i)) for i, one in enumerate(value)]
    if not isinstance(value, Tensor) or path not in where:
        return copy.deepcopy(value)
    host = _at(filling, where[path])
    if isinstance(value, DTensor):
        shape, stride = value.shape, value.stride()
        mesh, placements = value.device_mesh, value.placements
        return DTensor.from_local(
            host, mesh, placements, run_check=False, shape=shape, stride=stride
        )
    return host


def _at(filling: Filling, number: int) -> Tensor:
    place, entry = filling.file.places[number], filling.file.entries[number]
    content = filling.slot.buffer.tensor[entry.data : entry.data + place.nbytes]
    return content.view(place.dtype).view(place.sizes)
