"""One rank of `benchmarks.restart`, with checkpoints in one of two ways.

`_restart_worker.py LOOP WAY SIZE FOLDER STEPS LOST_AT END` under a launcher; LOOP is "fsdp2", over
all ranks, or "tp" (FSDP2 over two replicas of two tensor-parallel ranks each; of three ranks over
one); WAY is "memory" (`resihp.checkpoint` with `NodeMemory`, each step) or "dcp"
(`torch.distributed.checkpoint` to FOLDER, each tenth step). Rank 1 ends in the first attempt in the
middle of step LOST_AT: END is "kill", or "device" for the words of a broken one. With "plan" it
waits there for the launcher to end it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BEGUN = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

SHAPES = {"31M": (8, 512), "108M": (12, 768)}
"""Layers and width; vocabulary 12,000 and 30,000."""
VOCABULARY = {"31M": 12_000, "108M": 30_000}
DCP_EVERY = 10
FFN = {"fsdp2": 4.0, "tp": 4.5}
"""Widths of the FFN over that of the model: two and three ranks can share 4.5."""


class Model(torch.nn.Module):
    """A causal transformer of torch's own layers."""

    def __init__(self, size: str, loop: str) -> None:
        super().__init__()
        layers, width = SHAPES[size]
        self.embedding = torch.nn.Embedding(VOCABULARY[size], width)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(
                width,
                width // 64,
                int(FFN[loop] * width),
                dropout=0.0,
                batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits, [batch, tokens, vocabulary]."""
        x: torch.Tensor = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embedding.weight.T


def main() -> None:
    """Train, and tell each step."""
    loop, way, size, folder, steps, lost_at, end = sys.argv[1:8]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    told = Path(folder, f"told-{attempt}-{rank}").open("a")  # noqa: SIM115 - until the end

    def tell(event: str, **more: Any) -> None:
        told.write(json.dumps({"event": event, "at": time.time(), **more}) + "\n")
        told.flush()

    told.write(json.dumps({"event": "main", "at": BEGUN}) + "\n")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(size, loop)
    shard(model, loop)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tell("built")
    first, save = (in_memory if way == "memory" else on_disk)(model, optimizer, Path(folder))
    tell("restored", step=first)
    for step in range(first, int(steps)):
        drawn = torch.Generator().manual_seed(1000 * step + rank)
        tokens = torch.randint(VOCABULARY[size], (1, 33), generator=drawn)
        logits = model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        if (attempt, rank, step) == (0, 1, int(lost_at)):
            tell("lost", step=step)
            if end == "plan":
                time.sleep(60)
            if end == "device":
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            os.kill(os.getpid(), signal.SIGKILL)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        tell("step", step=step)
        save(step)
    dist.destroy_process_group()


def shard(model: Model, loop: str) -> None:
    """Shard over all ranks, or over those that hold the same part of each layer's FFN."""
    world = dist.get_world_size()
    replicas = (2 if world % 2 == 0 else 1) if loop == "tp" else world
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("dp", "tp"))
    for layer in model.layers:
        if loop == "tp":
            cuts = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
            parallelize_module(layer, mesh["tp"], cuts)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State of both, by names that do not depend on the number of ranks."""
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


def use(state: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load the state that `state_of` gave and a checkpoint filled."""
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def in_memory(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> tuple[int, Callable[[int], None]]:
    """First step to do, and the save after each."""
    from resihp.checkpoint import Checkpointer, NodeMemory

    saver = Checkpointer([NodeMemory()])
    saver.attach(optimizer)
    first = 0
    if saver.newest_step() is not None:
        state = state_of(model, optimizer)
        first = saver.restore(state).step + 1
        use(state, model, optimizer)

    def save(step: int) -> None:
        saver.save(step, state_of(model, optimizer))

    return first, save


def on_disk(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, folder: Path
) -> tuple[int, Callable[[int], None]]:
    """First step to do, and the save after each tenth."""
    found = sorted(folder.glob("checkpoint-*/.metadata"))
    first = 0
    if found:
        state = state_of(model, optimizer)
        dcp.load(state, checkpoint_id=found[-1].parent)
        use(state, model, optimizer)
        first = int(found[-1].parent.name.partition("-")[2]) + 1

    def save(step: int) -> None:
        if (step + 1) % DCP_EVERY == 0:
            dcp.save(state_of(model, optimizer), checkpoint_id=folder / f"checkpoint-{step:04d}")

    return first, save


if __name__ == "__main__":
    main()
