"""Reading and writing recordings."""

import json
import os
import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resihp.contracts import Job, Layout, Op, Plan, Status, TelemetryBatch, TraceError
from resihp.offline import TraceWriter, analyze, read_trace, write_trace
from resihp.testing.scenarios import Fault, collectives, steps_of
from resihp.testing.synthetic_traces import Recipe, record, write_whatif

JOB = Job(name="small", layout=Layout.grid(dp=2, pp=2, tp=1, layers=2), microbatches=4)


PLANS = [Plan(version=version, layout=JOB.layout, quotas=(2, 2)) for version in (1, 2)]


def batch_of(step, version=0, ranks=4):
    return TelemetryBatch(
        rank=np.arange(ranks),
        step=np.full(ranks, step),
        microbatch=np.zeros(ranks, int),
        op=np.full(ranks, Op.FORWARD),
        compute_ms=1.0 + np.arange(ranks),
        tokens=np.full(ranks, 7),
        plan_version=version,
    )


@settings(deadline=None, max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=8))
def test_a_recording_comes_back_plan_by_plan_and_step_by_step(tmp_path_factory, keys):
    path = tmp_path_factory.mktemp("own") / "run.parquet"
    write_trace(path, JOB, [batch_of(step, version) for version, step in keys], PLANS)
    trace = read_trace(path)
    assert trace.format == "resihp-parquet"
    assert trace.job == JOB
    expected = [
        TelemetryBatch.concat([batch_of(step, version)] * keys.count((version, step)))
        for version, step in sorted(set(keys))
    ]
    assert [len(batch) for batch in trace.batches()] == [len(batch) for batch in expected]
    for batch, (version, step) in zip(trace.batches(), sorted(set(keys)), strict=True):
        assert set(batch.step) == {step}
        assert batch.plan_version == version
        assert np.isnan(batch.wait_ms).all()
        assert set(batch.tokens) == {7}


def test_plans_are_kept(tmp_path):
    path = tmp_path / "run.parquet"
    plan = Plan(version=1, layout=JOB.layout, quotas=(1, 3), from_step=2)
    with TraceWriter(path, JOB) as writer:
        writer.write(batch_of(0))
        writer.add_plan(plan)
        writer.write(batch_of(2, version=1))
    assert read_trace(path).plans == (plan,)


def test_the_frame_names_the_ops(tmp_path):
    path = tmp_path / "run.parquet"
    write_trace(path, JOB, [batch_of(3)])
    frame = read_trace(path).frame()
    assert frame["op"].tolist() == ["forward"] * 4
    assert frame["compute_ms"].tolist() == [1.0, 2.0, 3.0, 4.0]
    assert frame["tokens"].tolist() == [7] * 4
    assert frame["max_len"].isna().all()


def test_a_whatif_trace_becomes_records(slow_trace):
    trace = read_trace(slow_trace)
    assert trace.format == "whatif-parquet"
    assert trace.job.layout.dp == 6
    assert trace.job.layout.pp == 3
    assert trace.job.quotas == (4,) * 6
    assert trace.steps == tuple(range(24))
    batch = next(trace.batches())
    counts = {op: int((batch.op == op).sum()) for op in Op}
    assert counts[Op.FORWARD] == counts[Op.BACKWARD] == 18 * 4
    assert counts[Op.P2P] == 2 * 2 * 6 * 2 * 4
    assert counts[Op.OPTIMIZER] == counts[Op.DATA] == 18
    transfers = batch.select(batch.op == Op.P2P)
    # A transfer takes what the recipe says; all else is waiting.
    np.testing.assert_allclose(transfers.compute_ms, 0.5, rtol=0.1)
    assert (transfers.wait_ms >= 0).all()
    assert (np.abs(transfers.rank - transfers.peer) == 6).all()


def test_columns_that_can_be_inferred_may_be_missing(slow_trace, tmp_path):
    table = pq.read_table(slow_trace)
    path = tmp_path / "less.parquet"
    pq.write_table(table.drop_columns(["rank", "seq_id", "mc", "gmc", "mb_id"]), path)
    whole, less = read_trace(slow_trace), read_trace(path)
    assert less.job.layout == whole.job.layout
    compute = [(t.records["op"] <= Op.BACKWARD) for t in (whole, less)]
    for name in ("rank", "microbatch", "compute_ms"):
        ours, theirs = (t.records[name][c] for t, c in zip((less, whole), compute, strict=True))
        np.testing.assert_array_equal(np.sort(ours), np.sort(theirs))


