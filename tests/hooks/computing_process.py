"""A process that computes, or reads a file through its memory, and prints what its sensors say.

Arguments: `compute`, or `read` and a file. A line of JSON follows for each sample, one a second.
"""

from __future__ import annotations

import json
import mmap
import random
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from resihp.hooks import HostClock
from resihp.hooks._sampler import Sampler
from resihp.hooks._spans import Recording
from resihp.hooks._stats import FailureLog


def compute() -> None:
    sum(number * number for number in range(20_000))


def reader(file: Path) -> Callable[[], None]:
    with file.open("rb") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    mapped.madvise(mmap.MADV_RANDOM)
    draw = random.Random(0)

    def read() -> None:
        for _ in range(200):
            mapped[draw.randrange(len(mapped))]

    return read


def main() -> None:
    work = compute if sys.argv[1] == "compute" else reader(Path(sys.argv[2]))
    failures = FailureLog()
    recording = Recording(failures, HostClock().now_ns, None, look_for_cuda=False)
    recording.thread_id = threading.get_native_id()
    sampler = Sampler(recording)
    while True:
        end_s = time.monotonic() + 1.0
        while time.monotonic() < end_s:
            sampler.tick()
            work()
        sample = sampler.sample()
        assert sample is not None
        assert failures.count == 0
        sampler.keep()
        print(json.dumps(sample.readings()), flush=True)  # noqa: T201


main()
