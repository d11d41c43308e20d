"""Contents of one rank's profiler file as columns. Times are in microseconds."""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import TraceError

from ._event_stream import EventStream
from ._intervals import Times

_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_LAUNCH = frozenset({"cuda_runtime", "cuda_driver", "hip_runtime"})
_HOST = frozenset({"cpu_op", "operator"})
_COMMUNICATION = re.compile(r"nccl|rccl|gloo:|c10d::|_?c10d_functional::|mpi:|record_param_comms")
_P2P = re.compile(r"sendrecv|(?:^|[:_ ])(?:isend|irecv|send|recv)", re.IGNORECASE)
_ENGINE = "autograd::engine::evaluate_function"
_NO_OPERATOR = ("Optimizer.step#", "enumerate(DataLoader)")
"""Annotations that older profilers record as operators."""
_MATRICES = {"aten::addmm": (1, 2), "aten::mm": (0, 1), "aten::_scaled_mm": (0, 1)}
_ATTENTION = "aten::scaled_dot_product_attention"


class OperatorKind(IntEnum):
    """Kind of an operator on the host.

    ENGINE is what the autograd engine evaluates, with all that runs in it.
    """

    COMPUTE = 0
    ENGINE = 1
    COMMUNICATION = 2


class Mark(NamedTuple):
    """Stretch of time of one host thread that has a name."""

    start_us: float
    stop_us: float
    thread: int
    name: str


class Communication(NamedTuple):
    """One collective or transfer.

    group    ranks that take part, as the profiler writes them; "" where it does not
    peer     the other end of a transfer; -1 where unknown
    host_us  moment at which the host issued it
    """

    name: str
    group: str
    is_p2p: bool
    peer: int
    host_us: float
    start_us: float
    stop_us: float


class ProcessGroup(NamedTuple):
    """A process group with its description, such as `mesh_tp`."""

    description: str
    ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Operators:
    """Operators on the host as columns.

    sequence  autograd's number of the forward operator, or of the one that is evaluated; -1: none
    backward  1 where the operator runs in a backward pass, else 0
    """

    start: Times
    stop: Times
    thread: NDArray[np.int64]
    kind: NDArray[np.int8]
    sequence: NDArray[np.int64]
    backward: NDArray[np.int8]

    def select(self, rows: Any) -> Operators:
        """The operators that a mask or an index picks."""
        return Operators(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))


@dataclass(frozen=True, eq=False)
class Shapes:
    """Shapes of inputs that tell how much work there is, as columns.

    rows, weights       rows of a matrix product, and elements of the matrix of weights
    sequences, length   of an input with a dimension for sequences; 0: it has none
    attention           whether attention said so
    """

    start: Times
    rows: Times
    weights: Times
    sequences: Times
    length: Times
    attention: Times


@dataclass(frozen=True, eq=False)
class RankProfile:
    """Contents of one file.

    epoch_us  what to add to a time to have that of the host's clock; NaN where unknown
    kernels   start, stop, and moment of launch [3, K] of the device's work, without communication,
              in the order of launch
    """

    rank: int
    epoch_us: float
    groups: tuple[ProcessGroup, ...]
    operators: Operators
    shapes: Shapes
    kernels: Times
    communications: tuple[Communication, ...]
    marks: tuple[Mark, ...]

    @property
    def on_device(self) -> bool:
        """True if the work is that of a device, False if it is the host's."""
        return self.kernels.size > 0


_NUMBER = re.compile(r"\d{1,6}")  # of a rank, and not a moment


def ranks_by_name(files: Sequence[Path]) -> list[int | None]:
    """The rank in the name of each file: the number after the word, else the only one in which the
    names differ; 0 for a single file, None where the names do not tell."""
    parts = [re.split(r"(\d+)", file.name) for file in files]
    differing = [at for at, part in enumerate(zip_longest(*parts)) if len(set(part)) > 1]
    numbers: list[int | None] = [None] * len(files)
    if len(files) == 1:
        numbers = [0]
    elif len(differing) == 1 and all(_NUMBER.fullmatch(each[differing[0]]) for each in parts):
        numbers = [int(each[differing[0]]) for each in parts]
    words = [re.search(r"rank[_\-.]?(\d+)", file.name) for file in files]
    return [int(w.group(1)) if w else number for w, number in zip(words, numbers, strict=True)]


