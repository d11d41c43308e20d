"""Passes, groups and events that profiles hold, one part at a time."""

import io
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import Layout, Op
from resihp.offline.kineto import _event_stream
from resihp.offline.kineto._autograd import Window, autograd_passes
from resihp.offline.kineto._groups import layout_of_ranks
from resihp.offline.kineto._intervals import Intervals
from resihp.offline.kineto._passes import StepRange, find_passes
from resihp.offline.kineto._rank_profile import (
    Mark,
    OperatorKind,
    Operators,
    ProcessGroup,
    RankProfile,
    Shapes,
)
from resihp.offline.kineto._rank_records import RankRecords

NOTHING = np.empty(0)


def operators(*rows):
    """Of (start, stop, kind, sequence, backward); all in one thread, as on a CPU."""
    rows = sorted(rows, key=lambda row: (row[0], -row[1]))
    start, stop, kind, sequence, backward = (list(column) for column in zip(*rows, strict=True))
    return Operators(
        np.array(start, float),
        np.array(stop, float),
        np.zeros(len(rows), int),
        np.array(kind),
        np.array(sequence),
        np.array(backward, np.int8),
    )


def forward(start, first, count=2):
    """Operators of 8 with one inside that takes the number; another before that takes none."""
    rows = [(start - 5, start - 2, OperatorKind.COMPUTE, first, False)]
    for index in range(count):
        at = start + 10 * index
        rows += [(at, at + 8, OperatorKind.COMPUTE, first + index, False)]
        rows += [(at + 1, at + 7, OperatorKind.COMPUTE, first + index, False)]
    return rows


def backward(start, first, count=2):
    rows = []
    for index in range(count):
        at = start + 10 * index
        rows += [(at, at + 6, OperatorKind.ENGINE, first + count - 1 - index, True)]
        rows += [(at + 1, at + 5, OperatorKind.COMPUTE, first + count - 1 - index, True)]
        rows += [(at + 6, at + 9, OperatorKind.ENGINE, -1, False)]
    return rows


def test_passes_in_turn_are_matched_by_their_numbers():
    parts = [
        *forward(100, 0), *forward(200, 2), *backward(300, 0), *forward(400, 4),
        *backward(500, 2), *backward(520, 4),
    ]  # fmt: skip
    assert autograd_passes(operators(*parts)) == [
        (Window(100.0, 118.0, 0), [Window(300.0, 319.0, 0)]),
        (Window(200.0, 218.0, 0), [Window(500.0, 519.0, 0)]),
        (Window(400.0, 418.0, 0), [Window(520.0, 539.0, 0)]),
    ]


def test_recomputed_operators_belong_to_the_backward_pass():
    again = [(302, 303, OperatorKind.COMPUTE, 9, False), (303, 304, OperatorKind.ENGINE, 9, True)]
    found = autograd_passes(operators(*forward(100, 0), *backward(300, 0), *again))
    assert found == [(Window(100.0, 118.0, 0), [Window(300.0, 319.0, 0)])]


def test_a_forward_pass_before_the_recording_is_left_out():
    found = autograd_passes(operators(*backward(300, 0), *forward(400, 2), *backward(500, 2)))
    assert [first for first, _ in found] == [None, Window(400.0, 418.0, 0)]


ONE_STEP = (StepRange(0.0, 1000.0, 0),)


def passes_of(*marks, steps=ONE_STEP):
    none = Operators(*(NOTHING,) * 6), Shapes(*(NOTHING,) * 6), np.empty((3, 0))
    profile = RankProfile(0, 0.0, (), *none, (), tuple(sorted(Mark(*mark) for mark in marks)))
    found = find_passes(profile, steps)
    return found[0] if len(steps) == 1 else found


def test_the_outermost_range_counts_and_none_that_holds_both_kinds():
    found = passes_of(
        (0, 500, 0, "forward_backward"),
        (10, 90, 0, "forward mb 3"),
        (20, 40, 0, "encoder.forward"),
        (100, 300, 0, "backward mb 3"),
        (110, 120, 0, "FSDP::pre_backward (blocks.0)"),
    )
    assert [(one.op, one.microbatch, one.windows) for one in found] == [
        (Op.FORWARD, 0, (Window(10, 90, 0),)),
        (Op.BACKWARD, 0, (Window(100, 300, 0),)),
    ]


