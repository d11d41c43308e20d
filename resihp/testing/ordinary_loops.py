"""Training loops as people write them, on several processes, with one device that turns slow.

Nothing in a loop knows of ResiHP but one call of `resihp.instrument`. The devices' speed is
emulated: each layer sleeps in its forward and backward pass for what its microbatch's work would
take, longer on the slow device. On CUDA the stream sleeps, and the host goes on; all ranks share
one device, and exchange by NCCL as if they were on hosts of their own. Lengths of documents differ
by rank, step and microbatch.
"""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from resihp.client import Client
from resihp.contracts import TelemetryBatch, to_json
from resihp.contracts.codec import WireFormat, decode

WIDTH, LAYERS, TOKENS = 32, 4, 256
_MS_PER_TOKEN, _MS_PER_SQUARE = 0.005, 0.00002
SHARED_DEVICE = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
}
"""Environment in which several ranks of NCCL share a device, if each has a `NCCL_HOSTID`: they
reach each other through loopback sockets."""
_CALIBRATION_CYCLES = 20_000_000
_kept: list[object] = []
"""Until the process has ended: torch's destructors may wait for its threads with the GIL held."""


@dataclass(frozen=True)
class SlowRank:
    """The device of `rank` is slower by `factor` in the passes `ops` from step `since` on."""

    rank: int = -1
    factor: float = 1.0
    ops: tuple[str, ...] = ("forward", "backward")
    since: int = 0


@dataclass(frozen=True)
class PacedLinks:
    """Every transfer of a pipeline takes `ms` longer, those between two `slow` ranks `factor` times
    as long from step `since` on. Each rank of a pipeline of two stages has one link."""

    ms: float = 0.0
    slow: tuple[int, int] = (-1, -1)
    factor: float = 1.0
    since: int = 0

    def hold(self, device: EmulatedDevice) -> None:
        """Make this process wait so much longer for each of its transfers."""
        from torch.distributed.pipelining import schedules

        waits: Callable[..., None] = vars(schedules)["_wait_batch_p2p"]

        def wait(works: list[Any]) -> None:
            waits(works)
            is_slow = device.rank in self.slow and device.step >= self.since
            time.sleep(self.ms * (self.factor if is_slow else 1.0) * 1e-3 if works else 0.0)

        vars(schedules)["_wait_batch_p2p"] = wait


@dataclass
class EmulatedDevice:
    """Emulated device of one rank. `work_ms` is the time of the present microbatch's forward pass
    in one layer; `doubled_steps` have twice the work on this rank."""

    rank: int
    slow: SlowRank
    pace: float = 1.0
    step: int = 0
    works_ms: list[float] = field(default_factory=lambda: [1.0])
    kind: str = "cpu"
    cycles_per_ms: float = 0.0

    def join(self, store: dist.Store, ranks: int) -> None:
        """Make the process group of all ranks, for tensors of this device."""
        backend = "gloo"
        if self.kind == "cuda":
            backend = "nccl"
            os.environ |= {**SHARED_DEVICE, "NCCL_HOSTID": f"rank{self.rank}"}
            torch.cuda.set_device(0)
            self.cycles_per_ms = _cycles_per_ms()
        dist.init_process_group(backend, store=store, rank=self.rank, world_size=ranks)

    def run(self, op: str, microbatch: int) -> None:
        """Sleep for one layer's pass; a backward pass takes twice as long."""
        ms = self.pace * self.works_ms[microbatch % len(self.works_ms)]
        ms *= 2.0 if op == "backward" else 1.0
        slow = self.slow
        if self.rank == slow.rank and op in slow.ops and self.step >= slow.since:
            ms *= slow.factor
        if self.kind == "cuda":
            torch.cuda._sleep(int(ms * self.cycles_per_ms))
        else:
            time.sleep(ms * 1e-3)


def _cycles_per_ms() -> float:
    """Clock of the device, by the fastest of a few sleeps."""
    found = []
    for _ in range(4):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        torch.cuda._sleep(_CALIBRATION_CYCLES)
        torch.cuda.synchronize()
        found.append(time.perf_counter() - begun)
    return _CALIBRATION_CYCLES / (min(found) * 1e3)


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, device: EmulatedDevice, microbatch: int) -> torch.Tensor:
        ctx.device, ctx.microbatch = device, microbatch
        device.run("forward", microbatch)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.device.run("backward", ctx.microbatch)
        return gradients[0], None, None


