"""The published quantities on small recordings, by their definitions."""

import dataclasses

import numpy as np
import pytest

from detector.whatif import Kind, WhatIf
from detector.whatif.ops import OpTable, Recording
from resihp.offline.synthetic import Recipe, record


def whatif_of(ops):
    return WhatIf.of(Recording.of(ops))


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


@pytest.mark.parametrize("kind", [Kind.GC, Kind.OPTIMIZER, Kind.CLIP, Kind.NORM_REDUCE])
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
