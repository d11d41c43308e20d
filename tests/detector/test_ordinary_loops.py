"""Telemetry of ordinary loops under `resihp.instrument`, recorded by `benchmarks.instrument`."""

from pathlib import Path

import pytest

from benchmarks._instrument_cells import LATE, Cell, cells, recorded_cells
from detector import Detector
from resihp.contracts import Cause
from resihp.offline._read import read_trace

QUIET, UNDER_LOAD = (
    Path(__file__).parent / name for name in ("ordinary_loops", "ordinary_loops_under_load")
)
"""The second beside two busy loops on the two cores of four ranks."""
RECORDED = [
    (cell, folder)
    for folder in (QUIET, UNDER_LOAD)
    for cell in cells(quick=False)
    if list(folder.glob(f"{cell.name}-*.parquet"))
]


@pytest.mark.parametrize("file", sorted(QUIET.iterdir()), ids=lambda file: file.stem)
def test_the_step_of_every_schedule_is_foretold_and_diagnosed(file: Path) -> None:
    """Of several model chunks with split backward passes too."""
    trace = read_trace(file)
    detector = Detector(trace.job)
    expected = list[float | None]()
    for batch in trace.batches():
        detector.update(batch)
        steps = sorted(set(batch.step.tolist()))
        expected += [detector.step_time(step, 100.0).expected_ms for step in steps]
    assert any(expected)
    diagnosis = detector.diagnosis()
    assert diagnosis.root_cause is Cause.DEVICE or "-1.5-" not in file.name
    assert diagnosis.steps > 0


def test_there_are_recordings_of_many_kinds_of_loops() -> None:
    assert len({cell.kind for cell, _ in RECORDED}) >= 6


@pytest.mark.parametrize(
    ("cell", "folder"), RECORDED, ids=lambda each: each.name.removeprefix("ordinary_loops")
)
def test_the_slow_rank_is_named_in_time_and_nobody_else(cell: Cell, folder: Path) -> None:
    for _, runs in recorded_cells([cell], folder):
        for run in runs:
            assert set(run.steps.named) == {run.slow} - {-1}
            assert all(step - cell.since < LATE for step in run.steps.named.values())
