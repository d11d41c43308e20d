"""From a lost rank, or a plan, to the next step of a job that restarts: `benchmarks.restart`.

Four ranks (gloo, this machine), FSDP2 over all of them or two replicas of two tensor-parallel
ranks. In the middle of a step rank 1 is lost, or the sidecar has a plan without it. `resihp run`
restarts from warm processes and the checkpoint in the node's memory, with as many ranks or, where
the device is broken or left out, with one fewer. torchrun, and NVRx's launcher where it installs,
restart their four ranks from torch's distributed checkpoint on disk, saved each tenth step. `back`
is the time until the lost step is completed, with the steps done again; `next step` that until any
step of the second attempt is. `python -m benchmarks.restart`
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from benchmarks._report import machine, print_table, write_json
from resihp.contracts import Action, Layout, Plan, to_json

RANKS, STEPS, LOST_AT = 4, 30, 16
LIMIT_S = 600.0
OURS = ("resihp.launch",)
_TORCHS = (
    "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0",
    "--monitor-interval=0.1",
)  # fmt: skip
TORCHRUN = ("torch.distributed.run", *_TORCHS)
NVRX = (
    "nvidia_resiliency_ext.fault_tolerance.launcher", *_TORCHS, "--ignore-missing-fault-tol-cfg",
)  # fmt: skip
PEER = ("nvidia-resiliency-ext==0.4.1", "defusedxml", "pynvml", "nvidia-ml-py", "psutil", "pyyaml")
# Without it, torchrun's second attempt reads the addresses that gloo left in the first one's store,
# and fails.
TORCHRUN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
COLUMNS = (
    "model", "way", "back s", "times ours", "next step s", "to script s", "to model s",
    "to state s", "first step s", "usual step s", "steps again",
)  # fmt: skip
Seen = dict[str, float]


@dataclass(frozen=True)
class Way:
    """A launcher with its ranks, and what `_restart_worker` is told."""

    name: str
    launcher: Sequence[str]
    processes: str
    loop: str
    checkpoints: str
    end: str


_FEWER = f"{RANKS - 1}:{RANKS}"
WAYS = (
    Way("resihp run, 4 to 4", OURS, f"{RANKS}", "fsdp2", "memory", "kill"),
    Way("resihp run, 4 to 3", OURS, _FEWER, "fsdp2", "memory", "device"),
    Way("resihp run, plan 4 to 3", OURS, _FEWER, "fsdp2", "memory", "plan"),
    Way("resihp run, DP2 x TP2 to TP3", OURS, _FEWER, "tp", "memory", "device"),
    Way("torchrun, 4 to 4", TORCHRUN, f"{RANKS}", "fsdp2", "dcp", "kill"),
    Way("NVRx, 4 to 4", NVRX, f"{RANKS}", "fsdp2", "dcp", "kill"),
)


def main() -> None:
    """Measure, print, and write JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--size", choices=("31M", "108M"), action="append")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="without NVRx")
    options = parser.parse_args()
    rows: list[list[Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        note = install(Path(folder)) if options.peer else "left out (--no-peer)"
        ways = [way for way in WAYS if way.launcher is not NVRX or note is None]
        for size in options.size or ("31M", "108M"):
            rounds = [
                {way.name: restart(way, size, folder) for way in ways}
                for _ in range(options.repeats)
            ]
            rows += summary(size, rounds)
    print(machine())
    print_table(f"From a lost rank to the next step, medians of {options.repeats}", COLUMNS, rows)
    print(f"NVRx: {note or PEER[0]}")
    if options.json:
        write_json(options.json, {"rows": [dict(zip(COLUMNS, r, strict=True)) for r in rows]})


def install(folder: Path) -> str | None:
    """Install NVRx in a folder; the reason if that is not possible here."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
    try:
        subprocess.run([*pip, *PEER], capture_output=True, timeout=300, check=True)
    except (subprocess.SubprocessError, OSError) as error:
        return f"could not be installed: {error}"
    return None


def summary(size: str, rounds: Sequence[dict[str, Seen]]) -> list[list[Any]]:
    """One row a way."""
    rows = []
    ours = statistics.median(one[WAYS[0].name]["back"] for one in rounds)
    for way in rounds[0]:
        seen = [one[way] for one in rounds]
        middle = {key: statistics.median(one[key] for one in seen) for key in seen[0]}
        parts = ("total", "script", "model", "state", "first", "usual")
        rows.append(
            [size, way, f"{middle['back']:.2f}", f"{middle['back'] / ours:.1f}"]
            + [f"{middle[part]:.2f}" for part in parts]
            + [f"{middle['again']:.0f}"]
        )
    return rows


def restart(way: Way, size: str, peer: str) -> Seen:
    """Run a job that restarts; seconds of the parts of its restart.

    peer  folder with NVRx
    """
    script = Path(__file__).with_name("_restart_worker.py")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        arguments = [way.loop, way.checkpoints, size, folder, str(STEPS), str(LOST_AT), way.end]
        told = stack.enter_context(plans(Path(folder))) if way.end == "plan" else {}
        environment = {
            **os.environ,
            **TORCHRUN_STORE,
            **told,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(script.parents[1]), peer]),
        }
        launcher = [sys.executable, "-m", *way.launcher, f"--nproc-per-node={way.processes}"]
        done = subprocess.run(
            [*launcher, str(script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{way.name}: status {done.returncode}\n{done.stderr}")
        seen = parts_of(Path(folder))
    print(size, way.name, {key: round(value, 2) for key, value in seen.items()}, flush=True)
    time.sleep(1.0)
    return seen


class Sidecar(ThreadingHTTPServer):
    """Has the plan of the job's start, and one without rank 1 once that is in its step's middle."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self._told = folder / "told-0-1"

    def newest(self, after: int) -> bytes | None:
        """The newest plan, if it is newer than `after`."""
        is_due = self._told.exists() and '"lost"' in self._told.read_text(encoding="utf-8")
        plan = _plan(1, (0, 2, 3)) if is_due else _plan(0, range(RANKS))
        return json.dumps(to_json(plan)).encode() if plan.version > after else None


class _Answer(BaseHTTPRequestHandler):
    server: Sidecar

    def do_GET(self) -> None:
        """Answer with the plan, or wait a little."""
        after = int(parse_qs(urlsplit(self.path).query).get("after", ["-1"])[0])
        plan = self.server.newest(after)
        if plan is None:
            time.sleep(0.01)
        self._answer(204 if plan is None else 200, plan or b"")

    def do_POST(self) -> None:
        """Take an acknowledgement."""
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer(200, b"{}")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


def _plan(version: int, ranks: Sequence[int]) -> Plan:
    layout = Layout.grid(dp=len(ranks), pp=1, tp=1, layers=1)
    replicas = tuple(
        replace(one, stages=(replace(one.stages[0], ranks=(rank,)),))
        for one, rank in zip(layout.replicas, ranks, strict=True)
    )
    action = Action.RESTART if version else None
    return Plan(
        version=version,
        layout=Layout(replicas),
        quotas=(1,) * len(ranks),
        reason=(f"ranks {list(ranks)} go on",),
        action=action,
    )


@contextmanager
def plans(folder: Path) -> Iterator[dict[str, str]]:
    """Serve the plans of a job whose ranks tell in `folder`; variables for its launcher."""
    with Sidecar(folder) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield {
                "RESIHP_URL": f"http://127.0.0.1:{server.server_port}",
                "RESIHP_JOB": "benchmark",
            }
        finally:
            server.shutdown()
            thread.join()


def parts_of(folder: Path) -> Seen:
    """Seconds from the loss to the first step of the second attempt, by their parts."""
    before, after = read(folder / "told-0-0"), read(folder / "told-1-0")
    lost = next(one["at"] for one in read(folder / "told-0-1") if one["event"] == "lost")
    at = {one["event"]: one["at"] for one in reversed(after)}
    begun = next(one["step"] for one in after if one["event"] == "restored")
    steps = [one["at"] for one in before if one["event"] == "step"]
    usual = statistics.median(b - a for a, b in pairwise(steps))
    return {
        "back": at["step"] - lost + (LOST_AT - begun) * usual,
        "total": at["step"] - lost,
        "script": at["main"] - lost,
        "model": at["built"] - at["main"],
        "state": at["restored"] - at["built"],
        "first": at["step"] - at["restored"],
        "usual": usual,
        "again": LOST_AT - begun,
    }


def read(path: Path) -> list[dict[str, Any]]:
    """What a rank told."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    main()
