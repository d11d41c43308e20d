"""PyTorch profiler (Kineto) JSON as microbatch records.

Steps are the profiler's own marks (`ProfilerStep#N`). Forward and backward passes are the ranges
that the job named so with `record_function`, each of them a microbatch; without any, a step is one
microbatch, and backward is what the autograd engine ran. A pass takes as long as the device was
busy with what was launched in it; on a machine without a device, as the host was.

A collective ends everywhere at once, so that its duration is that of the rank with the shortest
wait: that is its `compute_ms`, the rest is `wait_ms`. Data loading counts as host time.
"""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from resihp.contracts import Job, Layout, Op, Replica, Stage, TraceError

from ._trace import Trace, filled, read_meta, tensor_parallel

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


class _Row(NamedTuple):
    rank: int
    step: int
    microbatch: int
    op: Op
    compute_ms: float
    wait_ms: float = float("nan")
    peer: int = -1


@dataclass
class RankEvents:
    """Contents of one file; times in microseconds.

    work   start, stop, and host time of launch [3, E] of the device's (or else the host's) work
    steps, phases   marked stretches of host time
    transfers       of each step, in the order of their launch
    """

    rank: int
    work: NDArray[np.float64]
    steps: list[Range] = field(default_factory=list)
    phases: list[Range] = field(default_factory=list)
    transfers: dict[int, list[Transfer]] = field(default_factory=lambda: defaultdict(list))

    def rows(self) -> Iterator[_Row]:
        """Records of everything that the rank does alone."""
        for step in self.steps:
            yield from self._rows(step)

    def _rows(self, step: Range) -> Iterator[_Row]:
        phases = sorted(p for p in self.phases if step.start_us <= p.start_us < step.stop_us)
        host = self.work[2]
        inside = (host >= step.start_us) & (host < step.stop_us)
        work = self.work[:, inside]
        owner = _owners(phases, work[2])
        single = not any(phase.op is Op.FORWARD for phase in phases)
        if single:
            backward = [i for i, phase in enumerate(phases) if phase.op is Op.BACKWARD]
            yield from self._pass(step, Op.FORWARD, 0, work[:, owner < 0])
            yield from self._pass(step, Op.BACKWARD, 0, work[:, np.isin(owner, backward)])
        counts: dict[Op | None, int] = defaultdict(int)
        for index, phase in enumerate(phases):
            if phase.op is Op.DATA:
                lasted_ms = (phase.stop_us - phase.start_us) * 1e-3
                yield _Row(self.rank, step.value, -1, Op.DATA, lasted_ms)
            elif phase.op is Op.OPTIMIZER:
                yield from self._pass(step, Op.OPTIMIZER, -1, work[:, owner == index])
            elif phase.op is not None and not single:
                mb = phase.value if phase.value >= 0 else counts[phase.op]
                counts[phase.op] += 1
                yield from self._pass(step, phase.op, mb, work[:, owner == index])

    def _pass(
        self, step: Range, op: Op, microbatch: int, work: NDArray[np.float64]
    ) -> Iterator[_Row]:
        busy_us = _union(work[0], work[1])
        if busy_us > 0:
            yield _Row(self.rank, step.value, microbatch, op, busy_us * 1e-3)


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
            # Older profilers record these two as operators.
            if name.startswith(("Optimizer.step#", "enumerate(DataLoader)")):
                _annotate(found, name, start, stop)
            host.append((start, stop, start))
    work = [(start, stop, launched.get(key, start)) for start, stop, key in device] or host
    found.work = np.array(sorted(work), np.float64).reshape(-1, 3).T
    on_device = any(is_device for _, is_device in communication)
    transfers = [_transfer(event, launched) for event, own in communication if own == on_device]
    if not any(phase.op is Op.BACKWARD for phase in found.phases):
        found.phases += autograd
    found.steps = sorted(found.steps or _steps_by_optimizer(found.phases))
    for transfer in sorted(transfers, key=lambda t: t.host_us):
        for step in found.steps:
            if step.start_us <= transfer.host_us < step.stop_us:
                found.transfers[step.value].append(transfer)
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