@given(
    st.lists(
        st.tuples(
            st.integers(0, 9), st.integers(1, 9), st.integers(0, 1), st.sampled_from(["F", "B"])
        ),
        max_size=9,
        unique_by=lambda one: (one[0], one[0] + one[1], one[2]),
    )
)
def test_the_passes_are_those_that_lie_in_no_other(ranges):
    words = {"F": "forward", "B": "backward"}
    marks = [(at, at + lasts, thread, words[op]) for at, lasts, thread, op in ranges]

    def holds(outer, inner):
        is_same = outer[2] == inner[2] and outer != inner
        return is_same and outer[0] <= inner[0] and inner[1] <= outer[1]

    pure = [m for m in marks if not any(holds(m, other) and m[3] != other[3] for other in marks)]
    whole = [m for m in pure if not any(holds(other, m) and m[3] == other[3] for other in pure)]
    if len({name for *_, name in whole}) < 2:
        whole = []
    found = [(one.windows[0], one.op.name.lower()) for one in passes_of(*marks)]
    assert sorted(
        (window.start_us, window.stop_us, window.thread, name)
        for window, name in found
        if window.thread >= 0
    ) == sorted(whole)


def test_a_range_for_every_layer_costs_no_more_than_the_ranges():
    count = 60_000  # all pairs of them would take an hour
    marks = [(2 * at, 2 * at + 1, 0, ("forward", "backward")[at % 2]) for at in range(count)]
    steps = (StepRange(0.0, 2.0 * count, 0),)
    assert len(passes_of(*marks, steps=steps)) == count


def test_microbatches_are_numbered_in_each_step():
    first, marks = 10**20, []
    for at in range(4):
        marks += [(100 * at, 100 * at + 40, 0, f"forward mb {first + at}")]
        marks += [(100 * at + 50, 100 * at + 90, 0, f"backward mb {first + at}")]
    steps = (StepRange(0.0, 200.0, 0), StepRange(200.0, 400.0, 1))
    numbers = [[one.microbatch for one in each] for each in passes_of(*marks, steps=steps)]
    assert numbers == [[0, 0, 1, 1]] * 2


def test_a_microbatch_that_was_not_recorded_keeps_its_number():
    marks = [
        (100 * at + start, 100 * at + stop, 0, f"{name} mb {number}")
        for at, number in enumerate([0, 1, 2, 0, 2])
        for start, stop, name in ((0, 40, "forward"), (50, 90, "backward"))
    ]
    steps = (StepRange(0.0, 300.0, 0), StepRange(300.0, 500.0, 1))
    numbers = [sorted({one.microbatch for one in each}) for each in passes_of(*marks, steps=steps)]
    assert numbers == [[0, 1, 2], [0, 2]]


def test_actions_of_a_schedule_are_passes_of_chunks():
    found = passes_of(
        (0, 10, 0, "PP:1F0"),
        (10, 20, 0, "PP:3F0"),
        (20, 25, 0, "PP:1SEND_F0"),
        (30, 40, 0, "PP:3I0"),
        (40, 50, 0, "PP:1B0"),
        (60, 70, 0, "PP:3W0"),
    )
    assert {(one.op, one.chunk, one.microbatch): one.windows for one in found} == {
        (Op.FORWARD, 0, 0): (Window(0, 10, 0),),
        (Op.FORWARD, 1, 0): (Window(10, 20, 0),),
        (Op.BACKWARD, 1, 0): (Window(30, 40, 0), Window(60, 70, 0)),
        (Op.BACKWARD, 0, 0): (Window(40, 50, 0),),
    }


