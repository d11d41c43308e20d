"""The published quantities on small recordings, by their definitions."""

import dataclasses

import numpy as np
import pytest

from detector.whatif import OpKind, WhatIf
from detector.whatif.operations import COMPUTE, P2P, OpGrid, OpTable
from resihp.testing.synthetic_traces import Recipe, record


def whatif_of(ops):
    return WhatIf.of(OpGrid.of(ops))


def joined(*tables):
    return OpTable(
        **{
            field.name: np.concatenate([getattr(table, field.name) for table in tables])
            for field in dataclasses.fields(OpTable)
        }
    )


def test_of_one_replica_the_slowdown_is_that_of_the_job():
    whatif = whatif_of(record(Recipe(dp=1, pp=3, steps=5, work_spread=0.4)))
    assert whatif.slowdown_of(whatif.by_replica_s) == pytest.approx([whatif.slowdown])
    by_stage = whatif.slowdown_of(whatif.by_stage_s)
    assert whatif.by_worker[0] == pytest.approx(np.minimum(by_stage, whatif.slowdown))


@pytest.mark.parametrize("kind", [OpKind.GC, OpKind.OPTIMIZER, OpKind.CLIP, OpKind.NORM_REDUCE])
def test_what_follows_the_passes_may_come_in_several_parts(kind):
    """Two parts of 30 ms take as long as one of 60 ms."""
    ops = record(Recipe(dp=2, pp=2, steps=3, noise=0.0))
    at = ops.kind == kind
    half = 0.03

    def with_duration(seconds):
        return dataclasses.replace(ops, duration_s=np.where(at, seconds, ops.duration_s))

    one, two = with_duration(2 * half), with_duration(half)
    again = two.select(at)
    again = dataclasses.replace(again, seq=again.seq + 1, start_s=again.start_s + half)
    np.testing.assert_allclose(
        whatif_of(joined(two, again)).no_delay_s, whatif_of(one).no_delay_s, atol=1e-9
    )


def test_of_an_operation_that_two_ranks_recorded_the_longer_one_counts():
    ops = record(Recipe(dp=2, pp=2, steps=3))
    late = 0.5 * ops.duration_s  # later, with the same end
    mate = dataclasses.replace(ops, start_s=ops.start_s + late, duration_s=ops.duration_s - late)
    for both in (joined(ops, mate), joined(mate, ops)):
        np.testing.assert_array_equal(OpGrid.of(both).start_s, OpGrid.of(ops).start_s)
        np.testing.assert_array_equal(OpGrid.of(both).duration_s, OpGrid.of(ops).duration_s)


def test_a_send_that_outlasts_its_receive_slows_nobody():
    ops = record(Recipe(dp=2, pp=2, steps=3, noise=0.0))
    last = (ops.kind == OpKind.BACKWARD_SEND) & (
        ops.seq == ops.seq[ops.kind == OpKind.BACKWARD].max()
    )
    last &= (ops.dp == 0) & (ops.step == 1)
    whatif = whatif_of(ops)
    late = whatif_of(
        dataclasses.replace(ops, duration_s=np.where(last, ops.duration_s + 2.0, ops.duration_s))
    )
    for name in ("by_replica_s", "by_stage_s"):
        ours, its = (what.slowdown_of(getattr(what, name)) for what in (whatif, late))
        np.testing.assert_allclose(its, ours, atol=1e-9)


def without(ops, *kinds):
    return ops.select(~np.isin(ops.kind, kinds))


@pytest.mark.parametrize("kinds", [P2P, (OpKind.FORWARD_RECV, OpKind.BACKWARD_RECV)])
@pytest.mark.parametrize("chunks", [1, 2])
def test_without_receives_passes_wait_for_those_that_they_need(kinds, chunks):
    recipe = Recipe(dp=2, pp=4, steps=4, chunks=chunks, p2p_s=0.0, work_spread=0.3)
    whole = record(recipe)
    there, gone = whatif_of(whole), whatif_of(without(whole, *kinds))
    np.testing.assert_allclose(gone.no_delay_s, there.no_delay_s, rtol=1e-6)
    assert gone.slowdown == pytest.approx(there.slowdown, abs=1e-6)


def test_microbatches_that_contradict_the_times_bring_no_circle():
    ops = without(record(Recipe(dp=1, pp=3, steps=2)), *P2P)
    turned = np.where(ops.microbatch >= 0, 7 - ops.microbatch, -1)
    turned = np.where(ops.stage == 1, turned, ops.microbatch)
    assert whatif_of(dataclasses.replace(ops, microbatch=turned)).slowdown > 0


def counted(microbatches, steps, first, dp=2):
    """Steps of a job without noise that runs so many microbatches, numbered from `first`."""
    ops = record(Recipe(dp=dp, pp=3, microbatches=microbatches, steps=steps, noise=0.0))
    return dataclasses.replace(ops, step=ops.step + first)


def test_steps_of_fewer_microbatches_are_as_long_as_they_were():
    few, many = counted(5, 2, 0), counted(8, 2, 10)
    whatif = whatif_of(joined(few, many))
    whole = [whatif_of(part).no_delay_s for part in (few, many)]
    np.testing.assert_allclose(whatif.no_delay_s, np.concatenate(whole), rtol=1e-6)
    assert whatif.slowdown == pytest.approx(1.0, abs=1e-6)
    assert whatif.slowdown_of(whatif.by_replica_s) == pytest.approx([1.0, 1.0], abs=1e-6)


def test_a_replica_of_fewer_microbatches_waits_for_the_other_one():
    many = counted(8, 3, 0)
    beyond = (many.dp == 0) & np.isin(many.kind, (*COMPUTE, *P2P)) & (many.seq >= 5)
    whatif = whatif_of(many.select(~beyond))
    np.testing.assert_allclose(whatif.no_delay_s, whatif_of(many).no_delay_s, rtol=1e-6)
    assert whatif.slowdown == pytest.approx(1.0, abs=1e-6)


def test_where_nothing_but_rounding_is_lost_no_share_of_it_is_told():
    ops = record(Recipe(dp=3, pp=3, steps=3, noise=0.0))
    rounded = {name: getattr(ops, name).astype(np.float32) for name in ("start_s", "duration_s")}
    whatif = whatif_of(dataclasses.replace(ops, **rounded))
    assert (whatif.m_w, whatif.m_s) == (None, None)
    assert whatif.slowdown == pytest.approx(1.0, abs=1e-6)