def kineto_trace(path: Path, files: Sequence[Path]) -> Trace:
    """The trace in profiler files, one for each rank. Raises `TraceError`."""
    ranks = [read_events(file, index) for index, file in enumerate(files)]
    numbers = [rank.rank for rank in ranks]
    if len(set(numbers)) < len(numbers):
        raise TraceError(f"{path}: two files are of the same rank ({sorted(numbers)})")
    rows = [row for rank in ranks for row in rank.rows()]
    if not any(row.op in (Op.FORWARD, Op.BACKWARD) for row in rows):
        raise TraceError(f"{path}: shows no computation within a step")
    rows += _shared(ranks)
    layout = _layout(ranks)
    microbatches = 1 + max(row.microbatch for row in rows)
    job = Job(name=path.name[:128], layout=layout, microbatches=microbatches * layout.dp)
    meta = read_meta(files[0]) if len(files) == 1 else {}
    return Trace(
        path=path,
        format="kineto-json",
        job=job,
        tp=tensor_parallel(meta, layout.tp),
        columns=filled(
            {name: np.array([getattr(row, name) for row in rows]) for name in _Row._fields}
        ),
    )


def _steps_by_optimizer(phases: Sequence[Range]) -> list[Range]:
    """Steps that end with each optimizer step, where the profiler did not mark them."""
    ends = sorted(phase.stop_us for phase in phases if phase.op is Op.OPTIMIZER)
    edges = [-np.inf, *ends[:-1], np.inf]
    return [Range(*edge, None, step) for step, edge in enumerate(pairwise(edges))]


def _owners(phases: Sequence[Range], host_us: NDArray[np.float64]) -> NDArray[np.intp]:
    """Index of the innermost phase in which each moment lies; -1 outside of all."""
    order = np.argsort(host_us, kind="stable")
    owner = np.full(host_us.size, -1, np.intp)
    for index, phase in enumerate(phases):  # by start: an inner phase comes after the outer one
        low, high = np.searchsorted(host_us[order], (phase.start_us, phase.stop_us))
        owner[order[low:high]] = index
    return owner


def _union(start: NDArray[np.float64], stop: NDArray[np.float64]) -> float:
    """Length of the union of intervals."""
    if not start.size:
        return 0.0
    order = np.argsort(start, kind="stable")
    start, stop = start[order], stop[order]
    reach = np.maximum.accumulate(stop)
    before = np.concatenate([[start[0]], reach[:-1]])
    return float(np.maximum(reach - np.maximum(start, before), 0.0).sum())


def _shared(ranks: Sequence[RankEvents]) -> Iterator[_Row]:
    """Records of collectives and transfers, without the waiting if it follows from the peers."""
    durations: dict[tuple[Any, ...], list[float]] = defaultdict(list)
    found: list[tuple[RankEvents, int, Transfer, tuple[Any, ...]]] = []
    for rank in ranks:
        for step, transfers in rank.transfers.items():
            counts: dict[tuple[Any, ...], int] = defaultdict(int)
            for transfer in transfers:
                ends = (min(rank.rank, transfer.peer), max(rank.rank, transfer.peer))
                what = ends if transfer.p2p else (transfer.name,)
                key = (step, transfer.p2p, *what, counts[what])
                counts[what] += 1
                durations[key].append(transfer.duration_us)
                found.append((rank, step, transfer, key))
    for rank, step, transfer, key in found:
        alone = len(durations[key]) == 1 or (transfer.p2p and transfer.peer < 0)
        own = transfer.duration_us if alone else min(durations[key])
        wait = float("nan") if alone else (transfer.duration_us - own) * 1e-3
        op = Op.P2P if transfer.p2p else Op.COLLECTIVE
        yield _Row(rank.rank, step, -1, op, own * 1e-3, wait, transfer.peer)


def _layout(ranks: Sequence[RankEvents]) -> Layout:
    """Ranks that send to each other form a pipeline, in the order of their numbers."""
    numbers = sorted(rank.rank for rank in ranks)
    replica = {number: number for number in numbers}
    for rank in ranks:
        for transfers in rank.transfers.values():
            for transfer in transfers:
                if transfer.p2p and transfer.peer in replica:
                    old, new = replica[rank.rank], replica[transfer.peer]
                    replica = {
                        n: min(old, new) if r in (old, new) else r for n, r in replica.items()
                    }
    chains = [[n for n in numbers if replica[n] == root] for root in sorted(set(replica.values()))]
    if len({len(chain) for chain in chains}) > 1:
        chains = [[number] for number in numbers]
    return Layout(
        tuple(
            Replica(tuple(Stage((rank,), (s, s + 1)) for s, rank in enumerate(chain)))
            for chain in chains
        )
    )
