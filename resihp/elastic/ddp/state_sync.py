"""Brings the state of a loop from a replica that has it to those that do not, beside training.

The state is whatever its owners' `state_dict()` give: model, optimizer, schedules, a cursor. Its
shape travels pickled, its tensors apart, in chunks. Of a `DTensor` the local shard travels; the
taker stands at the same place of its own replica's mesh.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from resihp.contracts import PeerLostError

from ..process_groups.abortable import AbortableProcessGroup

_CHUNK_BYTES = 16 << 20


class Stateful(Protocol):
    """What torch's modules, optimizers and schedules are."""

    def state_dict(self) -> dict[str, Any]:
        """All that must not be lost."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over what `state_dict` gave."""
        ...


class StateBroadcast:
    """Sends the state in a thread while this replica computes; it must not change meanwhile."""

    def __init__(
        self, group: AbortableProcessGroup, rank: int, state: Mapping[str, Stateful]
    ) -> None:
        self._skeleton, self._tensors = pack(
            {name: one.state_dict() for name, one in state.items()}
        )
        self._group, self._rank = group, rank
        self._broken: str | None = None
        self._thread = threading.Thread(target=self._run, name="resihp-give", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until everything is sent. Raises `PeerLostError` if a taker is lost."""
        self._thread.join()
        if self._broken is not None:
            raise PeerLostError(self._broken)

    def abandon(self) -> None:
        """Wait until the thread has seen that the generation is broken."""
        self._thread.join()

    def _run(self) -> None:
        try:
            size = torch.tensor([len(self._skeleton)])
            self._group.broadcast(size, self._rank)
            self._group.broadcast(_bytes(self._skeleton), self._rank)
            for part in _chunks(self._tensors):
                flat = torch.cat([_flat(tensor) for tensor in part])
                self._group.broadcast(flat, self._rank)
        except PeerLostError as error:
            self._broken = str(error)  # without its traceback, which would keep the group


def take(
    group: AbortableProcessGroup,
    giver: int,
    state: Mapping[str, Stateful],
    parameters: Sequence[torch.Tensor],
) -> None:
    """Receive what `giver` gives; `state` is loaded when all of it is here.

    `parameters` are this replica's: they tell device and meshes.
    """
    size = torch.zeros(1, dtype=torch.int64)
    group.broadcast(size, giver)
    skeleton = torch.empty(int(size), dtype=torch.uint8)
    group.broadcast(skeleton, giver)
    whole = bytes(skeleton.numpy())
    tensors = empties(whole)
    for part in _chunks(tensors):
        flat = torch.empty(sum(map(_size, part)), dtype=torch.uint8)
        group.broadcast(flat, giver)
        for tensor, given in zip(part, flat.split([_size(t) for t in part]), strict=True):
            _flat(tensor).copy_(given)
    told = unpack(whole, tensors, meshes(parameters))
    for name, one in state.items():
        one.load_state_dict(told[name])
        if isinstance(one, torch.amp.GradScaler):
            # It makes its scale at its first use, which a step without microbatches does not have.
            one.scale(torch.zeros((), device=parameters[0].device))


def pack(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """The shape of `state`, and its tensors in the order in which they stand there."""
    written = io.BytesIO()
    packer = _Packer(written)
    packer.dump(state)
    return written.getvalue(), packer.tensors


def unpack(skeleton: bytes, tensors: Sequence[torch.Tensor], known: Sequence[DeviceMesh]) -> Any:
    """The state again, with `tensors` in it."""
    return _Unpacker(io.BytesIO(skeleton), tensors, known).load()


def empties(skeleton: bytes) -> list[torch.Tensor]:
    """Room for the tensors of a state."""
    unpacker = _Unpacker(io.BytesIO(skeleton), None, ())
    unpacker.load()
    return unpacker.empties


def meshes(tensors: Iterable[Any]) -> list[DeviceMesh]:
    """The meshes of distributed tensors in the order of their appearance, each once."""
    found: list[DeviceMesh] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor) and tensor.device_mesh not in found:
            found.append(tensor.device_mesh)
    return found


class _Packer(pickle.Pickler):
    """Puts tensors aside; in their place stands what they are like."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._meshes: list[DeviceMesh] = []

    def persistent_id(self, obj: Any) -> Any:
        """For a tensor its local shape and type, and how it is distributed, if it is."""
        if not isinstance(obj, torch.Tensor):
            return None
        spread = None
        local = obj.detach()
        if isinstance(local, DTensor):
            if local.device_mesh not in self._meshes:
                self._meshes.append(local.device_mesh)
            mesh = self._meshes.index(local.device_mesh)
            spread = (mesh, local.placements, local.shape, local.stride())
            local = local.to_local()
        self.tensors.append(local)
        return tuple(local.shape), local.dtype, spread


class _Unpacker(pickle.Unpickler):
    """Puts given tensors in their places, or only makes room for them."""

    def __init__(
        self,
        file: io.BytesIO,
        tensors: Sequence[torch.Tensor] | None,
        known: Sequence[DeviceMesh],
    ) -> None:
        super().__init__(file)
        self.empties: list[torch.Tensor] = []
        self._tensors = None if tensors is None else iter(tensors)
        self._known = known

    def persistent_load(self, pid: Any) -> Any:
        """The next tensor."""
        shape, dtype, spread = pid
        if self._tensors is None:
            self.empties.append(torch.empty(shape, dtype=dtype))
            return None
        local = next(self._tensors)
        if spread is None:
            return local
        mesh, placements, whole, stride = spread
        return DTensor.from_local(
            local.to(self._known[mesh].device_type),
            self._known[mesh],
            placements,
            run_check=False,
            shape=whole,
            stride=stride,
        )


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """In order; one alone may be larger than a chunk."""
    part: list[torch.Tensor] = []
    for tensor in tensors:
        if part and sum(map(_size, part)) + _size(tensor) > _CHUNK_BYTES:
            yield part
            part = []
        part.append(tensor)
    if part:
        yield part


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes; the same memory where it is contiguous on the CPU."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
