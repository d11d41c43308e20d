"""The demo's recording: what the ranks logged comes back as a trace, also of a killed rank."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from resihp.contracts import Op, Status
from resihp.demo.training.settings import DemoSettings
from resihp.demo.training.trace_log import RecordLog, write_recording
from resihp.offline import analyze, read_trace
from resihp.testing.scenarios import Fault, steps_of

SETTINGS = DemoSettings()


def log_job(folder: Path, steps: int) -> list[dict[str, object]]:
    """Logs a job of the demo's shape in which the demo's rank is slow; what was handed through."""
    handed: list[dict[str, object]] = []
    files = {rank: RecordLog(folder, rank) for rank in SETTINGS.layout.ranks}
    logs = {
        rank: file.recorder(lambda **fields: handed.append(fields), lambda: 0)
        for rank, file in files.items()
    }
    fault = Fault(rank=5, factor=1.5, from_step=10)
    lengths = np.arange(20, 200)
    for batch in steps_of(SETTINGS.job(), lengths, steps=steps, seed=0, faults=[fault]):
        for log in logs.values():
            log(op=Op.COLLECTIVE, step=int(batch.step[0]), compute_ms=1.0)
        for row in range(len(batch)):
            logs[int(batch.rank[row])](
                op=Op(int(batch.op[row])),
                step=int(batch.step[row]),
                microbatch=int(batch.microbatch[row]),
                compute_ms=float(batch.compute_ms[row]),
                wait_ms=float(batch.wait_ms[row]),
                tokens=int(batch.tokens[row]),
                sum_sq_len=int(batch.sum_sq_len[row]),
            )
    for file in files.values():
        file.close()
    return handed


def test_the_recording_tells_what_the_demo_saw(tmp_path: Path) -> None:
    handed = log_job(tmp_path, steps=20)
    with (tmp_path / "records-2.jsonl").open("a") as killed:
        killed.write('{"op": 0, "step": 20, "comp')
    path = tmp_path / "trace.parquet"
    write_recording(tmp_path, SETTINGS.job(), [], path)
    trace = read_trace(path)
    assert sum(map(len, trace.batches())) == len(handed)
    assert trace.steps == tuple(range(20))
    slow = [v for v in analyze(trace).verdicts if v.status is Status.FAIL_SLOW]
    assert [verdict.rank for verdict in slow] == [5]
