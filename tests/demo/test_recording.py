"""The demo's recording: what the ranks logged comes back as a trace, also of a killed rank."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from resihp.contracts import Op, Status
from resihp.demo.training.settings import DemoSettings
from resihp.demo.training.trace_log import log_record, write_recording
from resihp.offline import analyze, read_trace
from resihp.testing.scenarios import Fault, steps_of

SETTINGS = DemoSettings()
TIMES = ("compute_ms", "wait_ms")


def log_job(folder: Path, steps: int) -> int:
    """Logs a job of the demo's shape in which the demo's rank is slow; the number of records."""
    count = 0
    fault = Fault(rank=5, factor=1.5, from_step=10)
    lengths = np.arange(20, 200)
    with ExitStack() as stack:
        files = {
            rank: stack.enter_context((folder / f"records-{rank}.jsonl").open("a"))
            for rank in SETTINGS.layout.ranks
        }
        for batch in steps_of(SETTINGS.job(), lengths, steps=steps, seed=0, faults=[fault]):
            for rank, file in files.items():
                fields = {"op": Op.COLLECTIVE, "step": int(batch.step[0]), "compute_ms": 1.0}
                log_record(file, rank, 0, fields)
            for row in range(len(batch)):
                names = ("step", "microbatch", "tokens", "sum_sq_len")
                fields = {name: int(getattr(batch, name)[row]) for name in names}
                fields |= {"op": Op(int(batch.op[row]))}
                fields |= {name: float(getattr(batch, name)[row]) for name in TIMES}
                log_record(files[int(batch.rank[row])], int(batch.rank[row]), 0, fields)
            count += len(batch) + len(files)
    return count


def test_the_recording_tells_what_the_demo_saw(tmp_path: Path) -> None:
    count = log_job(tmp_path, steps=20)
    with (tmp_path / "records-2.jsonl").open("a") as killed:
        killed.write('{"op": 0, "step": 20, "comp')
    path = tmp_path / "trace.parquet"
    write_recording(tmp_path, SETTINGS.job(), [], path)
    trace = read_trace(path)
    assert sum(map(len, trace.batches())) == count
    assert trace.steps == tuple(range(20))
    slow = [v for v in analyze(trace).verdicts if v.status is Status.FAIL_SLOW]
    assert [verdict.rank for verdict in slow] == [5]
