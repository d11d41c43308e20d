"""The whole loop on real processes: hooks, sidecar, detector, scheduler, live resize, a death."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from resihp.contracts import Status
from resihp.demo.live.display import LiveDisplay
from resihp.demo.run import play
from resihp.demo.training.settings import DemoSettings
from resihp.demo.training.trace_log import write_recording
from resihp.offline import analyze, read_trace


@pytest.mark.timeout(900)
def test_slow_and_dead_ranks_are_survived_without_changing_the_training(tmp_path: Path) -> None:
    settings = DemoSettings(steps=26, microbatches=4, slow_at=10, dead_at=18, plan_wait_s=3.0)
    with (tmp_path / "screen.txt").open("w") as screen:
        display = LiveDisplay(settings.plan(), settings.steps, console=Console(file=screen))
        with display:
            record = play(settings, tmp_path, display)
    said = (tmp_path / "screen.txt").read_text()

    named = {s.verdict.rank for s in record.verdicts if s.verdict.status is Status.FAIL_SLOW}
    assert named == {settings.slow_rank}, said
    live = [switch for switch in record.switches if not switch.lost]
    assert live, said
    assert live[0].step > settings.slow_at
    after_death = [switch for switch in record.switches if switch.lost == (settings.dead_rank,)]
    assert len(after_death) == 1, said
    assert settings.dead_rank not in after_death[0].plan.layout.ranks
    assert record.steps[-1].step == settings.steps - 1
    job = settings.at(record.flops_per_ms).job()
    write_recording(tmp_path, job, record.plans, tmp_path / "trace.parquet")
    analysis = analyze(read_trace(tmp_path / "trace.parquet"))
    applied = [(plan.version, plan.from_step) for plan in analysis.trace.plans]
    assert applied == [(switch.plan.version, switch.step) for switch in record.switches], said
    assert len(analysis.trace.steps) == settings.steps
    assert named <= {
        change.verdict.rank
        for change in analysis.changes
        if change.verdict.status is Status.FAIL_SLOW
    }
    apart = [abs(seen.loss - record.reference[seen.step]) for seen in record.steps]
    assert max(apart) < 1e-3, said
