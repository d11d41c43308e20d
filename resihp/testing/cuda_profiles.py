"""Profiler files of a made-up job on CUDA devices, as an ordinary loop with DDP leaves them.

The host launches far ahead of the device; gradients are reduced on a stream of their own, in
buckets that end on all ranks at once. Nothing in it names a forward or a backward pass.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

LAYERS, WIDTH = 4, 512
US_PER_TOKEN = 5.0
"""Time of one layer's forward pass; the backward pass takes twice as long."""
_MAIN, _ENGINE, _COMPUTE, _NCCL = 100, 101, 7, 20
_REDUCE_US, _LAUNCH_US = 400.0, 20.0
_CALL = "autograd::engine::evaluate_function: "


@dataclass(frozen=True, kw_only=True)
class CudaJob:
    """A job to write. Hosts' clocks differ by milliseconds.

    slow       rank that computes `factor` times as long; -1: none
    numbered   whether the profiler marks the steps
    skipped    number of first steps that a rank did not record, by rank
    operators  further operators of the host in each layer, of which large files consist
    stages     of the pipelines that the process groups claim
    """

    ranks: int = 4
    slow: int = -1
    factor: float = 1.5
    steps: int = 24
    microbatches: int = 2
    numbered: bool = True
    skipped: dict[int, int] = field(default_factory=dict)
    operators: int = 0
    stages: int = 1
    seed: int = 0

    def write(self, folder: Path, *, packed: bool = True) -> None:
        """Write `rankN.json.gz`, or `rankN.json`."""
        random = np.random.default_rng(self.seed)
        name = "rank{}.json.gz" if packed else "rank{}.json"
        job = [_Rank(folder / name.format(rank), rank, self) for rank in range(self.ranks)]
        for step in range(self.steps):
            self._step(step, job, random)
        for one in job:
            one.close(random.normal(0.0, 1e6))

    def _step(self, step: int, job: list[_Rank], random: np.random.Generator) -> None:
        begins = [one.host for one in job]
        buckets: list[list[tuple[float, float]]] = []
        for one in job:
            ready: list[tuple[float, float]] = []
            for index in range(self.microbatches):
                tokens = int(random.integers(128, 256))
                slow = (self.factor if one.rank == self.slow else 1.0) * random.normal(1.0, 0.01)
                one.forward(tokens, slow)
                one.backward(tokens, slow, ready if index == self.microbatches - 1 else None)
            buckets.append(ready)
        ends = [0.0] * self.ranks
        for bucket in zip(*buckets, strict=True):
            starts = [max(end, ready) for end, (_, ready) in zip(ends, bucket, strict=True)]
            ends = [max(starts) + _REDUCE_US] * self.ranks
            for one, (host, _), start in zip(job, bucket, starts, strict=True):
                one.reduce(host, start, ends[0])
        for one, begin, end in zip(job, begins, ends, strict=True):
            one.update(end)
            if self.numbered:
                one.event("user_annotation", f"ProfilerStep#{step + 5}", begin, one.host, _MAIN)
            one.flush(is_kept=step >= self.skipped.get(one.rank, 0))