def test_passes_within_an_optimizer_step_are_not_its_own():
    found = passes_of(
        (0, 100, 0, "Optimizer.step#AdamW.step"),
        (10, 40, 0, "forward"),
        (40, 80, 0, "backward"),
        (0, 110, 0, "optimizer_step of a trainer"),
    )
    (update,) = (one for one in found if one.op is Op.OPTIMIZER)
    assert update.windows == (Window(0, 10, 0), Window(80, 100, 0))


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        ([(0, 40, 0, "forward"), (40, 100, 0, "backward")], [Op.FORWARD, Op.BACKWARD]),
        ([(0, 1000, 0, "data loading")], [Op.DATA]),
    ],
)
def test_an_optimizer_step_or_a_step_without_time_of_its_own_is_left_out(marks, found):
    passes = passes_of(*marks, (60, 90, 0, "Optimizer.step#AdamW.step"))
    assert all(one.windows for one in passes)
    assert [one.op for one in passes if one.op is not Op.OPTIMIZER] == found


def grid(rank):
    """Groups of a rank of a job of two replicas, two stages and two-way tensor parallelism."""
    low, replica = rank % 2, rank // 2 % 2
    return [
        ProcessGroup("default_pg", tuple(range(8))),
        ProcessGroup("mesh_tp", (rank - low, rank - low + 1)),
        ProcessGroup("mesh_pp", (rank % 4, rank % 4 + 4)),
        ProcessGroup("mesh_dp", (rank - 2 * replica, rank - 2 * replica + 2)),
    ]


@pytest.mark.parametrize("missing", [(), (3,), (4, 5), (0, 1, 2, 4, 5, 6)])
def test_layout_follows_from_the_groups(missing):
    ranks = [
        RankRecords(rank, 0.0, tuple(grid(rank)), [], False, False, 0.0, [], [])
        for rank in range(8)
        if rank not in missing
    ]
    layout = layout_of_ranks(ranks, 1)
    whole = Layout.grid(dp=2, pp=2, tp=2, layers=2)
    known = {one.rank for one in ranks}
    expected = [replica for replica in whole.replicas if known & set(replica.ranks)]
    assert [[s.ranks for s in r.stages] for r in layout.replicas] == [
        [s.ranks for s in r.stages] for r in expected
    ]


@pytest.mark.parametrize("kinds", [("mesh_pp",), ("mesh_tp", "mesh_pp")])
def test_groups_without_a_recorded_rank_are_left_out(kinds):
    """A file may list the groups of the whole job."""
    listed = {group for rank in range(8) for group in grid(rank) if group.description in kinds}
    layout = layout_of_ranks([RankRecords(2, 0.0, tuple(listed), [], False, False, 0.0, [], [])], 1)
    (replica,) = layout.replicas
    tensor = [(2, 3), (6, 7)] if "mesh_tp" in kinds else [(2,), (6,)]
    assert [stage.ranks for stage in replica.stages] == tensor


class _Dripping(io.StringIO):
    """A file that gives a few characters at a time."""

    def read(self, size=-1):
        return super().read(3)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.lists(JSON, max_size=5), st.sampled_from([None, 2]))
def test_values_come_as_they_were_written(values, indent):
    text = _event_stream._JsonText(_Dripping(json.dumps([*values, 0], indent=indent)))
    assert text.take() == "["
    assert [text.value() for _ in values] == values
    assert (text.value(), text.take()) == (0, "]")


times = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8)


@given(times, st.integers(0, 50), st.integers(0, 20))
def test_intervals_measure_their_union(parts, start, length):
    starts = np.array([at for at, _ in parts], float)
    union = Intervals(starts, starts + np.array([lasts for _, lasts in parts], float))
    covered = {second for at, lasts in parts for second in range(at, at + lasts)}
    assert union.length == len(covered)
    inside = covered & set(range(start, start + length))
    assert union.within(float(start), float(start + length)) == len(inside)
    before, after = union.gap(np.array([start + 0.5]))
    if start in covered:
        assert np.isnan([before[0], after[0]]).all()
    else:
        assert before[0] <= start < after[0]
        assert not covered & set(range(int(max(before[0], 0)), int(min(after[0], 99))))
