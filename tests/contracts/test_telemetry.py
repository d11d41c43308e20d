"""Batches as values: they do not change, and they come apart and together again."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from resihp.contracts import ContractError, Op, TelemetryBatch


def batch(steps, **more):
    size = len(steps)
    return TelemetryBatch(
        rank=[0] * size,
        step=steps,
        microbatch=range(size),
        op=[Op.FORWARD] * size,
        compute_ms=np.ones(size),
        **more,
    )


def test_columns_cannot_be_written_and_are_not_the_callers():
    steps = np.array([1, 2])
    made = batch(steps)
    steps[0] = 9
    assert made.step.tolist() == [1, 2]
    with pytest.raises(ValueError, match="read-only"):
        made.step[0] = 3


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda b: pickle.loads(pickle.dumps(b))]
)
def test_nor_can_those_of_a_copy(copied):
    made = batch([1, 2], dropped=3)
    other = copied(made)
    assert other == made
    assert not any(column.flags.writeable for column in other.columns().values())


@pytest.mark.parametrize(
    "given", [memoryview(np.array([1, 2])), np.frombuffer(bytearray(16), np.int64)]
)
def test_memory_that_can_change_is_copied_and_bytes_are_not(given):
    made = batch(given)
    np.asarray(given)[:] = 7
    assert 7 not in made.step
    constant = np.frombuffer(bytes(16), np.int64)
    assert np.shares_memory(batch(constant).step, constant)


def test_selecting_and_concatenating_undo_each_other():
    whole = batch([1, 2, 3, 4], plan_version=2)
    even = whole.step % 2 == 0
    parts = TelemetryBatch.concat([whole.select(even), whole.select(~even)])
    assert parts.select(np.argsort(parts.step)) == whole
    assert whole.select(slice(0, 0)) == TelemetryBatch.empty(plan_version=2)


def test_concatenation_sums_drops_and_keeps_plan_versions_apart():
    assert TelemetryBatch.concat([batch([1], dropped=2), batch([2], dropped=3)]).dropped == 5
    assert TelemetryBatch.concat([]) == TelemetryBatch.empty()
    with pytest.raises(ContractError) as caught:
        TelemetryBatch.concat([batch([1]), batch([2], plan_version=1)])
    assert caught.value.field == "plan_version"


def test_equality_sees_every_field():
    assert batch([1]) == batch([1])
    for other in (batch([2]), batch([1], dropped=1), batch([1], wait_ms=[0.0]), batch([1, 1])):
        assert batch([1]) != other
    assert batch([1]) != 1


@pytest.mark.parametrize("column", ["rank", "step"])
def test_rows_of_unlike_lengths_are_no_column(column):
    given = {key: [0, 0] for key in ("rank", "step", "microbatch", "op", "compute_ms")}
    with pytest.raises(ContractError, match=column):
        TelemetryBatch(**{**given, column: [[0], [1, 2]]})
