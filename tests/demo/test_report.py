"""The report: one file, complete, and true to the record."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from records import RESIZE_AT, SCRIPT, demo_record, plain_record

from resihp.contracts import Status, Verdict
from resihp.demo.findings import (
    detections,
    headline,
    outcome,
    plan_periods,
    recovered_sentence,
    step_times,
    time_recovered,
)
from resihp.demo.record import Check, VerdictRecord
from resihp.demo.report import render_report, write_report
from resihp.demo.report.diagrams import diagrams
from resihp.demo.report.page import cards
from resihp.demo.report.plots import markers, slowdowns
from resihp.formatting import byte_size, duration, percent, rank_list

_VOID = {"meta", "link", "br", "img", "hr", "input", "use", "path", "circle"}


class Page(HTMLParser):
    """Collects what the tests look at; `open` ends empty where every tag is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attrs:
            if name == "id" and value:
                self.ids.append(value)
            if name in ("href", "src", "xlink:href") and value:
                self.links.append(value)
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in _VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in _VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def words(self) -> str:
        """The text of the page with single spaces."""
        return " ".join(" ".join(self.text).split())


@pytest.fixture(scope="module")
def html() -> str:
    """The report of the run in which all went well."""
    return render_report(demo_record())


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


def test_the_page_is_well_formed_and_needs_nothing_else(page: Page, html: str) -> None:
    assert page.open == []
    assert len(page.ids) == len(set(page.ids))
    assert "script" not in page.tags
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links)
    assert not re.search(r"@import|url\((?!#)", html)


def test_every_colour_of_the_plots_is_one_of_the_page(html: str) -> None:
    used, defined = set(re.findall(r"var\((--\w+)\)", html)), set(re.findall(r"(--\w+):", html))
    assert used <= defined
    plots = re.sub(r'"data:[^"]*"', "", html[html.index("<section") :])
    assert not re.findall(r"#[0-9a-f]{6}\b", plots), "a colour of one theme was left"


def test_light_and_dark_define_the_same_colours(html: str) -> None:
    light, dark = html.split("@media (prefers-color-scheme: dark)", 1)
    dark = dark[: dark.index("* {")]
    assert set(re.findall(r"(--\w+):", light)) == set(re.findall(r"(--\w+):", dark))


def test_the_page_tells_the_story(page: Page) -> None:
    words = page.words()
    assert "All that was promised happened" in words
    assert "Rank 5 was found to take 1.49x its normal time 5 steps after it slowed down." in words
    assert "computes 49.2% longer than expected" in words
    assert "replica 1 is the slower one now" in words
    assert "rank 2: dead" in words
    assert "layers 5-7 , was 4-7" in words
    for line in demo_record().emulated:
        assert line in words


def test_the_report_is_the_same_for_the_same_record(tmp_path: Path) -> None:
    first, second = tmp_path / "a" / "report.html", tmp_path / "b.html"
    write_report(demo_record(), first)
    write_report(demo_record(), second)
    assert first.read_bytes() == second.read_bytes()


def test_what_the_record_says_is_text_and_never_markup() -> None:
    check = Check(name="<b>bold</b>", passed=False, detail="<script>alert(1)</script>")
    page = Page(render_report(demo_record(checks=(check,), machine="<i>x</i>")))
    assert "script" not in page.tags
    assert "<script>alert(1)</script>" in page.words()


@pytest.mark.parametrize("lost", ["steps", "reference", "switches", "verdicts", "health"])
def test_a_run_that_lacks_a_part_is_still_reported(lost: str) -> None:
    assert Page(render_report(demo_record(**{lost: ()}))).open == []


def test_a_run_that_never_began_is_reported() -> None:
    page = Page(render_report(plain_record()))
    assert "Nothing happened in this run." in page.words()
    assert "No plan was applied." in page.words()


def test_a_verdict_on_another_rank_is_a_false_alarm() -> None:
    wrong = Verdict(rank=3, status=Status.FAIL_SLOW, slowdown=1.2, since_step=20)
    record = demo_record(verdicts=(VerdictRecord(at_step=23, verdict=wrong),))
    assert [item.delay_steps for item in detections(record)] == [None]
    assert "a false alarm" in headline(record)
    assert {card.name: card.figure for card in cards(record)}["False alarms"] == "1"
    assert "The slow rank was found" not in headline(record)


def test_a_firm_verdict_counts_once_and_from_its_first_time() -> None:
    record = demo_record()
    again = tuple(replace(seen, at_step=seen.at_step + 20) for seen in record.verdicts)
    assert [
        item.delay_steps for item in detections(replace(record, verdicts=record.verdicts + again))
    ] == [27 - SCRIPT["slow_at"]]


def test_every_failed_check_counts() -> None:
    bad = Check(name="x", passed=False, detail="")
    good = Check(name="y", passed=True, detail="")
    assert outcome(demo_record(checks=(bad, good))) == "1 of 2 checks failed"