class _Rank:
    """One rank while it is recorded; `host` and `device` are the clocks of its two sides."""

    def __init__(self, path: Path, rank: int, job: CudaJob) -> None:
        self.rank, self._job = rank, job
        self.host, self.device = 1000.0, 0.0
        self._sequence = self._key = 0
        self._events: list[str] = []
        opened = gzip.open(path, "wt", 3) if path.suffix == ".gz" else path.open("w")  # noqa: SIM115
        self._file: TextIO = opened
        ranks = list(range(job.ranks))
        groups: list[Any] = [{"pg_name": "0", "pg_desc": "default_pg", "ranks": ranks}]
        if job.stages > 1:
            replicas = job.ranks // job.stages
            groups.append({"pg_desc": "mesh_pp", "ranks": ranks[rank % replicas :: replicas]})
        known = {"rank": rank, "world_size": job.ranks, "pg_config": groups}
        self._file.write(f'{{"schemaVersion": 1, "distributedInfo": {json.dumps(known)},\n')
        self._file.write('"traceEvents": [{"ph": "M", "name": "process_name", "args": {}}')

    def flush(self, *, is_kept: bool) -> None:
        """Write the events so far, or forget them."""
        if is_kept:
            self._file.writelines(f",\n{event}" for event in self._events)
        self._events.clear()

    def close(self, clock_ns: float) -> None:
        """End the file; the host's clock is ahead by `clock_ns`."""
        self._file.write(f'\n], "baseTimeNanoseconds": {int(1.7e18 + clock_ns)}}}')
        self._file.close()

    def event(
        self, category: str, name: str, start: float, stop: float, thread: int, **arguments: Any
    ) -> None:
        """Record an event."""
        event = {"ph": "X", "cat": category, "name": name, "pid": self.rank, "tid": thread}
        lasts = {"ts": start, "dur": stop - start, "args": arguments}
        self._events.append(json.dumps(event | lasts))

    def _launch(self, name: str, lasts_us: float, thread: int) -> None:
        """Launch a kernel, which starts when its stream is free."""
        start = max(self.device, self.host + _LAUNCH_US)
        self.device = start + lasts_us
        self._kernel(name, start, self.device, thread, _COMPUTE)

    def _kernel(
        self, name: str, start: float, stop: float, thread: int, stream: int, **arguments: Any
    ) -> None:
        self._key += 1
        key = {"correlation": self._key}
        self.event("cuda_runtime", "cudaLaunchKernel", self.host, self.host + 5.0, thread, **key)
        self.event("kernel", name, start, stop, stream, stream=stream, **key, **arguments)
        self.host += _LAUNCH_US

    def forward(self, tokens: int, slow: float) -> None:
        """Run the forward pass of a microbatch."""
        dims = {
            "aten::linear": [[1, tokens, WIDTH], [WIDTH, WIDTH], [WIDTH]],
            "aten::addmm": [[WIDTH], [tokens, WIDTH], [WIDTH, WIDTH]],
        }
        for _ in range(LAYERS):
            start = self.host
            self._others(_MAIN)
            self._launch("gemm", tokens * US_PER_TOKEN * slow, _MAIN)
            for name, sizes in dims.items():
                numbers = {"Sequence number": self._sequence, "Fwd thread id": 0}
                self.event(
                    "cpu_op", name, start, self.host, _MAIN, **numbers, **{"Input Dims": sizes}
                )
            self._sequence += 1

    def backward(self, tokens: int, slow: float, ready: list[tuple[float, float]] | None) -> None:
        """Run the backward pass in the engine's thread; `ready` takes the moments at which a bucket
        of gradients can be reduced, by the host's clock and the device's."""
        for layer in range(LAYERS):
            start = self.host
            self._others(_ENGINE)
            self._launch("gemm", 2 * tokens * US_PER_TOKEN * slow, _ENGINE)
            numbers = {"Sequence number": self._sequence - 1 - layer, "Fwd thread id": 1}
            self.event("cpu_op", f"{_CALL}AddmmBackward0", start, self.host, _ENGINE, **numbers)
            start = self.host
            if ready is not None and layer % 2:
                ready.append((self.host, self.device))
            self.host += _LAUNCH_US
            name = f"{_CALL}torch::autograd::AccumulateGrad"
            self.event("cpu_op", name, start, self.host, _ENGINE)

    def _others(self, thread: int) -> None:
        for _ in range(self._job.operators):
            keys = {"External id": self._key, "Record function id": 0, "Ev Idx": len(self._events)}
            self.event("cpu_op", "aten::empty", self.host, self.host + 0.5, thread, **keys)
            self.host += 1.0

    def reduce(self, host: float, start: float, stop: float) -> None:
        """Reduce a bucket that the host launched at some moment."""
        after, self.host = self.host, host
        group = {
            "Collective name": "allreduce",
            "Process Group Ranks": str(list(range(self._job.ranks))),
        }
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        self._kernel(name, start, stop, _ENGINE, _NCCL, **group)
        self.host = after

    def update(self, reduced: float) -> None:
        """Run the optimizer once the gradients are there; the host then waits for the device."""
        self.host += 50.0
        start, self.device = self.host, max(self.device, reduced)
        self._launch("adam", 100.0, _MAIN)
        self.event("user_annotation", "Optimizer.step#AdamW.step", start, self.host, _MAIN)
        self.host = self.device + 50.0
