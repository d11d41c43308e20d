"""Loops of `benchmarks.recovery_overhead`: plain ones of torch, and the same with `Replicas`.

Each is an iterator that makes one step and yields its cost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from resihp.elastic.ddp.replicas import Replicas
from resihp.elastic.ddp.step import Step
from resihp.elastic.rendezvous.environment import Environment

WIDTH, LAYERS, ROWS, REPLICAS = 768, 12, 96, 2
"""Model (7 million parameters), rows of a microbatch."""

SHARE = {"DDP": 2, "HSDP": 2, "pipeline": 4}
"""Microbatches of each replica."""


class StepCost(NamedTuple):
    """Milliseconds of a step in one process, and of its processor time, all threads together."""

    ms: float
    processor_ms: float


Loops = dict[str, Iterator[StepCost]]
Passes = Callable[[int, Sequence[int]], object]
"""Forward and backward of the given microbatches of a step; all that a replica has at once."""


def ddp_loops(rank: int, steps: int, environments: Iterator[Environment]) -> Loops:
    """Replicas of one process."""
    ways: dict[str, dict[str, Any]] = {
        "resilient": {},
        "no overlap": {"overlap": False},
        "fixed order": {"deterministic": True},
    }
    loops: Loops = {"DDP": _plain_ddp(rank, steps)}
    for name, options in ways.items():
        model = build_model()
        compute = _one_by_one(model, "DDP")
        loops[name] = _resilient(model, compute, steps, "DDP", next(environments), **options)
    return loops


def hsdp_loops(rank: int, steps: int, environments: Iterator[Environment]) -> Loops:
    """Replicas of two processes that share the parameters: FSDP2 in them."""
    mesh = init_device_mesh("cpu", (REPLICAS, 2), mesh_dim_names=("replicate", "shard"))
    loops: Loops = {}
    for name, is_deferred in (("HSDP", False), ("HSDP, deferred", True)):
        loops[name] = _plain_hsdp(mesh, steps, is_deferred=is_deferred)
    for name in ("resilient", "resilient, no overlap", "resilient, deferred"):
        model = _sharded(mesh["shard"])
        compute = _deferred(model, mesh) if "deferred" in name else _one_by_one(model, "HSDP", mesh)
        options: dict[str, Any] = {"members": 2, "overlap": "no overlap" not in name}
        options["is_batched"] = "deferred" in name
        loops[name] = _resilient(model, compute, steps, "HSDP", next(environments), **options)
    return loops


def pipeline_loops(rank: int, steps: int, environments: Iterator[Environment]) -> Loops:
    """Replicas of two processes with a stage each."""
    mesh = init_device_mesh("cpu", (REPLICAS, 2), mesh_dim_names=("replicate", "stage"))
    loops: Loops = {"DDP in the stages": _plain_pipeline(mesh, steps)}
    for name in ("resilient", "resilient, no overlap"):
        module = _stage_of(mesh)
        compute = _scheduled(module, mesh)
        options: dict[str, Any] = {"members": 2, "overlap": "no overlap" not in name}
        options["is_batched"] = True
        loops[name] = _resilient(module, compute, steps, "pipeline", next(environments), **options)
    return loops


CASES = {"DDP": (2, ddp_loops), "HSDP": (4, hsdp_loops), "pipeline": (4, pipeline_loops)}
"""Processes, and their loops; the first one is what the others are compared with."""


def _resilient(
    model: nn.Module,
    compute: Passes,
    steps: int,
    case: str,
    environment: Environment,
    *,
    is_batched: bool = False,
    **options: Any,
) -> Iterator[StepCost]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    replicas = Replicas(
        model,
        optimizer,
        microbatches=REPLICAS * SHARE[case],
        environment=environment,
        **options,
    )
    for step in replicas.steps(steps):
        with _Timer() as timer:
            for indices in _taken(step, is_batched=is_batched):
                losses = compute(step.number, indices)
                if losses is not None:
                    step.report(losses)  # type: ignore[arg-type]
            optimizer.step()
        yield timer.cost


def _taken(step: Step, *, is_batched: bool) -> Iterator[Sequence[int]]:
    yield from step.batches() if is_batched else ((index,) for index in step)


def _plain_ddp(rank: int, steps: int) -> Iterator[StepCost]:
    """DDP as its documentation shows it for gradient accumulation."""
    model = DistributedDataParallel(build_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    share = SHARE["DDP"]
    for step in range(steps):
        with _Timer() as timer:
            for done in range(share):
                with model.no_sync() if done + 1 < share else nullcontext():
                    _loss(model, step, rank * share + done, "DDP").backward()
            optimizer.step()
            optimizer.zero_grad()
        yield timer.cost


def _plain_hsdp(mesh: DeviceMesh, steps: int, *, is_deferred: bool) -> Iterator[StepCost]:
    """HSDP that all-reduces once a step; deferred: it also reduce-scatters once."""
    model = _sharded(mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    share, replica = SHARE["HSDP"], mesh.get_local_rank("replicate")
    for step in range(steps):
        with _Timer() as timer:
            for done in range(share):
                if is_deferred:
                    model.set_requires_gradient_sync(done + 1 == share)
                else:
                    model.set_requires_all_reduce(done + 1 == share)
                _loss(model, step, replica * share + done, "HSDP", mesh).backward()
            optimizer.step()
            optimizer.zero_grad()
        yield timer.cost


def _plain_pipeline(mesh: DeviceMesh, steps: int) -> Iterator[StepCost]:
    """1F1B, and DDP over the processes that hold the same stage."""
    module = DistributedDataParallel(_stage_of(mesh), process_group=mesh["replicate"].get_group())
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    compute = _scheduled(module, mesh)
    share, replica = SHARE["pipeline"], mesh.get_local_rank("replicate")
    for step in range(steps):
        with _Timer() as timer:
            compute(step, range(replica * share, (replica + 1) * share))
            optimizer.step()
            optimizer.zero_grad()
        yield timer.cost


def build_model() -> nn.Sequential:
    """The same in every process."""
    torch.manual_seed(0)
    layers = (module for _ in range(LAYERS) for module in (nn.Linear(WIDTH, WIDTH), nn.GELU()))
    return nn.Sequential(*layers)


def _sharded(mesh: DeviceMesh) -> Any:
    model = build_model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _stage_of(mesh: DeviceMesh) -> nn.Module:
    place, half = mesh.get_local_rank("stage"), LAYERS
    return build_model()[place * half : (place + 1) * half]


def _one_by_one(model: nn.Module, case: str, mesh: DeviceMesh | None = None) -> Passes:
    def compute(step: int, indices: Sequence[int]) -> object:
        [index] = indices
        loss = _loss(model, step, index, case, mesh)
        loss.backward()
        return loss

    return compute


def _deferred(model: Any, mesh: DeviceMesh) -> Passes:
    """All microbatches at once, with one reduce-scatter at their end."""

    def compute(step: int, indices: Sequence[int]) -> object:
        losses = []
        for index in indices:
            model.set_requires_gradient_sync(index == indices[-1])
            losses.append(_loss(model, step, index, "HSDP", mesh))
            losses[-1].backward()
        return losses

    return compute


def _scheduled(module: nn.Module, mesh: DeviceMesh) -> Passes:
    stage = PipelineStage(
        module,
        mesh.get_local_rank("stage"),
        2,
        torch.device("cpu"),
        group=mesh["stage"].get_group(),
    )

    @lru_cache(maxsize=1)
    def schedule_of(count: int) -> Schedule1F1B | ScheduleGPipe:
        kind = Schedule1F1B if count >= 2 else ScheduleGPipe
        return kind(stage, count, loss_fn=loss_fn, scale_grads=False)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(output, target) / (REPLICAS * SHARE["pipeline"])

    def compute(step: int, indices: Sequence[int]) -> object:
        x = torch.cat([_batch(step, index) for index in indices])
        if stage.is_first:
            schedule_of(len(indices)).step(x, return_outputs=False)
            return None
        losses: list[torch.Tensor] = []
        target = x.roll(1, dims=1)
        schedule_of(len(indices)).step(target=target, losses=losses, return_outputs=False)
        return losses

    return compute


def _batch(step: int, index: int) -> torch.Tensor:
    chosen = torch.Generator().manual_seed(1000 * step + index)
    return torch.randn(ROWS, WIDTH, generator=chosen)


def _loss(
    model: nn.Module, step: int, index: int, case: str, mesh: DeviceMesh | None = None
) -> torch.Tensor:
    """Forward of one microbatch, or of this process's rows of it."""
    x = _batch(step, index)
    if mesh is not None:
        x = x.chunk(2)[mesh.get_local_rank("shard")]
    return functional.mse_loss(model(x), x.roll(1, dims=1)) / (REPLICAS * SHARE[case])


class _Timer:
    """Cost of a block."""

    cost = StepCost(0.0, 0.0)

    def __enter__(self) -> _Timer:
        self._begun = time.perf_counter(), time.process_time()
        return self

    def __exit__(self, *_: object) -> None:
        ended = time.perf_counter(), time.process_time()
        self.cost = StepCost(
            *(1e3 * (end - begun) for end, begun in zip(ended, self._begun, strict=True))
        )
