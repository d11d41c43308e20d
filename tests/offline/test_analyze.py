"""`resihp analyze`: its JSON, its reports, its exit status."""

import gzip
import io
import json
import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from detector.diagnosis import costs_of
from resihp.cli import _analyze, _replay, _serve  # noqa: F401 - they register commands
from resihp.cli._app import app
from resihp.contracts import Cause, Job, Layout, Op, Plan, Replica, Schedule, Stage, Status
from resihp.offline import analyze, read_trace, write_perfetto, write_trace
from resihp.offline.plots import onset
from resihp.offline.report import html
from resihp.offline.summary import facts, headline
from resihp.offline.timeline import DeviceFactors, TraceTimeline
from resihp.testing.scenarios import Fault, steps_of

KEYS = [
    "trace",
    "format",
    "layout",
    "steps",
    "slowdown",
    "root_cause",
    "attribution",
    "devices",
]


def run(*arguments):
    return CliRunner().invoke(app, ["analyze", *map(str, arguments)])


def own_copy(slow_trace, tmp_path):
    trace = read_trace(slow_trace)
    path = tmp_path / "own.parquet"
    write_trace(path, trace.job, trace.batches())
    return path


def test_json_is_one_object_with_exactly_the_agreed_keys(slow_trace, tmp_path):
    for path in (slow_trace, own_copy(slow_trace, tmp_path)):
        result = run(path, "--json")
        assert result.exit_code == 0
        document = json.loads(result.stdout)
        assert list(document) == KEYS
        assert document["trace"] == str(path)
        assert document["layout"] == {"dp": 6, "pp": 3, "tp": 1}
        assert document["steps"] == 24
        assert document["root_cause"] == "device"
        assert set(document["attribution"]) == {c.value for c in Cause} - {"none"}
        assert min(document["attribution"].values()) >= 0
        assert sum(document["attribution"].values()) == pytest.approx(1.0, abs=1e-4)
        assert len(document["devices"]) == 18
        for rank, device in enumerate(document["devices"]):
            assert list(device) == ["rank", "dp", "pp", "verdict", "slowdown", "since_step"]
            assert (device["rank"], device["dp"], device["pp"]) == (rank, rank % 6, rank // 6)
            assert device["verdict"] in set(Status)


def test_the_slow_device_is_named_with_its_onset(slow_trace):
    devices = json.loads(run(slow_trace, "--json").stdout)["devices"]
    named = [device for device in devices if device["verdict"] == "fail_slow"]
    assert [device["rank"] for device in named] == [2 + 6 * 1]
    assert named[0]["slowdown"] == pytest.approx(1.5, abs=0.05)
    assert named[0]["since_step"] == pytest.approx(8, abs=2)


def test_people_read_the_cause_and_the_devices(slow_trace):
    result = run(slow_trace)
    assert result.exit_code == 0
    assert "a slow device" in " ".join(result.stdout.split())
    assert "device" in result.stdout
    assert "M_W" in result.stdout


def test_a_file_that_cannot_be_read_is_status_2_and_one_line(tmp_path):
    (tmp_path / "bad.parquet").write_text("no")
    for path in (tmp_path / "bad.parquet", tmp_path / "gone"):
        result = run(path, "--json")
        assert result.exit_code == 2
        assert not result.stdout
        assert len(result.stderr.strip().splitlines()) == 1
        assert str(path) in result.stderr


def test_the_report_needs_no_other_file(slow_trace, tmp_path):
    for path in (slow_trace, own_copy(slow_trace, tmp_path)):
        report = tmp_path / "report.html"
        assert run(path, "--html", report).exit_code == 0
        page = report.read_text()
        assert page.count("<svg") == (4 if path == slow_trace else 2)
        # Names of XML vocabularies are no links; nothing else may lead outside.
        assert not re.findall(r"(?:src|href)=\"(?!#|data:)", page)
        assert "url(http" not in page
        assert "<script" not in page


def test_the_report_is_the_same_each_time_and_escapes_names(slow_trace):
    import dataclasses

    trace = read_trace(slow_trace)
    hostile = dataclasses.replace(trace, job=dataclasses.replace(trace.job, name="<script>alert"))
    page = html(analyze(hostile))
    assert "<script" not in page
    assert page == html(analyze(hostile))


@pytest.mark.parametrize("name", ["timeline.json", "timeline.json.gz"])
def test_the_timeline_shows_what_was_and_what_would_have_been(slow_trace, tmp_path, name):
    for path in (slow_trace, own_copy(slow_trace, tmp_path)):
        out = tmp_path / name
        assert run(path, "--perfetto", out).exit_code == 0
        raw = out.read_bytes()
        document = json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
        events = document["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        names = {e["args"]["name"] for e in events if e["name"] == "process_name"}
        assert {"actual, replica 0", "ideal, replica 5"} <= names
        assert all(event["dur"] > 0 and event["ts"] >= 0 for event in spans)
        assert {event["args"]["step"] for event in spans} == set(range(24))
        ends = {}
        for event in spans:
            if event["args"]["step"] == 0:
                ideal = event["pid"] >= 1_000_000
                ends[ideal] = max(ends.get(ideal, 0), event["ts"] + event["dur"])
        assert ends.keys() == {True, False}


def test_a_clean_job_has_nothing_to_tell(tmp_path):
    from resihp.testing.synthetic_traces import Recipe, record, write_whatif

    path = tmp_path / "clean.parquet"
    write_whatif(path, record(Recipe(steps=12)))
    analysis = analyze(read_trace(path))
    assert analysis.diagnosis.root_cause is Cause.NONE
    assert {verdict.status for verdict in analysis.verdicts} == {Status.HEALTHY}
    assert "No cause" in headline(analysis)


def test_json_needs_no_plotting_no_frames_and_no_web(slow_trace):
    code = (
        "import sys; from resihp.offline import read_trace, analyze;"
        f"analyze(read_trace({str(slow_trace)!r})).to_json();"
        "heavy = {'pandas', 'matplotlib', 'jinja2', 'torch', 'lightgbm', 'rich', 'fastapi'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_group_is_shown_under_all_of_its_ranks_with_the_onset_of_the_slow_one(tmp_path):
    layout = Layout.grid(dp=2, pp=2, tp=2, layers=8)
    job = Job(name="groups", layout=layout, microbatches=16)
    fault = Fault(rank=5, factor=1.4, from_step=8)
    batches = steps_of(job, [500], steps=16, seed=3, faults=[fault])
    write_trace(tmp_path / "own.parquet", job, batches)
    analysis = analyze(read_trace(tmp_path / "own.parquet"))
    timeline = TraceTimeline(analysis)
    groups, factor = timeline.devices.groups, timeline.devices.factor
    assert groups == ((0, 1), (2, 3), (4, 5), (6, 7))
    row = groups.index(next(group for group in groups if 5 in group))
    assert factor[row, -1] == pytest.approx(1.4, abs=0.05)
    axes = onset(timeline).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        "0, 1",
        "2, 3",
        "4, 5",
        "6, 7",
    ]
    (line,) = axes.lines
    assert line.get_xydata().tolist() == [[7.5, row - 0.5], [7.5, row + 0.5]]


def test_a_device_that_became_healthy_again_is_marked_where_it_became_slow(tmp_path):
    job = Job(name="over", layout=Layout.grid(dp=3, pp=2, tp=1, layers=8), microbatches=12)
    fault = Fault(rank=5, factor=1.5, from_step=10, until_step=24)
    batches = steps_of(job, [500], steps=50, seed=3, faults=[fault])
    write_trace(tmp_path / "own.parquet", job, batches)
    analysis = analyze(read_trace(tmp_path / "own.parquet"))
    assert {verdict.status for verdict in analysis.verdicts} == {Status.HEALTHY}
    timeline = TraceTimeline(analysis)
    (line,) = onset(timeline).axes[0].lines
    row = timeline.devices.groups.index((5,))
    assert line.get_xydata().tolist() == [[9.5, row - 0.5], [9.5, row + 0.5]]


def test_the_ideal_timeline_of_few_devices_does_not_hold_the_slow_one(tmp_path):
    job = Job(name="one", layout=Layout.grid(dp=1, pp=1, tp=4, layers=8), microbatches=8)
    fault = Fault(rank=2, factor=1.5, from_step=0)
    batches = steps_of(job, [500], steps=16, seed=3, faults=[fault])
    write_trace(tmp_path / "own.parquet", job, batches)
    analysis = analyze(read_trace(tmp_path / "own.parquet"))
    ends = [
        float((spans.start_s + spans.duration_s).max())
        for spans in (TraceTimeline(analysis).actual(5), TraceTimeline(analysis).ideal(5))
    ]
    assert ends[0] / ends[1] == pytest.approx(analysis.diagnosis.slowdown, rel=0.05)


def test_the_ideal_timeline_of_unequal_replicas_is_no_longer_than_their_steps(tmp_path):
    wide = Replica((Stage((0, 1), (0, 4)), Stage((2, 3), (4, 8))))
    narrow = Replica((Stage((4,), (0, 4)), Stage((5,), (4, 8))))  # with half of the work
    job = Job(name="uneven", layout=Layout((wide, narrow)), microbatches=12, quotas=(8, 4))
    write_trace(tmp_path / "own.parquet", job, steps_of(job, [500], steps=16, seed=3))
    timeline = TraceTimeline(analyze(read_trace(tmp_path / "own.parquet")))
    for step in timeline.steps:
        recorded, ideal = timeline.actual(step), timeline.ideal(step)
        end = float((recorded.start_s + recorded.duration_s).max())
        assert 0.8 * end < float((ideal.start_s + ideal.duration_s).max()) < 1.05 * end


def test_places_are_those_of_the_last_layout_that_held_a_rank(tmp_path):
    first = Job(name="moved", layout=Layout.grid(dp=3, pp=2, tp=1, layers=4), microbatches=6)
    last = Layout(
        tuple(
            Replica((Stage((front,), (0, 2)), Stage((back,), (2, 4))))
            for front, back in ((5, 0), (1, 2))
        )
    )
    plan = Plan(version=1, layout=last, quotas=(3, 3), from_step=12)
    fault = Fault(rank=2, factor=1.6, from_step=5)
    lengths = np.arange(20, 200)
    path = tmp_path / "moved.parquet"
    write_trace(
        path,
        first,
        [
            *steps_of(first, lengths, steps=12, seed=0, faults=[fault]),
            *steps_of(
                replace(first, layout=last, quotas=(3, 3)),
                lengths,
                steps=12,
                seed=0,
                faults=[fault],
                first_step=12,
                plan_version=1,
            ),
        ],
        [plan],
    )
    document = json.loads(run(path, "--json").stdout)
    assert document["layout"] == {"dp": 2, "pp": 2, "tp": 1}
    places = {device["rank"]: (device["dp"], device["pp"]) for device in document["devices"]}
    left = {place.rank: (place.dp, place.pp) for place in first.layout.places()}
    assert places == {5: (0, 0), 0: (0, 1), 1: (1, 0), 2: (1, 1), 3: left[3], 4: left[4]}
    printed = " ".join(run(path).stdout.split())
    assert "2 replicas × 2 stages × TP 1 · 1 change of layout" in printed
    assert "rank 2 (replica 1, stage 1): fail_slow" in printed
    headline_place = re.search(r"[Rr]ank 2 \(replica (\d), stage (\d)", printed)
    assert headline_place is not None
    assert headline_place.groups() == ("1", "1")


def shrunk(tmp_path, *, faults, name="shrunk", from_step=10):
    """A recording of which the last replica, ranks 3 and 7, leaves after 10 of 20 steps. The others
    go on from `from_step`."""
    first = Job(name=name, layout=Layout.grid(dp=4, pp=2, tp=1, layers=8), microbatches=16)
    layout = Layout(first.layout.replicas[:3])
    plan = Plan(version=1, layout=layout, quotas=(6, 5, 5), from_step=from_step)
    last = replace(first, layout=plan.layout, quotas=plan.quotas)
    parts = ((first, {}), (last, {"first_step": from_step, "plan_version": 1}))
    batches = [
        batch
        for job, at in parts
        for batch in steps_of(job, [500], steps=10, seed=1, faults=faults, **at)
    ]
    write_trace(tmp_path / "shrunk.parquet", first, batches, [plan])
    return tmp_path / "shrunk.parquet"


def moved_at_the_end(*, ranks, op):
    """A recording of four ranks, of which rank 3 is slow, and of a second plan for some of them at
    its end, under which rank 0 recorded one operation."""
    job = Job(name="end", layout=Layout.grid(dp=2, pp=2, tp=1, layers=8), microbatches=8)
    stages = [Stage((rank,), share) for rank, share in zip(ranks, ((0, 4), (4, 8)), strict=True)]
    plan = Plan(version=1, layout=Layout((Replica(tuple(stages)),)), quotas=(8,), from_step=10)
    slow = Fault(rank=3, factor=1.6, from_step=0)
    batches = list(steps_of(job, [500], steps=10, seed=1, faults=[slow]))
    last = batches[-1].select(np.flatnonzero(batches[-1].rank == 0)[:1])
    columns = {"step": np.array([10]), "op": np.array([op]), "plan_version": 1}
    return job, [*batches, replace(last, **columns)], [plan]


@pytest.mark.parametrize(("ranks", "op"), [((0, 1), Op.DATA), ((3, 2), Op.FORWARD)])
def test_the_timeline_is_that_of_the_last_layout_that_ran_passes(tmp_path, ranks, op):
    path = tmp_path / "end.parquet"
    write_trace(path, *moved_at_the_end(ranks=ranks, op=op))
    analysis = analyze(read_trace(path))
    assert analysis.layout.dp == 1
    timeline = TraceTimeline(analysis)
    assert timeline.steps == tuple(range(10))
    assert timeline.devices.groups == ((0,), (1,), (2,), (3,))
    np.testing.assert_allclose(timeline.devices.factor[:, -1], [1.0, 1.0, 1.0, 1.6], atol=0.05)
    assert "Timeline</h2>" in html(analysis)


def test_a_recording_without_passes_has_no_timeline(tmp_path):
    job, (*_, last), plans = moved_at_the_end(ranks=(0, 1), op=Op.COLLECTIVE)
    path = tmp_path / "collectives.parquet"
    write_trace(path, job, [last], plans)
    analysis = analyze(read_trace(path))
    assert TraceTimeline(analysis).steps == ()
    assert "Timeline</h2>" not in html(analysis)
    write_perfetto(analysis, tmp_path / "timeline.json")
    assert json.loads((tmp_path / "timeline.json").read_text())["traceEvents"] == []


@pytest.mark.parametrize("from_step", [10, 2])
def test_a_slow_device_that_left_the_layout_is_in_the_diagnosis(tmp_path, from_step):
    slow = Fault(rank=7, factor=1.6, from_step=4)
    analysis = analyze(read_trace(shrunk(tmp_path, faults=[slow], from_step=from_step)))
    (named,) = (v.rank for v in analysis.verdicts if v.status is Status.FAIL_SLOW)
    assert named == 7
    said = [words for words in analysis.diagnosis.detail if "Rank 7 (replica 3, stage 1)" in words]
    assert said == [words for words in analysis.diagnosis.detail if "check the device" in words]
    assert said


@pytest.mark.parametrize("from_step", [10, 2])
def test_the_onset_is_shown_under_the_plan_of_its_step(tmp_path, from_step):
    """Also of a device that has left since, and in steps that were redone under the next plan."""
    slow = Fault(rank=7, factor=1.6, from_step=4)
    timeline = TraceTimeline(
        analyze(read_trace(shrunk(tmp_path, faults=[slow], from_step=from_step)))
    )
    devices = timeline.devices
    assert devices.steps == (*range(10), *range(from_step, from_step + 10))
    assert devices.replanned == (10,)
    assert devices.groups == tuple((rank,) for rank in range(8))
    expected = np.ones((8, 20))
    expected[7, 4:10] = 1.6
    expected[[3, 7], 10:] = np.nan
    np.testing.assert_allclose(devices.factor, expected, atol=0.05)
    axes = onset(timeline).axes[0]
    marks = [line.get_xydata().tolist() for line in axes.lines]
    assert [[3.5, 6.5], [3.5, 7.5]] in marks
    assert [x for (x, _), (end, _) in marks if x == end == 9.5] == [9.5]


def test_the_onset_of_a_step_that_was_redone_is_marked_where_it_was_slow(tmp_path):
    """Under the first plan all devices were healthy in that step."""
    job = Job(name="again", layout=Layout.grid(dp=3, pp=2, tp=1, layers=8), microbatches=12)
    plan = Plan(version=1, layout=job.layout, quotas=job.quotas, from_step=8)
    slow = Fault(rank=1, factor=1.5, from_step=12)
    batches = [
        *steps_of(job, [500], steps=20, seed=1),
        *steps_of(job, [500], steps=20, seed=2, faults=[slow], first_step=8, plan_version=1),
    ]
    write_trace(tmp_path / "again.parquet", job, batches, [plan])
    timeline = TraceTimeline(analyze(read_trace(tmp_path / "again.parquet")))
    row = timeline.devices.groups.index((1,))
    marks = [line.get_xydata().tolist() for line in onset(timeline).axes[0].lines]
    assert [[23.5, row - 0.5], [23.5, row + 0.5]] in marks
    assert timeline.devices.column(1, 12) == 24
    assert timeline.devices.column(1, 99) is None


def test_ranks_share_a_row_while_they_share_a_group():
    first = DeviceFactors(((0, 1), (2, 3)), (0, 1), np.array([[1.0, 2.0], [3.0, 4.0]]))
    then = DeviceFactors(((0, 1), (2,)), (2,), np.array([[5.0], [6.0]]))
    both = DeviceFactors.joined([first, then])
    assert both.groups == ((0, 1), (2,), (3,))
    np.testing.assert_equal(both.factor, [[1, 2, 5], [3, 4, 6], [3, 4, np.nan]])
    assert (both.steps, both.replanned) == ((0, 1, 2), (2,))
    alone = DeviceFactors.joined([first])
    assert (alone.groups, alone.replanned) == (first.groups, ())


def test_the_last_steps_are_judged_though_records_of_them_are_missing(tmp_path):
    path = ragged(tmp_path)
    assert [
        v.rank for v in analyze(read_trace(path)).verdicts if v.status is not Status.HEALTHY
    ] == [3]
    replayed = CliRunner().invoke(app, ["replay", str(path)]).stdout
    assert "step 8: rank 3 fail_slow" in replayed


def test_the_last_steps_before_a_plan_are_judged_though_records_of_them_are_missing(tmp_path):
    path = ragged(tmp_path, changes_plan=True)
    analysis = analyze(read_trace(path))
    assert [v.rank for v in analysis.verdicts if v.status is not Status.HEALTHY] == [3]
    assert [(change.step, change.verdict.rank) for change in analysis.changes] == [(8, 3)]
    assert not {3, 7} & set(analysis.layout.ranks)
    replayed = CliRunner().invoke(app, ["replay", str(path)]).stdout
    assert "step 8: rank 3 fail_slow" in replayed


def test_a_plan_in_the_same_layout_is_no_change_of_layout(tmp_path):
    job = Job(name="quotas", layout=Layout.grid(dp=2, pp=1, tp=1, layers=2), microbatches=8)
    plans = [Plan(version=1, layout=job.layout, quotas=(5, 3), from_step=4)]
    later = {"steps": 4, "seed": 1, "first_step": 4, "plan_version": 1}
    batches = [
        *steps_of(job, [500], steps=4, seed=1),
        *steps_of(replace(job, quotas=(5, 3)), [500], **later),
    ]
    write_trace(tmp_path / "quotas.parquet", job, batches, plans)
    found = facts(analyze(read_trace(tmp_path / "quotas.parquet")))
    assert found[1] == "1 change of quotas or schedule"
    assert not any("of layout" in fact for fact in found)


def test_a_stretch_within_a_later_one_is_told_once(tmp_path):
    job = Job(name="now and then", layout=Layout.grid(dp=4, pp=2, tp=1, layers=8), microbatches=16)
    now_and_then = Fault(rank=0, factor=1.5, from_step=0, period=3)
    lengths = np.arange(100, 900)
    batches = steps_of(job, lengths, steps=20, seed=1, faults=[now_and_then])
    write_trace(tmp_path / "slow.parquet", job, batches)
    analysis = analyze(read_trace(tmp_path / "slow.parquet"))
    assert [change.verdict.status for change in analysis.changes].count(Status.HEALTHY) == 1
    assert [device.rank for device in analysis.slow[0]] == [0]
    assert "Rank 0 (replica 0, stage 0) computes 1.5" in analysis.diagnosis.detail[0]


@pytest.mark.parametrize(
    ("schedule", "in_flight"),
    [(Schedule.ONE_F_ONE_B, ()), (Schedule.EAGER_1F1B, (7, 5, 3, 1))],
)
def test_steps_are_replayed_by_the_schedule_of_their_plan(tmp_path, schedule, in_flight):
    """A plan may choose another one, with forward passes that the job's own could not hold."""
    schedules = (Schedule.ZERO_BUBBLE, schedule)
    layout = Layout.grid(dp=2, pp=4, tp=1, layers=8)
    job = Job(
        name="schedules", layout=layout, microbatches=16, schedule=schedules[0], schedules=schedules
    )
    layout = Layout(tuple(replace(replica, in_flight=in_flight) for replica in layout.replicas))
    plan = Plan(version=1, layout=layout, quotas=(6, 10), schedule=schedule, from_step=6)
    last = replace(job, layout=layout, quotas=plan.quotas, schedule=schedule)
    parts = [
        list(steps_of(job, [500], steps=6, seed=1)),
        list(steps_of(last, [500], steps=6, seed=2, first_step=6, plan_version=1)),
    ]
    write_trace(tmp_path / "run.parquet", job, [*parts[0], *parts[1]], [plan])
    analysis = analyze(read_trace(tmp_path / "run.parquet"))
    own = [costs_of(job, job.layout, parts[0]), costs_of(last, layout, parts[1])]
    assert analysis.costs.step == pytest.approx(sum(costs.step for costs in own) / 2)
    timeline = TraceTimeline(analysis)
    ends = [
        float((spans.start_s + spans.duration_s).max()) * 1e3
        for spans in map(timeline.actual, timeline.steps)
    ]
    assert np.mean(ends) == pytest.approx(own[1].step)


def redone(tmp_path, *, heals):
    """An analysis of a job whose rank 3 is slow from step 16 of 20 on. Under a plan it goes back to
    step 8; there the rank is slow until it `heals`, and again from step 22 on."""
    job = Job(name="redone", layout=Layout.grid(dp=4, pp=2, tp=1, layers=8), microbatches=16)
    plan = Plan(version=1, layout=job.layout, quotas=job.quotas, from_step=8)
    before = [Fault(rank=3, factor=1.5, from_step=16)]
    after = [
        Fault(rank=3, factor=1.5, from_step=0, until_step=heals),
        Fault(rank=3, factor=2.0, from_step=22),
    ]
    batches = [
        *steps_of(job, [500], steps=20, seed=1, faults=before),
        *steps_of(job, [500], steps=20, seed=2, faults=after, first_step=8, plan_version=1),
    ]
    write_trace(tmp_path / "redone.parquet", job, batches, [plan])
    return analyze(read_trace(tmp_path / "redone.parquet"))


@pytest.mark.parametrize("heals", [8, 14])
def test_a_device_is_slow_in_the_steps_of_each_plan_in_which_it_was(tmp_path, heals):
    analysis = redone(tmp_path, heals=heals)
    slow = {v: [(one.since, one.until) for one in found] for v, found in analysis.slow.items()}
    under_the_plan = [(22, None), (8, 14)] if heals == 14 else [(22, None)]
    assert slow == {0: [(16, 20)], 1: under_the_plan}
    assert {round(one.factor, 1) for one in analysis.slow[0]} == {1.5}
    assert ("from step 8 to step 13" in analysis.diagnosis.detail[0]) == (heals == 14)


def ragged(tmp_path, *, changes_plan=False):
    """A recording with 3 and 4 microbatches by turns, in which rank 3 is slow in the last steps, or
    in the last ones before it leaves the layout."""
    job = Job(name="ragged", layout=Layout.grid(dp=4, pp=2, tp=1, layers=8), microbatches=16)
    slow = Fault(rank=3, factor=2.0, from_step=6)
    batches = [
        batch.select(batch.microbatch < 3 + batch.step % 2)
        for batch in steps_of(job, [500], steps=9, seed=1, faults=[slow])
    ]
    plans = []
    if changes_plan:
        layout = Layout(job.layout.replicas[:3])
        plans = [Plan(version=1, layout=layout, quotas=(6, 5, 5), from_step=9)]
        last = replace(job, layout=layout, quotas=plans[0].quotas)
        batches += steps_of(last, [500], steps=10, seed=1, first_step=9, plan_version=1)
    write_trace(tmp_path / "ragged.parquet", job, batches, plans)
    return tmp_path / "ragged.parquet"


def test_a_name_in_brackets_is_printed_as_it_is(tmp_path):
    path = shrunk(tmp_path, faults=[], name="run[v2] [red]x")
    assert run(path).stdout.startswith("run[v2] [red]x  3 replicas")
    shown = io.StringIO()
    console = Console(file=shown, force_terminal=True, color_system=None, width=200)
    assert len(list(_replay._paced(read_trace(path), console, 0.0))) == 20
    assert "run[v2] [red]x" in shown.getvalue()


def test_a_rank_whose_records_end_early_is_not_called_healthy(tmp_path):
    path = shrunk(tmp_path, faults=[])
    replayed = CliRunner().invoke(app, ["replay", str(path)]).stdout
    ended = "20 steps replayed: ranks 3 and 7 have no records after step 9; 6 ranks healthy"
    assert replayed.strip().splitlines()[-1] == ended
    words = "ranks 3 and 7 have no records after step 9"
    assert f"8 recorded devices: {words}; the others are healthy." in run(path).stdout
    document = json.loads(run(path, "--json").stdout)
    assert document["ended"] == [{"rank": 3, "last_step": 9}, {"rank": 7, "last_step": 9}]
    slow = shrunk(tmp_path, faults=[Fault(rank=2, factor=1.5, from_step=4)])
    assert f"1 of 8 recorded devices is not healthy; {words}." in run(slow).stdout


def test_the_version_is_printed():
    import resihp

    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"resihp {resihp.__version__}\n"
