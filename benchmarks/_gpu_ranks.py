"""What ranks of one device share in `benchmarks.gpu`: what they hold, and stores of their job."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._gpu_rows import NotRunError

WAIT_S = 60.0
_MPS, _MPS_START_S = "nvidia-cuda-mps-control", 1.0


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


@contextmanager
def side_by_side(device: str) -> Iterator[None]:
    """Have kernels of several processes run at the same time, by CUDA's Multi-Process Service.

    Without it they take turns of milliseconds, in which a kernel that waits for another process
    takes time from that process. Raises `NotRunError` where the service is not installed.
    """
    if device != "cuda":
        yield
        return
    if shutil.which(_MPS) is None:
        raise NotRunError(f"not run: there is no {_MPS} to have ranks compute side by side")
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        with subprocess.Popen([_MPS, "-f"], stdout=subprocess.DEVNULL) as service:
            try:
                time.sleep(_MPS_START_S)
                yield
            finally:
                subprocess.run([_MPS], input=b"quit\n", timeout=WAIT_S, check=False)
                service.kill()


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
