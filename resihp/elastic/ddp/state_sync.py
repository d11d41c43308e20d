"""Transfer of a loop's state from one replica to replicas without it, in the background.

The state is what `state_dict()` of model, optimizer, schedules and cursor returns. Its structure is
pickled without tensors; tensors follow in chunks. Of a `DTensor` the local shard is sent: the
receiver has the same coordinates in the mesh of its own replica.
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

from resihp.contracts import ContractError, PeerLostError

from ..process_groups.transport import Transport, complete

_CHUNK_BYTES = 16 << 20


class Stateful(Protocol):
    """Object with a state, such as a module, an optimizer or a schedule of torch."""

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Replace the state by one that `state_dict` returned."""
        ...


class StateBroadcast:
    """Sends the state in a thread during computation; the state must not change until `finish`."""

    def __init__(self, transport: Transport, state: Mapping[str, Stateful]) -> None:
        self._whole, self._tensors = pack({name: one.state_dict() for name, one in state.items()})
        self._transport = transport
        self._error: Exception | None = None
        self._thread = threading.Thread(
            target=self._run, name="resihp-state-broadcast", daemon=True
        )
        self._thread.start()

    def finish(self) -> None:
        """Wait until all is sent. Raises `PeerLostError` if a receiver is lost.

        Raises any other error of the thread, too.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._send(torch.tensor([len(self._whole)], device="cpu"))
            self._send(torch.frombuffer(bytearray(self._whole), dtype=torch.uint8))
            for part in _chunks(self._tensors):
                self._send(torch.cat([_flat(tensor) for tensor in part]))
        except PeerLostError as error:
            self._error = PeerLostError(str(error))  # its traceback would keep the group alive
        except Exception as error:  # noqa: BLE001 raised by `finish`
            self._error = error.with_traceback(None)

    def _send(self, flat: torch.Tensor) -> None:
        complete(self._transport.send([flat]))


def receive_state(
    transport: Transport, state: Mapping[str, Stateful], parameters: Sequence[torch.Tensor]
) -> None:
    """Receive the state that the source of `transport` sends, and load it when it is complete.

    parameters  of this replica, which give device and meshes
    """
    size = torch.zeros(1, dtype=torch.int64, device="cpu")
    complete(transport.recv([size]))
    packed = torch.empty(int(size), dtype=torch.uint8, device="cpu")
    complete(transport.recv([packed]))
    whole = bytes(packed.numpy())
    tensors = empties(whole)
    for part in _chunks(tensors):
        flat = torch.empty(sum(map(_size, part)), dtype=torch.uint8, device="cpu")
        complete(transport.recv([flat]))
        for tensor, given in zip(part, flat.split([_size(t) for t in part]), strict=True):
            _flat(tensor).copy_(given)
    received = unpack(whole, tensors, meshes(parameters))
    for name, one in state.items():
        one.load_state_dict(received[name])
        if isinstance(one, torch.amp.GradScaler):
            # It creates its scale on first use, which a step without microbatches does not have.
            one.scale(torch.zeros((), device=parameters[0].device))


def pack(state: Any) -> tuple[bytes, list[torch.Tensor]]:
    """Pickle `state` without its tensors, but with their forms; return the tensors in order.

    Raises `ContractError` for a sparse tensor.
    """
    for name, one in _named(state, "state"):
        if one.layout != torch.strided:
            raise ContractError(
                name,
                f"a tensor of layout {one.layout} cannot be sent to other replicas: keep it as "
                "plain tensors of indices and values, or out of the state (persistent=False)",
            )
    written = io.BytesIO()
    packer = _Packer(written)
    packer.dump(state)
    forms = [(tuple(one.shape), _strides(one), one.dtype) for one in packer.tensors]
    return pickle.dumps((forms, written.getvalue())), packer.tensors


def unpack(packed: bytes, tensors: Sequence[torch.Tensor], known: Sequence[DeviceMesh]) -> Any:
    """Rebuild the state with `tensors` in it; `known` are the meshes of this replica."""
    return _Unpacker(io.BytesIO(pickle.loads(packed)[1]), tensors, known).load()


def empties(packed: bytes) -> list[torch.Tensor]:
    """Allocate the tensors of a packed state, with the strides that they had.

    An optimizer keeps its moments as they come, and a fused one goes through them in the order of
    memory.
    """
    forms = pickle.loads(packed)[0]
    return [
        torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
        for shape, strides, dtype in forms
    ]


def meshes(tensors: Iterable[Any]) -> list[DeviceMesh]:
    """Return the distinct meshes of distributed tensors, in order of appearance."""
    found: list[DeviceMesh] = []
    for tensor in tensors:
        if isinstance(tensor, DTensor) and tensor.device_mesh not in found:
            found.append(tensor.device_mesh)
    return found


class _Packer(pickle.Pickler):
    """Pickler that replaces tensors by their distribution."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.tensors: list[torch.Tensor] = []
        self._meshes: list[DeviceMesh] = []

    def persistent_id(self, obj: Any) -> Any:
        """Return the distribution of a tensor, () for a plain one; None for other objects."""
        if not isinstance(obj, torch.Tensor):
            return None
        local = obj.detach()
        if not isinstance(local, DTensor):
            self.tensors.append(_resolved(local))
            return ()
        if local.device_mesh not in self._meshes:
            self._meshes.append(local.device_mesh)
        self.tensors.append(_resolved(local.to_local()))
        mesh = self._meshes.index(local.device_mesh)
        return mesh, local.placements, local.shape, local.stride()


class _Unpacker(pickle.Unpickler):
    """Unpickler that inserts given tensors."""

    def __init__(
        self, file: io.BytesIO, tensors: Sequence[torch.Tensor], known: Sequence[DeviceMesh]
    ) -> None:
        super().__init__(file)
        self._tensors, self._known = iter(tensors), known

    def persistent_load(self, pid: Any) -> Any:
        """Return the next tensor."""
        local = next(self._tensors)
        if not pid:
            return local
        mesh, placements, whole, stride = pid
        return DTensor.from_local(
            local.to(self._known[mesh].device_type),
            self._known[mesh],
            placements,
            run_check=False,
            shape=whole,
            stride=stride,
        )


def _named(state: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in mappings and sequences, with their names."""
    if isinstance(state, torch.Tensor):
        yield name, state
    elif isinstance(state, Mapping):
        for key, one in state.items():
            yield from _named(one, f"{name}.{key}")
    elif isinstance(state, list | tuple):
        for index, one in enumerate(state):
            yield from _named(one, f"{name}.{index}")


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Return it with the values in its memory, not those of which it is the conjugate."""
    return tensor.resolve_conj().resolve_neg()


def _chunks(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Group tensors into chunks, in order; a single tensor may exceed the size."""
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


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return its strides without gaps and overlaps: its own where it has none."""
    return torch.empty_like(tensor, device="meta").stride()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return its bytes in the order of memory, as a view where it is dense on the CPU."""
    host, strides = tensor.cpu(), _strides(tensor)
    if host.stride() != strides:
        dense = torch.empty_strided(host.shape, strides, dtype=host.dtype, device="cpu")
        host = dense.copy_(host)
    return host.as_strided((host.numel(),), (1,)).view(torch.uint8)
