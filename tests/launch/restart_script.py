"""A data-parallel loop as a user writes it, which knows nothing of restarts but its checkpoints.

`restart_script.py FOLDER STEPS EVENT...`: an event `ATTEMPT:RANK:STEP:KIND` ends a rank in the
middle of a step, by "kill", by "device" (the words of a broken one), or by "bug" (in each attempt).
With "wait" the rank waits for a signal, with "deaf" for one that it cannot ignore, and with "hold"
for a file "go". Before an event every rank has put its newest checkpoint where it belongs.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from resihp.checkpoint import Checkpointer, NodeMemory

SAMPLES = 12  # of a step, over all ranks


def end(events: list[str], rank: int, attempt: int, step: int, saver: Checkpointer) -> None:
    """End this rank if that is its event."""
    for event in events:
        number, doomed, when, kind = event.split(":")
        if int(when) != step:
            continue
        saver.wait(120)
        dist.barrier()
        if int(doomed) != rank:
            continue
        if kind == "bug":
            raise ValueError(f"no sample of step {step}")
        if int(number) == attempt:
            if kind == "deaf":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if kind in ("wait", "deaf", "hold"):
                Path(f"{kind}-{attempt}").touch()
                while kind != "hold" or not Path("go").exists():
                    time.sleep(0.02)
                continue
            if kind == "device":
                raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    folder, steps, events = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    saver = Checkpointer([NodeMemory()])
    saver.attach(optimizer)
    state = {"model": model, "optimizer": optimizer}
    first = 0 if saver.newest_step() is None else saver.restore(state).step + 1
    (folder / "memory").write_text(os.environ["RESIHP_NODE_MEMORY"])
    if rank == 0 and "RESIHP_PLAN" in os.environ:
        (folder / f"plan-{attempt}").write_text(Path(os.environ["RESIHP_PLAN"]).read_text())
    with (folder / f"losses-{attempt}-{rank}").open("w") as losses:
        for step in range(first, steps):
            drawn = torch.Generator().manual_seed(step)
            x = torch.randn(SAMPLES, 8, generator=drawn)[rank::ranks]
            loss = parallel(x).sub(x.sum(1, keepdim=True)).square().mean()
            end(events, rank, attempt, step, saver)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            saver.wait(120)  # for the one before: none is skipped
            saver.save(step, state)
            dist.all_reduce(loss.detach_())
            losses.write(json.dumps([step, loss.item() / ranks]) + "\n")
            losses.flush()
    saver.close()
    del parallel  # freed behind its process group, it may wait for gloo's threads for ever
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