@pytest.mark.parametrize(
    "cells",
    [
        pa.nulls,
        lambda size: pa.nulls(size, pa.int32()),
        lambda size: pa.nulls(size, pa.string()),
        lambda size: pa.array(np.full(size, np.nan)),
    ],
)
def test_columns_that_may_be_missing_may_be_empty(slow_trace, tmp_path, cells):
    table = pq.read_table(slow_trace)
    for name in ("rank", "seq_id", "mc", "gmc", "mb_id"):
        index = table.column_names.index(name)
        table = table.set_column(index, name, cells(len(table)))
    pq.write_table(table, tmp_path / "empty.parquet")
    pq.write_table(
        table.drop_columns(["rank", "seq_id", "mc", "gmc", "mb_id"]), tmp_path / "less.parquet"
    )
    empty, less = (read_trace(tmp_path / f"{name}.parquet") for name in ("empty", "less"))
    assert list(empty.batches()) == list(less.batches())


@pytest.mark.parametrize("lacking", [["mb_id"], ["mb_id", "seq_id"]])
def test_microbatches_of_several_chunks_are_counted_once(tmp_path, lacking):
    write_whatif(tmp_path / "all.parquet", record(Recipe(dp=2, pp=2, steps=2, chunks=2)))
    table = pq.read_table(tmp_path / "all.parquet")
    pq.write_table(table.drop_columns(lacking), tmp_path / "less.parquet")
    whole, less = (read_trace(tmp_path / f"{name}.parquet") for name in ("all", "less"))
    assert less.job.quotas == whole.job.quotas
    rows = whole.records["op"] <= Op.BACKWARD
    found = less.records["microbatch"][less.records["op"] <= Op.BACKWARD]
    np.testing.assert_array_equal(found, whole.records["microbatch"][rows])


def test_passes_of_ranks_in_one_place_are_counted_once(tmp_path):
    write_whatif(tmp_path / "one.parquet", record(Recipe(dp=2, pp=2, steps=2)))
    table = pq.read_table(tmp_path / "one.parquet")
    mate = pa.array(table.column("rank").to_numpy() + 4)
    mates = table.set_column(table.column_names.index("rank"), "rank", mate)
    both = pa.concat_tables([table, mates]).drop_columns(["seq_id", "mb_id"])
    pq.write_table(both, tmp_path / "both.parquet")
    one, two = (read_trace(tmp_path / f"{name}.parquet") for name in ("one", "both"))
    assert two.job.quotas == one.job.quotas


def test_a_folder_with_one_file_per_rank_is_one_trace(slow_trace, tmp_path):
    table = pq.read_table(slow_trace)
    ranks = table.column("rank").to_numpy()
    for rank in np.unique(ranks):
        pq.write_table(table.filter(pa.array(ranks == rank)), tmp_path / f"rank-{rank}.parquet")
    whole, parts = read_trace(slow_trace), read_trace(tmp_path)
    assert parts.ranks == whole.ranks
    for one, other in zip(whole.batches(), parts.batches(), strict=True):
        np.testing.assert_allclose(np.sort(one.compute_ms), np.sort(other.compute_ms))


def parts_of(trace, folder, **columns):
    """One file for each rank, of which those of odd ranks have other columns."""
    table = pq.read_table(trace)
    ranks = table.column("rank").to_numpy()
    for rank in np.unique(ranks).tolist():
        part = table.filter(pa.array(ranks == rank))
        for name, changed in columns.items() if rank % 2 else ():
            index = part.column_names.index(name)
            part = part.set_column(index, name, changed(part.column(name)))
        pq.write_table(part, folder / f"rank-{rank}.parquet")


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("dp_rank", lambda column: column.cast(pa.int64())),
        ("mb_id", lambda column: column.cast(pa.float64())),
        ("optype", lambda column: column.cast(pa.string()).dictionary_encode()),
        ("optype", lambda column: column.cast(pa.large_string())),
    ],
)
def test_the_files_of_a_folder_may_hold_a_column_in_different_types(
    slow_trace, tmp_path, name, changed
):
    parts_of(slow_trace, tmp_path, **{name: changed})
    whole, parts = read_trace(slow_trace), read_trace(tmp_path)
    assert parts.job.layout == whole.job.layout
    for one, other in zip(whole.batches(), parts.batches(), strict=True):
        np.testing.assert_allclose(np.sort(one.compute_ms), np.sort(other.compute_ms))


def test_types_of_a_column_that_do_not_go_together_are_refused(slow_trace, tmp_path):
    parts_of(slow_trace, tmp_path, step=lambda column: pa.array(["x"] * len(column)))
    with pytest.raises(TraceError, match="step: the files hold it as int64 and string"):
        read_trace(tmp_path)


