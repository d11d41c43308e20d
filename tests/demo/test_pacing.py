"""The pace of the emulated devices follows the load of the machine, alike on all ranks."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from detector import Detector
from resihp.contracts import COLUMNS, Op, Status, TelemetryBatch
from resihp.demo.training.pacing import (
    CALIBRATION_STEPS,
    LIMIT,
    TARGET,
    LoadTable,
    MeasuredPacer,
)
from resihp.demo.training.settings import DemoSettings


def table(folder: Path, loads: list[float]) -> LoadTable:
    """A run of two ranks, of which rank 1 has these loads and rank 0 a small one."""
    loaded = LoadTable(folder / "loads", 2, len(loads))
    for step, load in enumerate(loads):
        loaded.write(step, 0, 0.05)
        loaded.write(step, 1, load)
    return loaded


def test_a_machine_that_computes_fast_enough_keeps_the_wanted_pace(tmp_path: Path) -> None:
    loaded = table(tmp_path, [5.0, 2.0, *[LIMIT] * (CALIBRATION_STEPS - 2)])
    assert loaded.calibrated(1e6) == 1e6


def test_a_slower_machine_gets_a_pace_that_it_can_hold(tmp_path: Path) -> None:
    loaded = table(tmp_path, [5.0, 2.0, *[1.6] * (CALIBRATION_STEPS - 2)])
    assert loaded.calibrated(1e6) == pytest.approx(1e6 * TARGET / 1.6)


def test_the_pace_of_a_run_holds_for_single_busy_steps(tmp_path: Path) -> None:
    loads = [2.0, 2.0, 0.3, 0.9, 0.3, 0.3, 0.9, 0.3, 0.3, 0.3]
    assert set(table(tmp_path, loads).paces(1e6)) == {1e6}


def test_the_pace_is_lowered_two_steps_after_two_busy_ones(tmp_path: Path) -> None:
    loads = [0.3, 0.3, 0.3, 0.8, 0.8, 0.8, 0.8, 0.3, 0.3, 0.3, 0.3]
    paces = list(table(tmp_path, loads).paces(1e6))
    assert paces == pytest.approx([1e6] * 6 + [0.5e6] * 5)


def test_a_lowered_pace_stays(tmp_path: Path) -> None:
    loads = [0.3, 0.3, 0.8, 0.8, *[0.1] * 20]
    paces = list(table(tmp_path, loads).paces(1e6))
    assert paces[5] == paces[-1] == pytest.approx(0.5e6)


def test_ranks_that_ask_at_different_times_get_the_same_paces(tmp_path: Path) -> None:
    loads = [0.3, 0.3, 0.8, 0.8, *[0.1] * 20]
    loaded = LoadTable(tmp_path / "loads", 2, len(loads))
    early, seen = loaded.paces(1e6), []
    for step, load in enumerate(loads):
        seen.append(next(early))
        loaded.write(step, 0, load)
    late = LoadTable(tmp_path / "loads", 2, len(loads)).paces(1e6)
    assert list(late) == seen


def test_the_load_is_that_of_the_whole_step_so_far(tmp_path: Path) -> None:
    pacer = MeasuredPacer(1e6, table=LoadTable(tmp_path / "loads", 1, 4), rank=0)
    pacer.hold(1e6, 0, spent_s=0.0015)  # half a millisecond late
    pacer.hold(1e6, 0, spent_s=0.0)
    assert pacer.flops_per_ms == 1e6
    assert pacer.table.highest(0) == pytest.approx(0.75)


def test_a_busy_machine_makes_no_device_slow(tmp_path: Path) -> None:
    def speed(step: int) -> float:
        return 0.5 if step else 1.0

    pacer = MeasuredPacer(1e6, speed, table=LoadTable(tmp_path / "loads", 1, 4), rank=0)
    taken = [pacer.hold(1e6, step, spent_s=spent) for step in (0, 1) for spent in (0.0, 0.1)]
    assert taken == pytest.approx([1e-3, 1e-3, 2e-3, 2e-3])


@pytest.mark.parametrize("change_at", [8, 18, 24, 34])
@pytest.mark.parametrize("change", [0.4, 2.0])
def test_a_pace_that_changes_for_all_ranks_names_no_other_rank(
    change_at: int, change: float
) -> None:
    settings = DemoSettings()
    detector, named = Detector(settings.job()), set()
    for step in range(44):
        pace = 1.3e6 * (change if step >= change_at else 1.0)
        for verdict in detector.update(_step(settings, step, pace)):
            if verdict.status is Status.FAIL_SLOW:
                named.add(verdict.rank)
    assert named == {settings.slow_rank}


def _step(settings: DemoSettings, step: int, pace: float) -> TelemetryBatch:
    """The records of all ranks in one step, with two percent of noise."""
    import random

    noise, model, data = random.Random(step), settings.model(), settings.data()
    whole = {p.key.split(".")[-1]: (0, p.size) for p in model.parameters.layers[0]}
    rows = []
    for dp, replica in enumerate(settings.layout.replicas):
        for microbatch in range(settings.microbatches // settings.dp):
            packed = data(step, dp * settings.microbatches // settings.dp + microbatch)
            flops = model.flops("layers.0", whole, packed)
            for stage in replica.stages:
                for rank in stage.ranks:
                    slow = rank == settings.slow_rank and step >= settings.slow_at
                    for op, passes in ((Op.FORWARD, 1), (Op.BACKWARD, 2)):
                        due = passes * flops * stage.layer_count / stage.tp / pace
                        rows.append(
                            {
                                "rank": rank,
                                "step": step,
                                "microbatch": microbatch,
                                "op": int(op),
                                "compute_ms": due
                                * (settings.slow_factor if slow else 1.0)
                                * noise.gauss(1.0, 0.02),
                                "tokens": packed.tokens.numel(),
                                "sequences": len(packed.seq_lens),
                                "sum_sq_len": packed.sum_sq_len,
                                "max_len": max(packed.seq_lens),
                            }
                        )
    columns = {
        name: [row.get(name, default) for row in rows] for name, (_, default) in COLUMNS.items()
    }
    return TelemetryBatch(**columns)


def test_paces_end_with_the_steps(tmp_path: Path) -> None:
    loaded = LoadTable(tmp_path / "loads", 2, 5)
    assert len(list(islice(loaded.paces(1.0), 9))) == 5
