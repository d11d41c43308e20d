"""Checkpoints of several ranks: `python -m benchmarks.checkpoint --ranks 4`.

Two jobs. FSDP2: a stack of layers, sharded over all ranks. Ranges: layers of two pipeline stages,
each split by columns over tensor-parallel ranks, given as lists of shards; its ranks meet in a
barrier at each step, in place of the communication of a model. Modes run one after the other in the
same processes, in rounds of steps without and with a checkpoint at each step; peers in processes of
their own, as they may fail or hang. TorchSnapshot and DeepSpeed get a temporary virtual environment
that borrows this one's torch.
"""

from __future__ import annotations

import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks._checkpoint_ranks_modes import (
    PEERS,
    NoCheckpoint,
    RanksMode,
    fresh_folder,
    gathered,
    ranks_modes,
)
from benchmarks._report import install, peer_python
from resihp.checkpoint import IndependentRank, ProcessGroupRanks, ShardedTensorPiece

LAYERS, STAGES, BATCH, WARM_UP = 8, 2, 32, 2
PEER_VERSIONS = {"torchsnapshot": "0.1.0", "deepspeed": "0.19.8"}
_PEER_TIMEOUT_S = 240
COLUMNS = (
    "mode", "blocks ms", "slow-down", "of the steps", "durable s", "extra memory", "waits for room"
)  # fmt: skip


