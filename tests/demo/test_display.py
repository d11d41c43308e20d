"""The live display: what a person reads, on a terminal and elsewhere."""

from __future__ import annotations

import io
import re
import threading
from pathlib import Path

import pytest
from records import RESIZE_AT, SCRIPT, START, STEPS, demo_record, plain_record
from rich.console import Console

from resihp.contracts import Status
from resihp.demo.live.display import LiveDisplay
from resihp.demo.live.screen import apportion
from resihp.demo.record import Check, DemoRecord
from resihp.demo.summary import print_summary


def play(display: LiveDisplay, record: DemoRecord) -> None:
    """Tells the display the whole run, in the order in which it happened."""
    display.phase("Training")
    for seen in record.steps:
        if seen.step == SCRIPT["slow_at"]:
            display.fault("rank 5 now runs at 1/1.5 of its speed")
        if seen.step == SCRIPT["dead_at"]:
            display.dead(2)
        for switch in record.switches:
            if switch.step == seen.step:
                display.switch(switch)
        for verdict in record.verdicts:
            if verdict.at_step == seen.step:
                display.verdict(verdict)
        display.step(seen)
        display.health([health for health in record.health if health.step == seen.step])


def console(*, terminal: bool, width: int = 110, height: int = 40) -> Console:
    """A console that writes into memory."""
    return Console(
        file=io.StringIO(),
        force_terminal=terminal,
        width=width,
        height=height,
        legacy_windows=False,
        _environ={},
    )


def text(of: Console) -> str:
    """What a console was given, without its control sequences."""
    assert isinstance(of.file, io.StringIO)
    return re.sub(r"\x1b(\[[0-9;?]*[a-zA-Z]|\].*?\x1b\\)", "", of.file.getvalue())


def test_without_a_terminal_each_event_is_one_plain_line() -> None:
    target = console(terminal=False, width=60)
    with LiveDisplay(START, STEPS, console=target) as display:
        display.links("http://127.0.0.1:1/", "http://127.0.0.1:1/docs", "report.html")
        play(display, demo_record())
    lines = text(target).splitlines()
    assert all(line.startswith("[") for line in lines), "a long line was folded"
    whole = "\n".join(lines)
    assert "step 22: rank 5 now runs at 1/1.5 of its speed" in whole
    assert "step 27: rank 5 is slow, 1.49x its normal time, since step 22" in whole
    assert "step 29: plan 1 applied live before step 29: 41.7 ms pause" in whole
    assert "rank 2 is gone" in whole
    assert len(re.findall(r"step \d+/72: ", whole)) == STEPS // 10 + 2


def test_the_screen_shows_the_present_layout_and_who_is_slow() -> None:
    target = console(terminal=True)
    with LiveDisplay(START, STEPS, console=target) as display:
        play(display, demo_record())
    last = text(target)[-6000:]
    assert "Plan 2" in last
    assert "layers 2-7, TP 2:2" in last
    assert "5▲" in last
    assert "2✕" in last
    assert "72/72" in last


@pytest.mark.parametrize(("width", "height"), [(60, 20), (80, 24), (200, 60)])
def test_no_line_is_wider_than_the_terminal(width: int, height: int) -> None:
    target = console(terminal=True, width=width, height=height)
    display = LiveDisplay(START, STEPS, console=target)
    display.links("http://127.0.0.1:8700/", "http://127.0.0.1:8700/docs", "demo/report.html")
    play(display, demo_record())
    target.print(display.screen)
    assert max(len(line) for line in text(target).splitlines()) <= width


def test_the_screen_is_drawn_before_anything_is_known() -> None:
    target = console(terminal=True)
    target.print(LiveDisplay(START, STEPS, console=target).screen)
    assert "warming up" in text(target)


def test_events_from_several_threads_are_all_kept() -> None:
    display = LiveDisplay(START, STEPS, console=console(terminal=True))

    def write(name: str) -> None:
        for index in range(10):
            display.phase(f"{name}{index}")

    with display:
        threads = [threading.Thread(target=write, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    assert len(display.view.events) == 40


def test_step_time_after_a_switch_is_that_of_the_new_plan() -> None:
    record = demo_record()
    display = LiveDisplay(START, STEPS, console=console(terminal=False))
    for seen in record.steps[:RESIZE_AT]:
        display.step(seen)
    display.switch(record.switches[0])
    assert display.view.recent_ms() == record.steps[RESIZE_AT - 1].step_ms
    for seen in record.steps[RESIZE_AT : RESIZE_AT + 2]:
        display.step(seen)
    assert display.view.recent_ms() == record.steps[RESIZE_AT + 1].step_ms


def test_the_dead_stay_dead_whatever_is_measured_later() -> None:
    display = LiveDisplay(START, STEPS, console=console(terminal=False))
    play(display, demo_record())
    late = [health for health in demo_record().health if health.rank == 2][:1]
    display.health(late)
    assert display.view.devices[2].status is Status.FAIL_STOP


@pytest.mark.parametrize("total", [4, 12, 17])
@pytest.mark.parametrize("weights", [(1,), (3, 1), (1, 1, 1), (7, 1), (11, 1, 1)])
def test_widths_add_up(total: int, weights: tuple[int, ...]) -> None:
    parts = apportion(total, weights, least=3)
    assert sum(parts) == total
    assert min(parts) >= min(3, total // len(weights))


def test_the_summary_says_what_was_done_found_changed_and_gained() -> None:
    target = console(terminal=False, width=120)
    print_summary(demo_record(), Path("report.html"), target)
    whole = " ".join(text(target).split())
    assert "All that was promised happened" in whole
    assert "rank 5 slowed down to 1/1.5 of its speed from step 22 on" in whole
    assert "(said 5 steps after the fault)" in whole
    assert "ranks 4+5 (3:1) layers 5-7" in whole
    assert "✗" not in whole


def test_the_summary_of_a_failed_run_says_so() -> None:
    target = console(terminal=False, width=120)
    checks = (Check(name="the slow rank is named", passed=False, detail="nobody was"),)
    print_summary(demo_record(checks=checks, verdicts=()), None, target)
    assert "1 of 1 check failed" in text(target)
    assert "✗ the slow rank is named" in text(target)


def test_the_summary_of_a_run_that_never_began_does_not_fail() -> None:
    target = console(terminal=False, width=60)
    print_summary(plain_record(), None, target)
    assert "Nothing was checked" in text(target)
