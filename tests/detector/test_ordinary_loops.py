"""Telemetry of ordinary loops under `resihp.instrument`, recorded by `benchmarks.instrument`."""

from pathlib import Path

import pytest

from benchmarks._instrument_cells import LATE, Cell, cells, recorded_cells

FOLDER = Path(__file__).parent / "ordinary_loops"
RECORDED = [cell for cell in cells(quick=False) if list(FOLDER.glob(f"{cell.name}-*.parquet"))]


def test_there_are_recordings_of_many_kinds_of_loops() -> None:
    assert len({cell.kind for cell in RECORDED}) >= 6


@pytest.mark.parametrize("cell", RECORDED, ids=lambda cell: cell.name)
def test_the_slow_rank_is_named_in_time_and_nobody_else(cell: Cell) -> None:
    for _, runs in recorded_cells([cell], FOLDER):
        for run in runs:
            assert set(run.steps.named) == {run.slow} - {-1}
            assert all(step - cell.since < LATE for step in run.steps.named.values())
