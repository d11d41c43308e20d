"""The DDP cells under TraceML, as its users run a script, and its verdict at the end.

TraceML has an environment of its own. It runs this file in each rank: the same loop and the same
slow rank, with batches from a `DataLoader`, without which it gives no verdict.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks._report import install, peer_python
from benchmarks.hooks import PEER
from resihp.contracts import from_json, to_json
from resihp.testing.ordinary_loops import OrdinaryLoop, RankLoop

_TIMEOUT_S = 180.0


_FAILURES = subprocess.SubprocessError, OSError, RuntimeError, ValueError


class TraceMLRuns:
    """Runs of loops under TraceML, which is installed in `folder`. Where that or a run fails, the
    verdict says so: our own cells do not depend on it."""

    def __init__(self, folder: Path) -> None:
        self._logs, self._missing = folder / "logs", ""
        try:
            self._python = peer_python(folder / "venv")
            install(self._python, PEER)
        except _FAILURES as error:
            self._missing = f"not installed: {error}"

    def verdict(self, loop: OrdinaryLoop) -> str:
        """Return the verdict on one run of a loop, with the ranks that it names as stragglers."""
        try:
            return self._missing or self._run(loop)
        except _FAILURES as error:
            return f"failed: {error}"

    def _run(self, loop: OrdinaryLoop) -> str:
        given = replace(loop, url="", recording=None)
        command = [
            str(self._python.with_name("traceml")), "run", "--mode", "summary", "--run-name",
            loop.job, "--logs-dir", str(self._logs), "--nproc-per-node", str(loop.ranks), __file__,
            "--args", json.dumps(to_json(given)),
        ]  # fmt: skip
        own = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
        done = subprocess.run(
            command, env=own, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        summary = self._logs / loop.job / "final_summary.json"
        if done.returncode or not summary.exists():
            raise RuntimeError((done.stderr.strip().splitlines() or ["TraceML failed"])[-1])
        return _verdict_in(json.loads(summary.read_text()))


def _verdict_in(summary: dict[str, Any]) -> str:
    issues = summary["step_time"]["issues"]
    named = [issue["ranks"] for issue in issues if "STRAGGLER" in issue["kind"]]
    ranks = sorted({rank for ranks in named for rank in ranks})
    status = str(summary["primary_diagnosis"]["status"])
    return f"{status} {' '.join(f'R{rank}' for rank in ranks)}".rstrip()


def main() -> None:
    """Train as one rank of the loop that is given as JSON."""
    import traceml_ai

    loop = from_json(OrdinaryLoop, json.loads(sys.argv[1]))
    traceml_ai.init(mode="auto")
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    own = RankLoop.join(int(os.environ["RANK"]), host, port, loop)
    steps = own.train()
    for _ in torch.utils.data.DataLoader(range(loop.steps)):  # type: ignore[arg-type]
        with traceml_ai.trace_step(own.target):
            next(steps)
    dist.barrier()


if __name__ == "__main__":
    main()