class PacedBlock(nn.Module):
    """Two linear layers of a device."""

    def __init__(self, device: EmulatedDevice) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.device = device
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` after the layers, paced as on the device."""
        microbatch = self.calls
        self.calls += 1
        run: Callable[..., torch.Tensor] = _Run.apply
        paced = run(self.up(x), self.device, microbatch)
        result: torch.Tensor = x + self.down(torch.relu(paced))
        return result


class PacedBlocks(nn.Module):
    """A model of several blocks. Documents are packed: `cu_seqlens` tells where they begin."""

    def __init__(self, device: EmulatedDevice, layers: int = LAYERS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PacedBlock(device) for _ in range(layers))

    def forward(self, x: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> torch.Tensor:
        """Return `x` after all blocks."""
        for block in self.blocks:
            x = block(x)
        return x


@dataclass(frozen=True)
class DocumentLengths:
    """Lengths of the packed documents of each microbatch, drawn like those of web text."""

    seed: int
    doubled: tuple[int, int, int] = (-1, 0, 0)
    """A rank, and the half-open range of steps in which its microbatches hold twice the tokens."""

    def lengths(self, rank: int, step: int, microbatch: int) -> list[int]:
        """Return the lengths of one microbatch."""
        draw = random.Random(f"{self.seed}/{rank}/{step}/{microbatch}")
        room = TOKENS
        if rank == self.doubled[0] and self.doubled[1] <= step < self.doubled[2]:
            room *= 2
        lengths: list[int] = []
        while room > 0:
            length = min(room, max(4, int(draw.lognormvariate(3.5, 1.0))))
            lengths.append(length)
            room -= length
        return lengths


@dataclass(frozen=True)
class PaddedLengths(DocumentLengths):
    """One document of `least` tokens or more in each microbatch, whose tensor is as long."""

    least: int = TOKENS // 2

    def lengths(self, rank: int, step: int, microbatch: int) -> list[int]:
        """Return the length of one microbatch's document."""
        draw = random.Random(f"{self.seed}/{rank}/{step}/{microbatch}")
        return [draw.randrange(self.least, TOKENS)]


def forward_ms(lengths: list[int]) -> float:
    """Time of one layer's forward pass on a healthy device."""
    return float(work_ms(sum(lengths), sum(length * length for length in lengths)))


def work_ms(tokens: Any, squares: Any) -> Any:
    """The same, of numbers or arrays of tokens and of squared lengths."""
    return _MS_PER_TOKEN * tokens + _MS_PER_SQUARE * squares


@dataclass(frozen=True)
class OrdinaryLoop:
    """A loop to run: `kind` is a key of `LOOPS`."""

    kind: str
    steps: int
    slow: SlowRank = SlowRank()
    documents: DocumentLengths = DocumentLengths(0)
    microbatches: int = 1
    url: str = ""
    job: str = "loop"
    ranks: int = 4
    recording: Path | None = None
    """Folder in which the ranks keep what they sent, for `recorded_batches`."""
    pace: float = 1.0
    """Time of a healthy device over that by `forward_ms`."""
    links: PacedLinks = PacedLinks()
    device: str = "cpu"
    """"cuda": all ranks share the first one."""


class RecordingClient(Client):
    """Client that also keeps the messages that the sidecar accepted, in a file."""

    def __init__(self, url: str, path: Path) -> None:
        super().__init__(url)
        self._path = path

    def send_telemetry(
        self, job: str, message: bytes, form: WireFormat, key: str | None = None
    ) -> dict[str, Any]:
        """Send an encoded batch, then keep it."""
        answer = super().send_telemetry(job, message, form, key)
        with self._path.open("ab") as file:
            file.write(msgpack.packb(message))
        return answer


def recorded_batches(folder: Path) -> list[TelemetryBatch]:
    """Return the batches that all ranks of a loop sent, a whole step each, in order."""
    sent = TelemetryBatch.concat(
        decode(message)
        for path in sorted(folder.glob("rank*.messages"))
        for message in msgpack.Unpacker(path.open("rb"))
    )
    sent = sent.select(np.lexsort((sent.rank, sent.step)))
    edges = np.flatnonzero(np.diff(sent.step)) + 1
    return [sent.select(rows) for rows in np.split(np.arange(len(sent)), edges)]


Steps = Iterator[Callable[[], None]]


@dataclass
class RankLoop:
    """The loop of one rank, ready to train.

    target   what `resihp.instrument` takes: a model or a schedule
    """

    target: Any
    optimizer: torch.optim.Optimizer
    device: EmulatedDevice
    _steps: Steps
    _blocks: list[PacedBlock]

    @classmethod
    def join(cls, rank: int, host: str, port: int, loop: OrdinaryLoop) -> RankLoop:
        """Join the job as one of `loop.ranks` ranks."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=120))
        device = EmulatedDevice(rank, loop.slow, loop.pace, kind=loop.device)
        device.join(store, loop.ranks)
        if loop.links.ms:
            loop.links.hold(device)
        target, steps = LOOPS[loop.kind](loop, rank, device)
        _kept.append((target, store))
        parts = getattr(target, "_stages", None) or [getattr(target, "_stage", target)]
        modules: list[nn.Module] = [getattr(part, "submod", part) for part in parts]
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=1e-3)
        blocks = [b for module in modules for b in module.modules() if isinstance(b, PacedBlock)]
        return cls(target, optimizer, device, steps, blocks)

    def train(self) -> Iterator[int]:
        """Yield the number of each step after its update."""
        for step, run in enumerate(self._steps):
            self.device.step = step
            for block in self._blocks:
                block.calls = 0
            run()
            self.optimizer.step()
            self.optimizer.zero_grad()
            yield step


def run_loop(rank: int, host: str, port: int, loop: OrdinaryLoop, stop: Path | None = None) -> None:
    """Train as one of `loop.ranks` ranks, until the file `stop` is there or the steps are done.

    For `resihp.testing.local_ranks`.
    """
    import resihp

    own = RankLoop.join(rank, host, port, loop)
    options: dict[str, Any] = {"probes": False}  # one would find the real device, which is healthy
    if loop.recording is not None:
        options["client"] = RecordingClient(loop.url, loop.recording / f"rank{rank}.messages")
    monitor = resihp.instrument(
        own.target, own.optimizer, job=loop.job, url=loop.url or None, **options
    )
    for _ in own.train():
        if stop is not None:
            stopped = torch.tensor(float(stop.exists()), device=loop.device)
            dist.all_reduce(stopped)
            if stopped:
                break
    print(f"{monitor.job}\n{monitor.stats}", flush=True)  # noqa: T201 the log of a test
    monitor.close(10.0)
    if loop.recording is not None and monitor.job is not None:
        (loop.recording / "job.json").write_text(json.dumps(to_json(monitor.job)))
    dist.barrier()


def _plain_steps(loop: OrdinaryLoop, rank: int, device: EmulatedDevice, model: Any) -> Steps:
    """Forward and backward passes of a model that is called directly."""
    for step in range(loop.steps):
        lengths = [loop.documents.lengths(rank, step, m) for m in range(loop.microbatches)]
        device.works_ms = [forward_ms(each) for each in lengths]

        def run(lengths: list[list[int]] = lengths) -> None:
            for index, each in enumerate(lengths):
                is_last = index == len(lengths) - 1
                no_sync = getattr(model, "no_sync", nullcontext)
                with nullcontext() if is_last else no_sync():
                    edges = torch.tensor([0, *each]).cumsum(0)
                    rows = sum(each) if isinstance(loop.documents, PaddedLengths) else 8
                    inputs = torch.randn(1, rows, WIDTH, device=loop.device)
                    loss = model(inputs, cu_seqlens=edges.to(loop.device)).square().mean()
                    loss.backward()

        yield run


def _ddp(loop: OrdinaryLoop, rank: int, device: EmulatedDevice) -> tuple[Any, Steps]:
    model = DistributedDataParallel(PacedBlocks(device).to(loop.device))
    return model, _plain_steps(loop, rank, device, model)


def _fsdp(
    loop: OrdinaryLoop, rank: int, device: EmulatedDevice, shape: tuple[int, ...] = ()
) -> tuple[Any, Steps]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = ("replicate", "shard")[-max(1, len(shape)) :]
    mesh = init_device_mesh(loop.device, shape or (loop.ranks,), mesh_dim_names=names)
    model = PacedBlocks(device).to(loop.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, _plain_steps(loop, rank, device, model)


def _hsdp(loop: OrdinaryLoop, rank: int, device: EmulatedDevice) -> tuple[Any, Steps]:
    return _fsdp(loop, rank, device, (2, loop.ranks // 2))


def _tensor_parallel(loop: OrdinaryLoop, rank: int, device: EmulatedDevice) -> tuple[Any, Steps]:
    """Tensor parallel over two ranks, FSDP2 over the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh(loop.device, (loop.ranks // 2, 2), mesh_dim_names=("dp", "tp"))
    model = PacedBlocks(device).to(loop.device)
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, _plain_steps(loop, rank // 2, device, model)


def _pipeline(
    loop: OrdinaryLoop, rank: int, device: EmulatedDevice, name: str = "1F1B", chunks: int = 1
) -> tuple[Any, Steps]:
    """Pipeline over two ranks, data parallel over the others."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import get_schedule_class

    depth, replicas = 2, loop.ranks // 2
    mesh = init_device_mesh(loop.device, (depth, replicas), mesh_dim_names=("pp", "dp"))
    at, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
    group, where = mesh["pp"].get_group(), torch.device(loop.device)
    stages = []
    for chunk in range(chunks):
        part: Any = _PacedStage(device, LAYERS // chunks).to(loop.device)
        if chunks == 1:
            part = DistributedDataParallel(part, process_group=mesh["dp"].get_group())
        else:
            fully_shard(part, mesh=mesh["dp"])
        number = at + chunk * depth
        stages.append(PipelineStage(part, number, depth * chunks, where, group=group))
    kind = get_schedule_class(name)
    held: Any = stages if chunks > 1 else stages[0]
    count = loop.microbatches
    schedule = kind(held, count, loss_fn=lambda out, aim: (out - aim).square().mean())
    last = any(stage.is_last for stage in stages)

    def steps() -> Steps:
        for step in range(loop.steps):
            lengths = [loop.documents.lengths(replica, step, m) for m in range(count)]
            device.works_ms = [forward_ms(each) for each in lengths]

            width = max(map(len, lengths))
            padded = [each + [0] * (width - len(each)) for each in lengths]
            rows = torch.tensor(padded, device=loop.device)

            def run(rows: torch.Tensor = rows) -> None:
                shape = (count, 8, WIDTH)
                inputs = [torch.randn(shape, device=where)] if stages[0].is_first else []
                aims = {"target": torch.zeros(shape, device=where)} if last else {}
                schedule.step(*inputs, seq_lens=rows, **aims)

            yield run

    return schedule, steps()


class _PacedStage(PacedBlocks):
    """Blocks of one stage; every stage is given the lengths in all rows of the microbatch."""

    def forward(self, x: torch.Tensor, seq_lens: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(x)


def _interleaved(loop: OrdinaryLoop, rank: int, device: EmulatedDevice) -> tuple[Any, Steps]:
    return _pipeline(loop, rank, device, "Interleaved1F1B", 2)


def _zero_bubble(loop: OrdinaryLoop, rank: int, device: EmulatedDevice) -> tuple[Any, Steps]:
    return _pipeline(loop, rank, device, "InterleavedZeroBubble", 2)


LOOPS: dict[str, Callable[[OrdinaryLoop, int, EmulatedDevice], tuple[Any, Steps]]] = {
    "ddp": _ddp,
    "fsdp2": _fsdp,
    "hsdp": _hsdp,
    "tensor_parallel": _tensor_parallel,
    "1f1b": _pipeline,
    "interleaved": _interleaved,
    "zero_bubble": _zero_bubble,
}
"""Loops by their kind; each makes what is instrumented, and the steps' bodies."""
