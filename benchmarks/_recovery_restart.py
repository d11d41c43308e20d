"""Checkpoint and restart, the baseline of `benchmarks.recovery`.

`python -m benchmarks._recovery_restart RANK WORLD PORT FOLDER EVERY ATTEMPT`: data-parallel
training that saves every EVERY steps and goes on from the newest checkpoint. A process that is
killed brings all of them down; `play` then starts one fewer anew.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks._recovery_job import (
    MICROBATCHES,
    REPLICAS,
    STEPS,
    Diary,
    build_model,
    build_optimizer,
)


def play(folder: Path, *, every: int) -> None:
    """Run the job, restarting it after every death; diaries go into `folder`."""
    for attempt, world in enumerate(range(REPLICAS, 0, -1)):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = [str(part) for part in (world, port, folder, every, attempt)]
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks._recovery_restart", str(rank), *arguments],
                stderr=subprocess.DEVNULL,
            )
            for rank in range(world)
        ]
        try:
            while all(process.poll() is None for process in processes):
                time.sleep(0.002)
            if all(process.poll() in (None, 0) for process in processes):
                for process in processes:
                    process.wait(timeout=60)
                return
        finally:
            for process in processes:
                process.kill()
                process.wait()


def time_save(folder: Path) -> float:
    """Seconds that one checkpoint takes."""
    model = build_model()
    optimizer = build_optimizer(model)
    model(torch.ones(1, model[0].in_features)).sum().backward()  # type: ignore[index]
    optimizer.step()
    times = []
    for step in range(5):
        begun = time.perf_counter()
        _write(folder, model, optimizer, step)
        times.append(time.perf_counter() - begun)
    return sorted(times)[2]


def main() -> None:
    """One process of one attempt."""
    rank, world, port = (int(part) for part in sys.argv[1:4])
    folder, every, attempt = Path(sys.argv[4]), int(sys.argv[5]), int(sys.argv[6])
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world, timeout=timedelta(seconds=60))
    model = build_model()
    optimizer = build_optimizer(model)
    diary = Diary(rank, folder / f"diary-{attempt}.{rank}.jsonl")
    begun = _load(folder, model, optimizer)
    # One death per place: an attempt that redoes the step of an earlier death lives on.
    diary.may_die = rank == world - 1
    diary.tell("ready", begun)
    for step in range(begun, STEPS):
        share = range(MICROBATCHES * rank // world, MICROBATCHES * (rank + 1) // world)
        optimizer.zero_grad()
        for done, index in enumerate(share):
            diary.compute(model, step, index, done, len(share))
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        diary.tell("step", step)
        if (step + 1) % every == 0:
            _save(folder, model, optimizer, step + 1, rank)
            diary.tell("saved", step)


def _save(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int, rank: int
) -> None:
    if rank == 0:
        _write(folder, model, optimizer, step)
    dist.barrier()


def _write(
    folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int
) -> None:
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with (folder / "new.pt").open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    (folder / "new.pt").rename(folder / "checkpoint.pt")


def _load(folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


if __name__ == "__main__":
    main()