@pytest.mark.parametrize("kind", ["whatif", "profiler"])
def test_the_folder_one_stands_in_gives_the_job_its_name(slow_trace, tmp_path, monkeypatch, kind):
    folder = tmp_path / "job\t1"
    folder.mkdir()
    if kind == "whatif":
        parts_of(slow_trace, folder)
    else:
        marks = [("ProfilerStep#0", 0, 9), ("forward", 0, 4), ("backward", 4, 4)]
        events = [
            {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur}
            for name, ts, dur in marks
            for cat in ("user_annotation", "cpu_op")
        ]
        (folder / "a.json").write_text(json.dumps({"traceEvents": events}))
    monkeypatch.chdir(folder)
    assert read_trace(".").job.name == read_trace(folder).job.name == "job-1"


def test_a_file_name_need_not_be_utf_8(slow_trace, tmp_path):
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.parquet")
    shutil.copy(slow_trace, path)
    assert read_trace(path).job.name == "-"


def test_facts_beside_a_trace_are_taken_up(tmp_path):
    write_whatif(tmp_path / "trace-X.parquet", record(Recipe(dp=2, pp=2, steps=2)))
    (tmp_path / "meta-X.yaml").write_text("trial_name: big job\ntp_size: 8  # one of 8 recorded\n")
    trace = read_trace(tmp_path / "trace-X.parquet")
    assert trace.job.name == "big job"
    assert trace.tp == 8


def test_a_file_of_other_facts_beside_a_trace_is_no_hindrance(tmp_path):
    write_whatif(tmp_path / "run.parquet", record(Recipe(dp=2, pp=2, steps=2)))
    (tmp_path / "meta.yaml").write_text("---\nnodes:\n  - n0\n  - n1\ntp_size: 2\n")
    assert read_trace(tmp_path / "run.parquet").tp == 2


def test_columns_with_empty_cells_may_have_become_decimals(slow_trace, tmp_path):
    table = pq.read_table(slow_trace)
    for name in ("mc", "gmc", "mb_id"):
        index = table.column_names.index(name)
        values = table.column(name).to_numpy().astype(float)
        column = pa.array(np.where(values < 0, np.nan, values), from_pandas=name != "mc")
        table = table.set_column(index, name, column)
    pq.write_table(table, tmp_path / "decimals.parquet")
    whole, decimals = read_trace(slow_trace), read_trace(tmp_path / "decimals.parquet")
    assert decimals.job.layout == whole.job.layout
    assert list(decimals.batches()) == list(whole.batches())