def read_profile(path: Path, rank: int | None) -> RankProfile:
    """The contents of a file; `rank` is that of its name. Raises `TraceError`."""
    stream, events = EventStream(path), _Events()
    for event in stream:
        if event.get("ph") == "X":
            events.add(event)
    if not events.count:
        raise TraceError(f"{path}: holds no timed events")
    rank = _rank(path, stream.header, rank)
    try:
        return events.profile(rank, stream.header)
    except (ValueError, OverflowError) as error:
        raise TraceError(f"{path}: holds a header that cannot be read: {error}") from None


def _rank(path: Path, header: Mapping[str, Any], named: int | None) -> int:
    known = header.get("distributedInfo")
    if isinstance(known, Mapping) and isinstance(known.get("rank"), int):
        return int(known["rank"])
    if named is None:
        raise TraceError(f"{path}: does not tell its rank; name it rankN.json")
    return named


@dataclass
class _Events:
    """Events of a file while it is read. What is not of its type counts as missing: profilers write
    some odd events, which are not to cost the file."""

    count: int = 0
    _ops: tuple[array[Any], ...] = field(default_factory=lambda: _columns("ddqbqb"))
    _shapes: tuple[array[Any], ...] = field(default_factory=lambda: _columns("dddddd"))
    _kernels: tuple[array[Any], ...] = field(default_factory=lambda: _columns("ddq"))
    _launches: tuple[array[Any], ...] = field(default_factory=lambda: _columns("qd"))
    _marks: list[Mark] = field(default_factory=list)
    _on_device: list[tuple[Communication, int]] = field(default_factory=list)
    _on_host: list[Communication] = field(default_factory=list)
    _threads: dict[str, int] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Takes one event; passes over one without a time."""
        start, duration = _number(event.get("ts")), _number(event.get("dur"))
        if start is None:
            return
        self.count += 1
        category, name = str(event.get("cat")), str(event.get("name", ""))
        stop = start + max(duration or 0.0, 0.0)
        arguments = event.get("args")
        if not isinstance(arguments, Mapping):
            arguments = {}
        if category in _LAUNCH:
            if (key := _count(arguments.get("correlation"))) >= 0:
                _append(self._launches, key, start)
        elif category in _DEVICE:
            key = _count(arguments.get("correlation"))
            if _COMMUNICATION.match(name):
                self._on_device.append((_communication(name, arguments, start, stop), key))
            else:
                _append(self._kernels, start, stop, key)
        elif category == "user_annotation" or (category in _HOST and name.startswith(_NO_OPERATOR)):
            if name.startswith("gloo:"):
                self._on_host.append(_communication(name, arguments, start, stop))
            elif not _COMMUNICATION.match(name):
                self._marks.append(Mark(start, stop, self._thread(event), name))
        elif category in _HOST:
            self._add_operator(event, name, start, stop, arguments)

    def _add_operator(
        self,
        event: Mapping[str, Any],
        name: str,
        start: float,
        stop: float,
        arguments: Mapping[str, Any],
    ) -> None:
        thread, kind = self._thread(event), OperatorKind.COMPUTE
        if name.startswith(_ENGINE):
            kind = OperatorKind.ENGINE
        elif _COMMUNICATION.match(name):
            kind = OperatorKind.COMMUNICATION
        sequence = _count(arguments.get("Sequence number"))
        backward = bool(arguments.get("Fwd thread id", 0))
        _append(self._ops, start, stop, thread, kind, sequence, backward)
        if "Input Dims" in arguments and not backward:
            # A shape that lacks dimensions tells nothing.
            with suppress(LookupError, TypeError, ValueError, OverflowError):
                shape = [float(size) for size in _shape(name, arguments["Input Dims"])]
                if shape and all(0.0 <= size < math.inf for size in shape):
                    _append(self._shapes, start, *shape)

    def _thread(self, event: Mapping[str, Any]) -> int:
        return self._threads.setdefault(str(event.get("tid")), len(self._threads))

    def profile(self, rank: int, header: Mapping[str, Any]) -> RankProfile:
        """All that was taken, in the order of time."""
        keys, launched = (np.array(column) for column in self._launches)
        order = np.argsort(keys, kind="stable")
        keys, launched = keys[order], launched[order]
        start, stop, key = (np.array(column) for column in self._kernels)
        kernels = np.array([start, stop, _launched(keys, launched, key, start)], np.float64)
        ops = Operators(*(np.array(column) for column in self._ops))
        found = self._on_host
        if self._on_device:
            starts = np.array([one.start_us for one, _ in self._on_device])
            key = np.array([key for _, key in self._on_device], np.int64)
            issued = _launched(keys, launched, key, starts).tolist()
            pairs = zip(self._on_device, issued, strict=True)
            found = [one._replace(host_us=host) for (one, _), host in pairs]
        return RankProfile(
            rank=rank,
            epoch_us=_epoch_us(header),
            groups=_groups(header),
            operators=ops.select(np.lexsort((-ops.stop, ops.start))),
            shapes=Shapes(*(np.array(column, np.float64) for column in self._shapes)),
            kernels=kernels[:, np.argsort(kernels[2], kind="stable")],
            communications=tuple(sorted(found, key=lambda one: one.host_us)),
            marks=tuple(sorted(self._marks)),
        )


def _number(value: Any) -> float | None:
    """A finite number, perhaps as text; None for anything else."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _count(value: Any) -> int:
    """A whole number from 0 on; -1 for anything else."""
    return value if isinstance(value, int) and 0 <= value < 1 << 62 else -1