def test_recovered_time_is_a_share_of_what_was_lost() -> None:
    recovered = time_recovered(demo_record())
    assert recovered is not None
    assert 0 < recovered < 1
    assert time_recovered(demo_record(switches=())) is None


def test_eras_follow_each_other_without_a_gap() -> None:
    every = plan_periods(demo_record())
    assert [period.plan.version for period in every] == [0, 1, 2]
    assert every[0].start == 0
    assert all(a.stop == b.start for a, b in pairwise(every))
    assert every[1].start == RESIZE_AT


def test_diagrams_mark_the_slow_the_dead_and_what_changed() -> None:
    start, resized, survived = diagrams(demo_record())
    assert all(box.status == "healthy" for row, _ in start.rows for st_ in row for box in st_.ranks)
    slow = [box for row, _ in resized.rows for st_ in row for box in st_.ranks if box.note]
    assert [(box.rank, box.share, box.of, box.note) for box in slow] == [(5, 1, 4, "1.49x")]
    assert [stage.was for stage in resized.rows[0][0]] == ["0-3", "4-7"]
    assert survived.absent == ((2, "dead"),)
    assert [quota for _, quota in survived.rows] == [5, 3]


def test_numbers_of_moments_do_not_stand_on_each_other() -> None:
    every = markers(demo_record())
    assert [marker.number for marker in every] == list(range(1, len(every) + 1))
    assert [marker.step for marker in every] == sorted(marker.step for marker in every)
    places = [marker.label_x for marker in every]
    gaps = [right - left for left, right in pairwise(places)]
    assert min(gaps) > 1.0


def test_nobody_is_said_to_be_dead_before_the_kill() -> None:
    record = demo_record()
    *others, dead = record.verdicts
    assert dead.verdict.status is Status.FAIL_STOP
    early = replace(dead, at_step=dead.verdict.since_step - 1)  # the step of the kill is under way
    told = markers(replace(record, verdicts=(*others, early)))
    kinds = [marker.kind for marker in told if marker.step == SCRIPT["dead_at"]]
    assert kinds[:2] == ["lost", "verdict"]


def test_the_heat_map_shows_the_last_known_slowdown_and_nothing_of_the_dead() -> None:
    ranks, slowdown = slowdowns(demo_record())
    assert ranks == list(range(8))
    assert np.isnan(slowdown[:, :8]).all()
    assert (slowdown[5, SCRIPT["slow_at"] :] > 1.3).all()
    assert np.isnan(slowdown[2, SCRIPT["dead_at"] :]).all()
    assert np.isfinite(slowdown[3, 8:]).all()


@settings(deadline=None, max_examples=60)
@given(st.floats(0.0, 1.0))
def test_only_certainty_is_shown_as_certain(share: float) -> None:
    assert (percent(share) == "100%") == (share == 1.0)


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (duration(None), "–"),
        (duration(4.171), "4.17 ms"),
        (duration(417.4), "417 ms"),
        (duration(1873.0), "1.87 s"),
        (duration(141_000.0), "2 min 21 s"),
        (byte_size(612), "612 B"),
        (byte_size(612_352), "598 KiB"),
        (byte_size(1_310_720), "1.25 MiB"),
        (rank_list([5]), "rank 5"),
        (rank_list([3, 1, 2]), "ranks 1, 2 and 3"),
    ],
)
def test_words(shown: str, expected: str) -> None:
    assert shown == expected


def test_a_layout_that_beats_the_healthy_one_brought_all_of_the_time_back() -> None:
    record = demo_record()
    faster = [
        replace(seen, step_ms=300.0) if seen.plan_version == 1 else seen for seen in record.steps
    ]
    fast = replace(record, steps=tuple(faster))
    assert time_recovered(fast) == 1.0
    assert recovered_sentence(fast) == "all of the time lost to the slow device came back"


def test_a_fault_that_costs_next_to_nothing_has_no_share_that_came_back() -> None:
    record = demo_record()
    flat = replace(record, steps=tuple(replace(seen, step_ms=400.0) for seen in record.steps))
    assert time_recovered(flat) is None
    assert "too little time" in recovered_sentence(flat)


def test_a_pace_that_changed_is_said_and_taken_out_of_the_step_times() -> None:
    record = demo_record(flops_per_ms=0.9e6, wanted_flops_per_ms=1.3e6)
    halved = tuple(
        replace(seen, step_ms=2 * seen.step_ms, pace=0.5) if seen.step >= 40 else seen
        for seen in record.steps
    )
    changed = replace(record, steps=halved)
    assert step_times(changed) == step_times(record)
    words = Page(render_report(changed)).words()
    assert "Devices paced to 0.9 GFLOP/s, not 1.3" in words
    assert "all devices alike paced to 0.45 GFLOP/s from step 40 on" in words
