"""Events of one PyTorch profiler (Kineto) file, sorted into steps and phases."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Op, TraceError

_STEP = re.compile(r"ProfilerStep\s*#\s*(\d+)")
_MICROBATCH = re.compile(r"(?:microbatch|micro_batch|mb|#)\s*[=_:# ]?\s*(\d+)", re.IGNORECASE)
_COMMUNICATION = re.compile(r"nccl|rccl|gloo[:_]|c10d::|mpi:", re.IGNORECASE)
_P2P = re.compile(r"sendrecv|(?:^|[:_ ])(?:isend|irecv|send|recv)", re.IGNORECASE)
_GZIP = b"\x1f\x8b"
_DEVICE = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_PHASES = (
    (re.compile(r"^Optimizer\.step#|optimizer[._ ]?step", re.IGNORECASE), Op.OPTIMIZER),
    (re.compile(r"dataloader|data[_ ]?load|get_batch|garbage|gc\.collect", re.IGNORECASE), Op.DATA),
    (re.compile(r"backward", re.IGNORECASE), Op.BACKWARD),
    (re.compile(r"forward", re.IGNORECASE), Op.FORWARD),
)
_AUTOGRAD = "autograd::engine::evaluate_function"


class Range(NamedTuple):
    """A stretch of host time; `value` is the step, or the microbatch (-1: unknown)."""

    start_us: float
    stop_us: float
    op: Op | None
    value: int


class Transfer(NamedTuple):
    """One collective or transfer: name, what the profiler says of its peer, when, how long."""

    name: str
    p2p: bool
    peer: int
    host_us: float
    duration_us: float


@dataclass
class RankEvents:
    """Contents of one file; times in microseconds.

    work   start, stop, and host time of launch [3, E] of the device's (or else the host's) work
    steps, phases   marked stretches of host time
    """

    rank: int
    work: NDArray[np.float64]
    steps: list[Range] = field(default_factory=list)
    phases: list[Range] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


def read_events(path: Path, index: int) -> RankEvents:
    """The events of a file; `index` is the rank if the file does not contain it."""
    document = _load(path)
    events = document.get("traceEvents") if isinstance(document, Mapping) else document
    if not isinstance(events, list):
        raise TraceError(f"{path}: is not a profiler trace (no list of traceEvents)")
    complete = [e for e in events if isinstance(e, dict) and e.get("ph") == "X" and "ts" in e]
    if not complete:
        raise TraceError(f"{path}: holds no timed events")
    try:
        return _sort(_rank(path, document, index), complete)
    except (TypeError, ValueError) as error:
        raise TraceError(f"{path}: holds an event that cannot be read: {error}") from None


def _load(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return json.loads(gzip.decompress(raw) if raw.startswith(_GZIP) else raw)
    except (OSError, EOFError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: is not readable JSON: {error}") from None


def _rank(path: Path, document: Any, index: int) -> int:
    known = document.get("distributedInfo") if isinstance(document, Mapping) else None
    if isinstance(known, Mapping) and isinstance(known.get("rank"), int):
        return int(known["rank"])
    found = re.search(r"rank[_\-.]?(\d+)", path.name)
    return int(found.group(1)) if found else index


def _sort(rank: int, events: Iterable[Mapping[str, Any]]) -> RankEvents:
    found = RankEvents(rank, np.empty((3, 0)))
    device: list[tuple[float, float, int]] = []
    host: list[tuple[float, float, float]] = []
    autograd: list[Range] = []
    launched: dict[int, float] = {}
    communication: list[tuple[Mapping[str, Any], bool]] = []
    for event in events:
        name, category = str(event.get("name", "")), str(event.get("cat", ""))
        start = float(event["ts"])
        stop = start + float(event.get("dur", 0.0))
        correlation = _arguments(event).get("correlation", -1)
        if category in ("cuda_runtime", "cuda_driver", "hip_runtime"):
            launched[correlation] = start
        elif category in ("user_annotation", "python_function"):
            _annotate(found, name, start, stop)
        elif _COMMUNICATION.search(name) and category in (*_DEVICE, "cpu_op"):
            communication.append((event, category in _DEVICE))
        elif category in _DEVICE:
            device.append((start, stop, correlation))
        elif name.startswith(_AUTOGRAD):
            autograd.append(Range(start, stop, Op.BACKWARD, 0))
            host.append((start, stop, start))
        elif category in ("cpu_op", "operator"):
            _annotate_optimizer(found, name, start, stop)
            host.append((start, stop, start))
    work = [(start, stop, launched.get(key, start)) for start, stop, key in device] or host
    found.work = np.array(sorted(work), np.float64).reshape(-1, 3).T
    on_device = any(is_device for _, is_device in communication)
    found.transfers = [
        _transfer(event, launched) for event, own in communication if own == on_device
    ]
    if not any(phase.op is Op.BACKWARD for phase in found.phases):
        found.phases += autograd
    return found


def _annotate(found: RankEvents, name: str, start: float, stop: float) -> None:
    step = _STEP.search(name)
    if step:
        found.steps.append(Range(start, stop, None, int(step.group(1))))
        return
    for pattern, op in _PHASES:
        if pattern.search(name):
            number = _MICROBATCH.search(name) if op in (Op.FORWARD, Op.BACKWARD) else None
            value = int(number.group(1)) if number else -1
            found.phases.append(Range(start, stop, op, value))
            return


def _annotate_optimizer(found: RankEvents, name: str, start: float, stop: float) -> None:
    """Older profilers record these two as operators."""
    if name.startswith(("Optimizer.step#", "enumerate(DataLoader)")):
        _annotate(found, name, start, stop)


def _transfer(event: Mapping[str, Any], launched: Mapping[int, float]) -> Transfer:
    arguments = _arguments(event)
    what = str(arguments.get("Collective name", event["name"]))
    peer = -1
    for key in ("Dst Rank", "Src Rank", "dst", "src"):
        if isinstance(arguments.get(key), int) and arguments[key] >= 0:
            peer = int(arguments[key])
            break
    start = float(event["ts"])
    host = launched.get(arguments.get("correlation", -1), start)
    return Transfer(what, bool(_P2P.search(what)), peer, host, float(event.get("dur", 0.0)))


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = event.get("args")
    return arguments if isinstance(arguments, Mapping) else {}
