"""What ranks of one device share in `benchmarks.gpu`: what they hold, and stores of their job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

WAIT_S = 60.0


def held(device: str) -> dict[str, int]:
    """Bytes in use on the device by all processes, or of this one on the CPU; open files."""
    if device == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        used = total - free
    else:
        used = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"bytes": used, "files": len(os.listdir("/proc/self/fd"))}


def meet(store: dist.Store, name: str, ranks: int) -> None:
    """Return when as many ranks have come here. Raises `TimeoutError`."""
    end = time.monotonic() + WAIT_S
    arrived = store.add(name, 1)
    while arrived < ranks:
        if time.monotonic() > end:
            raise TimeoutError(f"{arrived} of {ranks} ranks came to {name}")
        time.sleep(0.002)
        arrived = store.add(name, 0)


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


class Diary:
    """Events of one rank in a file, with times that all processes of the machine share."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = (folder / f"diary-{rank}.jsonl").open("a", buffering=1)

    def tell(self, what: str, **more: Any) -> None:
        """Write down what happens now."""
        self._file.write(json.dumps({"what": what, "at": time.monotonic(), **more}) + "\n")


def told(folder: Path, rank: int, what: str) -> Sequence[dict[str, Any]]:
    """Events of one rank, of one kind, in order."""
    lines = (folder / f"diary-{rank}.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["what"] == what]