class RanksJob:
    """One rank's part of a job: `gradients`, `update`, and what there is to save."""

    model: nn.Sequential | nn.ModuleDict
    optimizer: torch.optim.Optimizer

    def gradients(self) -> None:
        """Run forward and backward."""

    def state(self) -> Any:
        """Return what `Checkpointer.save` takes."""

    def local(self) -> dict[str, Tensor]:
        """Return this rank's own tensors, by names that no other rank uses."""
        rank = dist.get_rank()
        return {f"rank{rank}.{name}": _local(tensor) for name, tensor in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter
            for kind, moment in self.optimizer.state.get(parameter, {}).items():
                if isinstance(moment, Tensor) and moment.dim():
                    yield f"{name}.{kind}", moment


class Fsdp2Job(RanksJob):
    """FSDP2 over all ranks."""

    def __init__(self, width: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        layers = [nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.model = self._stack = nn.Sequential(*layers)
        self._width = width
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*layers, self.model):
            fully_shard(module, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def gradients(self) -> None:
        self._stack(torch.ones(BATCH, self._width)).square().mean().backward()

    def state(self) -> Any:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class RangesJob(RanksJob):
    """Two pipeline stages, each layer split by columns over the ranks of its stage."""

    def __init__(self, width: int) -> None:
        rank, split = dist.get_rank(), dist.get_world_size() // STAGES
        self._width, self._columns = width, width // split
        self._start = (rank % split) * self._columns
        first = rank // split * (LAYERS // STAGES)
        self._layers = {
            f"layers_{number}": nn.Linear(self._columns, width, bias=False)
            for number in range(first, first + LAYERS // STAGES)
        }
        self.model = nn.ModuleDict(self._layers)
        self.optimizer = torch.optim.AdamW(self.model.parameters())

    def gradients(self) -> None:
        batch = torch.ones(BATCH, self._columns)
        losses = [layer(batch).square().mean() for layer in self._layers.values()]
        torch.stack(losses).sum().backward()
        dist.barrier()

    def state(self) -> Any:
        shape, offsets = (self._width, self._width), (0, self._start)
        return [
            ShardedTensorPiece(name, shape, offsets, tensor.detach())
            for name, tensor in self._tensors()
        ]


JOBS: Mapping[str, type[Fsdp2Job] | type[RangesJob]] = {"FSDP2": Fsdp2Job, "ranges": RangesJob}


def run_rank(kind: str, mode: str, folder: Path, gib: float, steps: int, rounds: int) -> None:
    """Measure one peer, or all modes without a peer (""), on this rank; rank 0 prints JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = dist.get_world_size()
    job = JOBS[kind](int((gib * 2**30 / 12 / LAYERS) ** 0.5) // 64 * 64)
    _phase(job, NoCheckpoint(folder), WARM_UP)
    nbytes = sum(tensor.nbytes for tensor in job.local().values())
    run = gathered(str(time.time_ns()))[0]

    def ranks() -> Any:
        if kind == "FSDP2":
            return ProcessGroupRanks()
        return IndependentRank(dist.get_rank(), range(world), run=run)

    found: dict[str, Any] = {}
    modes = ranks_modes(ranks, nbytes)
    chosen = [mode] if mode else [name for name in modes if name not in PEERS]
    for name in chosen:
        make = modes[name]
        fresh_folder(folder / "run")
        try:
            found[name] = _measure(job, make(folder / "run"), steps, rounds, folder)
        except ImportError as problem:
            found[name] = {"problem": f"not installed: {problem}"}
        except Exception as problem:  # a peer may fail in any way
            found[name] = {"problem": f"does not run here: {type(problem).__name__}: {problem}"}
            if name not in PEERS:
                raise
        gc.collect()
    total = sum(gathered(nbytes))
    if dist.get_rank() == 0:
        sys.stdout.write("RESULT " + json.dumps({"state_bytes": total, "modes": found}) + "\n")
        sys.stdout.flush()
    dist.barrier()
    os._exit(0)  # threads of peers do not end otherwise


def _measure(
    job: RanksJob, mode: RanksMode, steps: int, rounds: int, folder: Path
) -> dict[str, Any]:
    plain = NoCheckpoint(folder)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    _phase(job, mode, WARM_UP)
    slowdowns: list[float] = []
    blocked: list[float] = []
    base = _phase(job, plain, steps)["step_s"]
    for _ in range(rounds):
        seen = _phase(job, mode, steps)
        after = _phase(job, plain, steps)["step_s"]
        slowdowns.append(statistics.mean(seen["step_s"]) / statistics.mean([*base, *after]))
        blocked += seen["blocked_s"]
        base = after
    saver = getattr(mode, "saver", None)
    everyones = gathered(
        {
            "blocked_s": statistics.median(blocked) if blocked else 0.0,
            "extra": max(0, _status("VmHWM") - before),
            "durable_s": statistics.median(mode.durable_s) if mode.durable_s else None,
            "room_s": saver.counters.cache_wait_s if saver is not None else None,
        }
    )
    if saver is not None:
        saver.close()
    durable = [one["durable_s"] for one in everyones if one["durable_s"] is not None]
    room = [one["room_s"] for one in everyones if one["room_s"] is not None]
    return {
        "blocked_s": max(one["blocked_s"] for one in everyones),
        "slowdowns": slowdowns,
        "begun": len(blocked) / (steps * rounds),
        "durable_s": max(durable, default=None),
        "extra_bytes": sum(one["extra"] for one in everyones),
        "room_s": max(room, default=None),
        "base_s": statistics.median(base),
    }


def _phase(job: RanksJob, mode: RanksMode, steps: int) -> dict[str, list[float]]:
    """Train; seconds of each step, and those blocked by each checkpoint that was begun."""
    step_s: list[float] = []
    blocked_s: list[float] = []
    for step in range(steps):
        begun = time.perf_counter()
        is_begun = mode.save(step, job.state(), job.local())
        spent = time.perf_counter() - begun
        job.gradients()
        fence = time.perf_counter()
        mode.fence()
        spent += time.perf_counter() - fence
        job.optimizer.step()
        job.optimizer.zero_grad(set_to_none=False)
        step_s.append(time.perf_counter() - begun)
        if is_begun:
            blocked_s.append(spent)
    mode.settle()
    dist.barrier()
    return {"step_s": step_s, "blocked_s": blocked_s}


def _local(tensor: Tensor) -> Tensor:
    local = getattr(tensor, "to_local", None)
    return (tensor if local is None else local()).detach()


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    return 0


@contextmanager
def peers_python() -> Iterator[tuple[str, list[str]]]:
    """Install the peers that can be; the interpreter that sees them, and a line on each."""
    with tempfile.TemporaryDirectory(prefix="resihp-peers-") as folder:
        python, notes = peer_python(Path(folder)), []
        for package, version in PEER_VERSIONS.items():
            wanted = f"{package}=={version}"
            try:
                install(python, "--no-build-isolation", wanted, DS_BUILD_OPS="0")
                notes.append(wanted)
            except RuntimeError as error:
                notes.append(f"does not install: {wanted}: {error}")
        yield str(python), notes


def measure_ranks(
    world: int, gib: float, steps: int, rounds: int, folder: Path, *, with_peers: bool
) -> tuple[dict[str, Any], list[str]]:
    """Measure both jobs; returns the results of each, and a line on each peer."""
    if not with_peers:
        jobs = {k: _launch(sys.executable, k, "", world, gib, steps, rounds, folder) for k in JOBS}
        return jobs, ["peers left out (--no-peers)"]
    with peers_python() as (python, notes):
        jobs = {k: _launch(python, k, "", world, gib, steps, rounds, folder) for k in JOBS}
        for kind, peer in product(JOBS, PEERS):
            try:
                run = _launch(python, kind, peer, world, gib, steps, rounds, folder)
                jobs[kind]["modes"] |= run["modes"]
            except (RuntimeError, subprocess.TimeoutExpired) as problem:
                last = str(problem).strip().splitlines()[-1]
                jobs[kind]["modes"][peer] = {"problem": f"does not run here: {last}"}
    return jobs, notes


def _launch(
    python: str, kind: str, mode: str, world: int, gib: float, steps: int, rounds: int, folder: Path
) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-W", "ignore", "-m", "benchmarks._checkpoint_ranks", kind, mode]
    command += [str(folder), str(gib), str(steps), str(rounds)]
    processes, logs = [], [folder / f"{kind}.{rank}.log" for rank in range(world)]
    shared = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": str(world)}
    for rank, log in enumerate(logs):
        own = {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            processes.append(subprocess.Popen(command, env=own, stdout=file, stderr=file))
    try:
        for process in processes:
            process.wait(_PEER_TIMEOUT_S if mode else 900)
    finally:
        for process in processes:
            process.kill()
    lines = [line for line in logs[0].read_text().splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError("\n".join(log.read_text()[-2000:] for log in logs))
    found: dict[str, Any] = json.loads(lines[-1].removeprefix("RESULT "))
    return found


def rows(found: Mapping[str, Any]) -> Sequence[Sequence[str]]:
    """Format the results of one job."""
    return [_row(name, run, found["state_bytes"]) for name, run in found["modes"].items()]


def _row(name: str, run: Mapping[str, Any], state_bytes: int) -> list[str]:
    if "problem" in run:
        return [name, run["problem"], *[""] * (len(COLUMNS) - 2)]
    low, middle, high = statistics.quantiles(run["slowdowns"], n=4)
    slow = f"{100 * (middle - 1):+.0f}% ({100 * (low - 1):+.0f}..{100 * (high - 1):+.0f})"
    return [
        name,
        f"{1e3 * run['blocked_s']:.1f}",
        slow,
        f"{100 * run['begun']:.0f}%",
        f"{run['durable_s']:.2f}" if run["durable_s"] else "not synced",
        f"{run['extra_bytes'] / state_bytes:.2f}x",
        "" if run["room_s"] is None else f"{run['room_s']:.2f} s",
    ]


if __name__ == "__main__":
    job_name, mode_name, path, size, *counts = sys.argv[1:]
    run_rank(job_name, mode_name, Path(path), float(size), *map(int, counts))
