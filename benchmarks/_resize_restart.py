"""One process of the stop-and-restart baseline: torch's distributed checkpoint, resharded on load.

`python -m benchmarks._resize_restart save|load RANK WORLD PORT FOLDER NUMEL` holds parameters and
AdamW moments of NUMEL elements as DTensors, cut over WORLD ranks, and prints milliseconds as JSON.
"""

from __future__ import annotations

import json
import os
import sys
import time

START = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh  # noqa: E402
from torch.distributed.tensor import DTensor, Shard  # noqa: E402

TENSORS = 64


def main() -> None:
    """Save or load, and say how long it took."""
    what, rank, world, port, folder, numel = sys.argv[1:7]
    os.environ.update(RANK=rank, WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (int(world),))
    state = _state(int(numel), int(world), mesh)
    dist.barrier()
    begun = time.time()
    if what == "save":
        dcp.save(state, checkpoint_id=folder)
    else:
        dcp.load(state, checkpoint_id=folder)
    dist.barrier()
    end = time.time()
    timing = {"start_ms": (begun - START) * 1e3, "state_ms": (end - begun) * 1e3, "end": end}
    if rank == "0":
        print(json.dumps(timing), flush=True)
    dist.destroy_process_group()


def _state(numel: int, world: int, mesh: DeviceMesh) -> dict[str, DTensor]:
    """Parameters and two moments, in equal tensors cut over the ranks."""
    rows = 12 * (numel // TENSORS // 12 // 64)  # divisible by 3 and by 4
    return {
        f"{kind}.{index}": DTensor.from_local(
            torch.ones(rows // world, 64),
            mesh,
            [Shard(0)],
            run_check=False,
        )
        for kind in ("param", "exp_avg", "exp_avg_sq")
        for index in range(TENSORS)
    }


if __name__ == "__main__":
    main()