def broken(tmp_path, **changes):
    path = tmp_path / "broken.parquet"
    write_whatif(path, record(Recipe(dp=2, pp=2, steps=2, microbatches=2)))
    table = pq.read_table(path)
    for name, column in changes.items():
        index = table.column_names.index(name)
        table = (
            table.remove_column(index)
            if column is None
            else table.set_column(index, name, column(table))
        )
    pq.write_table(table, path)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"stage": None}, "lacks the columns stage"),
        ({"duration": lambda t: pa.array(np.full(len(t), -1.0))}, "duration: holds -1.0"),
        ({"duration": lambda t: pa.array(np.full(len(t), np.nan))}, "duration: holds a value"),
        ({"dp_rank": lambda t: pa.array(["x"] * len(t))}, "dp_rank: must hold whole numbers"),
        ({"mb_id": lambda t: pa.array(["x", None] * (len(t) // 2))}, "mb_id: .* not string"),
        ({"step": lambda t: pa.array([None] * len(t), pa.int64())}, "step: holds"),
        ({"optype": lambda t: pa.array(["?"] * len(t))}, "none of the known operations"),
        ({"rank": lambda t: pa.array(np.zeros(len(t), int))}, "stand in two places"),
    ],
)
def test_a_broken_column_is_named_in_one_line(tmp_path, changes, words):
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(broken(tmp_path, **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.parquet", b"not parquet", "not a readable parquet file"),
        ("a.json", b"{", "not readable JSON"),
        ("a.json", b"[]", "no timed events"),
        ("a.json", b'{"traceEvents": 3}', "not a profiler trace"),
        ("a.json.gz", b"plain", "not readable JSON"),
        ("a.json.gz", b"\x1f\x8b\x08\0" + b"\xff" * 50, "not readable JSON"),
        ("a.pt", b"\x80\x02\0", "is a binary file of an unknown format"),
        (
            "a.csv",
            b"rank,step\n0,1\n",
            "is a CSV file; accepted are parquet .* JSON .* folder",
        ),
        ("meta-a.yaml", b"job: a\n", "is a text file of an unknown format; accepted"),
        ("empty", b"", "is an empty file"),
    ],
)
def test_a_file_that_is_none_is_refused_in_one_line(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "spoilt",
    [lambda whole: b"", lambda whole: whole[:-4], lambda whole: bytes(100) + whole[100:]],
    ids=["empty", "cut", "overwritten"],
)
def test_of_the_files_of_a_folder_the_broken_one_is_named(slow_trace, tmp_path, spoilt):
    parts_of(slow_trace, tmp_path)
    broken = tmp_path / "rank-7.parquet"
    broken.write_bytes(spoilt(broken.read_bytes()))
    with pytest.raises(TraceError, match=r"rank-7\.parquet: is not a readable parquet file"):
        read_trace(tmp_path)


def test_a_name_that_says_nothing_is_no_hindrance(slow_trace, tmp_path):
    (tmp_path / "trace.pq").write_bytes(slow_trace.read_bytes())
    assert read_trace(tmp_path / "trace.pq").format == "whatif-parquet"
    (tmp_path / "trace").write_text("{}")
    with pytest.raises(TraceError, match="profiler"):
        read_trace(tmp_path / "trace")


def test_paths_without_a_trace_are_refused(tmp_path):
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "gone.parquet")
    with pytest.raises(TraceError, match="holds no"):
        read_trace(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    (tmp_path / "a.parquet").write_text("")
    with pytest.raises(TraceError, match="mixes"):
        read_trace(tmp_path)


def test_a_foreign_parquet_file_is_refused(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "a.parquet")
    with pytest.raises(TraceError, match="neither a ResiHP recording"):
        read_trace(tmp_path / "a.parquet")


def test_the_first_plan_that_was_recorded_may_be_any(tmp_path):
    job = Job(name="late", layout=Layout.grid(dp=4, pp=2, tp=1, layers=2), microbatches=16)
    steps = steps_of(job, [500], steps=16, seed=1, faults=[Fault(rank=3, factor=1.6, from_step=0)])
    late = [replace(step, plan_version=3) for step in steps]
    write_trace(tmp_path / "late.parquet", job, late)
    trace = read_trace(tmp_path / "late.parquet")
    assert {batch.plan_version for batch in trace.batches()} == {0}
    assert [v.rank for v in analyze(trace).verdicts if v.status is Status.FAIL_SLOW] == [3]


def test_a_later_plan_must_have_been_recorded(tmp_path):
    batches = [batch_of(0), batch_of(1, version=1), batch_of(2, version=2)]
    write_trace(tmp_path / "run.parquet", JOB, batches, PLANS[:1])
    with pytest.raises(TraceError, match="the plan of version 2 was not recorded"):
        read_trace(tmp_path / "run.parquet")


@pytest.mark.parametrize(
    ("column", "changed", "words"),
    [
        ("rank", lambda values: values.astype(np.int64) + 2**32, "rank: holds a value outside"),
        ("rank", lambda values: values + 0.5, "rank: must hold whole numbers"),
        ("op", lambda values: values.astype(np.int64) + 256, "op: holds a value outside"),
        ("plan_version", lambda values: values + 0.5, "plan_version: must hold whole numbers"),
        ("plan_version", lambda values: values - 1, "plan_version: holds a value below 0"),
        (
            "plan_version",
            lambda values: values.astype(np.uint64) + np.uint64(2**63),
            "plan_version: must hold whole numbers",
        ),
    ],
)
def test_a_number_that_its_column_cannot_hold_is_refused(tmp_path, column, changed, words):
    path = tmp_path / "run.parquet"
    write_trace(path, JOB, [batch_of(0)])
    table = pq.read_table(path)
    at, values = table.column_names.index(column), table.column(column).to_numpy()
    pq.write_table(table.set_column(at, column, pa.array(changed(values))), path)
    with pytest.raises(TraceError, match=words):
        read_trace(path)


def test_a_copy_of_a_file_in_its_folder_is_refused(tmp_path):
    write_trace(tmp_path / "a.parquet", JOB, [batch_of(0), batch_of(1)])
    write_trace(tmp_path / "b.parquet", JOB, [batch_of(2)])
    assert read_trace(tmp_path).steps == (0, 1, 2)
    write_trace(tmp_path / "copy.parquet", JOB, [batch_of(1)])
    with pytest.raises(TraceError, match="hold the same records, as of rank 0 in step 1"):
        read_trace(tmp_path)


def runs_of(*firsts, steps=10):
    """Batches of a job that was started at each of these steps, with all kinds of records."""
    for seed, first in enumerate(firsts):
        for batch in steps_of(JOB, [500], steps=steps, seed=seed, first_step=first):
            yield TelemetryBatch.concat([batch, collectives(JOB, batch, seed=seed)])


def by_rank(batches):
    """The same records rank by rank, as from one file for each."""
    whole = TelemetryBatch.concat(list(batches))
    return [whole.select(whole.rank == rank) for rank in np.unique(whole.rank).tolist()]


def sorted_times(batches):
    whole = TelemetryBatch.concat(list(batches))
    order = np.lexsort((whole.compute_ms, whole.op, whole.rank, whole.step))
    return whole.select(order)


@pytest.mark.parametrize("arrange", [list, by_rank])
@pytest.mark.parametrize(
    ("firsts", "last"),
    [
        ((0, 4), {0: range(4), 1: range(4, 14)}),
        ((0, 4, 2), {0: (0, 1), 1: (12, 13), 2: range(2, 12)}),
    ],
)
def test_of_a_step_that_was_redone_the_last_run_counts(tmp_path, arrange, firsts, last):
    """The runs are of ten steps; `last` has those that count, of each run."""
    write_trace(tmp_path / "run.parquet", JOB, arrange(runs_of(*firsts)))
    found = list(read_trace(tmp_path / "run.parquet").batches())
    runs = list(runs_of(*firsts))
    expected = [
        batch
        for run, steps in last.items()
        for batch in runs[10 * run : 10 * run + 10]
        if batch.step[0] in steps
    ]
    assert sorted_times(found) == sorted_times(expected)


def test_late_records_and_those_sent_twice_are_no_other_run(tmp_path):
    whole = list(runs_of(0))
    passes, late = (
        [batch.select(rows(batch.op)) for batch in whole]
        for rows in (lambda op: op <= Op.BACKWARD, lambda op: op > Op.BACKWARD)
    )
    half = [batch.select(batch.microbatch == 1) for batch in passes]
    early = [batch.select(batch.microbatch != 1) for batch in passes]
    given = [
        batch
        for at in range(10)
        for batch in (early[at], *((half[at - 1], late[at - 1]) if at else ()))
    ]
    again = early[3].select(early[3].op == Op.FORWARD)
    given = [*given, half[9], late[9], again]
    write_trace(tmp_path / "run.parquet", JOB, given)
    found = read_trace(tmp_path / "run.parquet").batches()
    assert sorted_times(found) == sorted_times([*whole, again])


def test_a_step_that_was_redone_after_late_records_loses_none_of_its_own(tmp_path):
    first, second = list(runs_of(0)), list(runs_of(0, 0))[10:]
    half = [batch.select(batch.microbatch == 1) for batch in second]
    early = [batch.select(batch.microbatch != 1) for batch in second]
    given = [*first, early[0], early[1], half[0], half[1], *second[2:]]
    write_trace(tmp_path / "run.parquet", JOB, given)
    assert sorted_times(read_trace(tmp_path / "run.parquet").batches()) == sorted_times(second)


def test_the_files_of_a_folder_are_of_one_job_and_their_plans_are_joined(tmp_path):
    write_trace(tmp_path / "a.parquet", JOB, [batch_of(0)])
    write_trace(tmp_path / "b.parquet", JOB, [batch_of(1, version=1)], PLANS[:1])
    write_trace(tmp_path / "c.parquet", JOB, [batch_of(2, version=2)], PLANS)
    assert read_trace(tmp_path).plans == tuple(PLANS)
    other = replace(PLANS[1], quotas=(1, 3))
    write_trace(tmp_path / "d.parquet", JOB, [batch_of(3, version=2)], [other])
    with pytest.raises(TraceError, match="different plans of the same version"):
        read_trace(tmp_path)
    write_trace(tmp_path / "d.parquet", replace(JOB, name="other"), [batch_of(0)])
    with pytest.raises(TraceError, match="not of the same job"):
        read_trace(tmp_path)


def test_ranks_of_no_layout_are_refused(tmp_path):
    write_trace(tmp_path / "run.parquet", JOB, [batch_of(0, ranks=5)])
    with pytest.raises(TraceError, match="rank: 4 is in no layout of the job"):
        read_trace(tmp_path / "run.parquet")


def test_metadata_that_is_nested_without_end_is_refused(tmp_path):
    path = tmp_path / "run.parquet"
    write_trace(path, JOB, [batch_of(0)])
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({b"resihp.job": b"[" * 100_000}), path)
    with pytest.raises(TraceError, match="recursion"):
        read_trace(path)
