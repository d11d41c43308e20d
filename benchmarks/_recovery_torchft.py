"""torchft's side of `benchmarks.recovery`; runs in an environment of its own.

`python _recovery_torchft.py lighthouse tuned|documented` serves until it is killed;
`python _recovery_torchft.py replica RANK ADDRESS FOLDER` is one replica. Microbatches are shared
out over those in the quorum, so that the step keeps their number.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks._recovery_job import (
    MICROBATCHES,
    REPLICAS,
    STEPS,
    Diary,
    build_model,
    build_optimizer,
)

TUNED = {"join_timeout_ms": 100, "quorum_tick_ms": 20, "heartbeat_timeout_ms": 500}


def main() -> None:
    """Serve, or train."""
    if sys.argv[1] == "lighthouse":
        _serve(TUNED if sys.argv[2] == "tuned" else {})
    else:
        _train(int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))


def _serve(options: dict[str, int]) -> None:
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, **options)
    port = server.address().rsplit(":", 1)[1]
    print(f"http://127.0.0.1:{port}", flush=True)
    time.sleep(3600)


def _train(rank: int, lighthouse: str, folder: Path) -> None:
    torch.set_num_threads(1)
    model, diary = build_model(), Diary(rank, folder / f"diary-{rank}.jsonl")
    optimizer = build_optimizer(model)
    manager = _manager(rank, lighthouse, model, optimizer)
    diary.tell("ready", 0)
    while len(list(folder.glob("diary-*"))) < REPLICAS:
        time.sleep(0.01)  # or the first to come would train alone
    while (step := manager.current_step()) < STEPS:
        manager.start_quorum()
        optimizer.zero_grad()
        share = _share(manager)
        for done, index in enumerate(share):
            diary.compute(model, step, index, done, len(share))
        if _reduced(manager, model):
            optimizer.step()
            diary.tell("step", step)
    os._exit(0)


def _manager(rank: int, lighthouse: str, model: Any, optimizer: Any) -> Any:
    from torch.distributed import TCPStore
    from torchft import Manager, ProcessGroupGloo

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        min_replica_size=1,
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        replica_id=f"replica_{rank}",
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=10),
        init_sync=False,
    )
    manager.kept_store = store
    return manager


def _share(manager: Any) -> range:
    """This replica's microbatches; the quorum has to be known for that."""
    size, place = manager.num_participants(), manager.participating_rank()
    if place is None:
        return range(0)  # it came too late for this quorum and catches up
    return range(MICROBATCHES * place // size, MICROBATCHES * (place + 1) // size)


def _reduced(manager: Any, model: Any) -> bool:
    """Sum the gradients; whether the step may be committed."""
    for parameter in model.parameters():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    manager.allreduce(flat).wait()
    flat.mul_(manager.num_participants())  # it averages; the loss is a mean already
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))
    return bool(manager.should_commit())


if __name__ == "__main__":
    main()
