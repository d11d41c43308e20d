"""Launchers of one machine, which stand for nodes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.launch.launcher_process import LauncherProcess

LIMIT_S = 400.0
HEARTBEAT_S = 10
"""All launchers of a job start, and each one beats, within less than it on a busy machine too."""
SCRIPT = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
told = folder / f"{attempt}-{rank}-of-{dist.get_world_size()}"

def end_late(number, frame):
    while not any(int(file.name.split("-")[0]) > int(attempt) for file in folder.glob("*-of-*")):
        time.sleep(0.05)
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)

if (folder / f"late-{attempt}-{rank}").exists():
    signal.signal(signal.SIGTERM, end_late)
while True:
    flag = torch.tensor(float((folder / "finish").exists()))
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    told.with_suffix(".part").write_text(f"{os.getpid()} {os.environ['GROUP_RANK']}")
    told.with_suffix(".part").rename(told)
    if flag:
        break
    time.sleep(0.05)
dist.destroy_process_group()
"""


class Launchers:
    """Launchers by name, each in a process group of its own, with their output in files.

    A rank with a file `late-ATTEMPT-RANK` that is told to end does so within a later attempt.
    """

    def __init__(self, folder: Path, *command: str, store: str = "") -> None:
        self.folder, self.store, self._hosts_store = folder, store or "127.0.0.1:0", not store
        self._processes: dict[str, LauncherProcess] = {}
        (folder / "script.py").write_text(SCRIPT)
        self._command = command or (str(folder / "script.py"), str(folder))

    def start(self, node: int, *options: str, nodes: str = "1:2") -> None:
        name = f"node-{node}"
        with (self.folder / name).open("wb") as log:
            self._processes[name] = LauncherProcess(
                self.folder,
                *("--nnodes", nodes, "--node-rank", str(node), "--rdzv-endpoint", self.store),
                *("--rdzv-id", self.folder.name, "--heartbeat", str(HEARTBEAT_S)),
                *("--shutdown-timeout", "2", *options, *self._command),
                out=log,
                err=log,
            )
        if node == 0 and self._hosts_store:
            pattern = re.compile(r"store at (\S+),")
            self.until(lambda: pattern.search(self.log(0)) is not None)
            self.store = pattern.findall(self.log(0))[0]

    def log(self, node: int) -> str:
        return (self.folder / f"node-{node}").read_text()

    def until(self, check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not check():
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.05)

    def runs(self, attempt: int, ranks: int) -> list[int]:
        """Processes of an attempt, once all its ranks have made a step."""
        self.until(lambda: self.has_run(attempt, ranks))
        files = [self.folder / f"{attempt}-{rank}-of-{ranks}" for rank in range(ranks)]
        return [int(file.read_text().split()[0]) for file in files]

    def has_run(self, attempt: int, ranks: int) -> bool:
        return all((self.folder / f"{attempt}-{rank}-of-{ranks}").exists() for rank in range(ranks))

    def kill(self, node: int) -> None:
        self._processes[f"node-{node}"].kill()

    def stop(self, node: int, number: int) -> None:
        self._processes[f"node-{node}"].send_signal(number)

    def status(self, node: int) -> int:
        return self._processes[f"node-{node}"].wait(LIMIT_S)

    def logs(self) -> str:
        return "\n".join(f"{name}:\n{(self.folder / name).read_text()}" for name in self._processes)

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()


@contextmanager
def launchers(folder: Path, *command: str, store: str = "") -> Iterator[Launchers]:
    found = Launchers(folder, *command, store=store)
    try:
        yield found
    finally:
        found.close()
