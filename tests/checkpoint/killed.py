"""A loop that checkpoints until it is killed: `python -m tests.checkpoint.killed FOLDER START`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from resihp.checkpoint import Checkpointer, LocalDisk, SharedStorage
from tests.checkpoint.helpers import stamp, stamped


def main(folder: Path, start: int) -> None:
    """Say each step that is on disk, once it is."""
    torch.set_num_threads(1)
    state = stamped(start)
    disk = LocalDisk(folder / "disk")
    with Checkpointer([disk, SharedStorage(f"file://{folder}/shared")]) as saver:
        said = None
        for step in range(start, 1 << 30):
            saver.fence()
            stamp(state, step)
            saver.save(step, state, extra={"step": step})
            if said != (said := saver.counters.levels[disk.name].newest_step):
                sys.stdout.write(f"{said}\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