def _shape(name: str, sizes: Any) -> tuple[Any, ...]:
    """The columns of `Shapes` after the start, from the sizes of an operator's inputs; () where
    they tell nothing. Raises what indexing raises for sizes that are none."""
    if name in _MATRICES:
        left, right = (sizes[at] for at in _MATRICES[name])
        return (left[0], right[0] * right[1], 0, 0, 0) if len(left) == len(right) == 2 else ()
    if name == "aten::convolution":
        rows = sizes[0][0] * math.prod(sizes[0][2:])
        return rows, math.prod(sizes[1]), sizes[0][0], 1, 0
    if name == "aten::linear" and len(sizes[0]) > 2:
        *leading, length, _ = sizes[0]
        return 0, 0, math.prod(leading), length, 0
    if name == _ATTENTION and len(sizes[0]) > 2:
        return 0, 0, sizes[0][0], sizes[0][-2], 1
    return ()


def _columns(codes: str) -> tuple[array[Any], ...]:
    return tuple(array(code) for code in codes)


def _append(columns: Sequence[array[Any]], *values: Any) -> None:
    for column, value in zip(columns, values, strict=True):
        column.append(value)


def _launched(
    keys: NDArray[np.int64], moments: Times, wanted: NDArray[np.int64], otherwise: Times
) -> Times:
    """Moment of launch for each correlation."""
    if not keys.size:
        return otherwise
    at = np.minimum(np.searchsorted(keys, wanted), keys.size - 1)
    return np.where(keys[at] == wanted, moments[at], otherwise)


def _communication(
    name: str, arguments: Mapping[str, Any], start: float, stop: float
) -> Communication:
    what = str(arguments.get("Collective name", name))
    peer = -1
    for key in ("Dst Rank", "Src Rank", "dst", "src"):
        if isinstance(arguments.get(key), int) and arguments[key] >= 0:
            peer = int(arguments[key])
            break
    group = str(arguments.get("Process Group Ranks", ""))
    return Communication(what, group, bool(_P2P.search(what)), peer, start, start, stop)


def _epoch_us(header: Mapping[str, Any]) -> float:
    base = header.get("baseTimeNanoseconds")
    return float(base) * 1e-3 if isinstance(base, int | float | str) and base else math.nan


def _groups(header: Mapping[str, Any]) -> tuple[ProcessGroup, ...]:
    known = header.get("distributedInfo")
    groups = known.get("pg_config") if isinstance(known, Mapping) else None
    if isinstance(groups, str):
        groups = json.loads(groups)
    found = []
    for group in groups if isinstance(groups, list) else ():
        ranks = group.get("ranks") if isinstance(group, Mapping) else None
        if isinstance(ranks, list) and all(isinstance(rank, int) for rank in ranks):
            found.append(ProcessGroup(str(group.get("pg_desc", "")), tuple(ranks)))
    return tuple(found)
