"""When the copy begins beside a disk that writes straight from the tensors."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from resihp.checkpoint.staging.in_flight import NO_FENCE_EXPECTED, InFlightCheckpoint, Pace

COUNT = 100
NOW = 1000.0


def nap_s(pace: Pace, elapsed_s: float, safe: int) -> float:
    """Of a checkpoint of 100 chunks, that long after its start, with as many chunks safe."""
    progress = SimpleNamespace(safe=safe)
    checkpoint = SimpleNamespace(begun_s=NOW - elapsed_s, progress=progress, count=COUNT)
    return pace.nap_s(cast(InFlightCheckpoint, checkpoint))


@pytest.fixture(autouse=True)
def still(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(monotonic=lambda: NOW)
    monkeypatch.setattr("resihp.checkpoint.staging.in_flight.time", clock)


@pytest.mark.parametrize(("elapsed_s", "safe"), [(0.0, 0), (0.1, 12), (0.5, 60), (0.8, 97)])
def test_beside_a_disk_that_keeps_up_nothing_is_copied(elapsed_s: float, safe: int) -> None:
    assert nap_s(Pace(window_s=1.0, durable_s=0.8), elapsed_s, safe) > 0


def test_a_bad_start_is_no_reason_to_copy_yet() -> None:
    assert nap_s(Pace(window_s=1.0, durable_s=0.8), 0.3, 20) > 0


def test_what_the_disk_lacks_is_copied_just_before_the_fence() -> None:
    pace = Pace(window_s=1.0, durable_s=2.0)
    assert nap_s(pace, 0.5, 25) > 0
    assert nap_s(pace, 0.95, 48) == 0


def test_once_the_fence_is_overdue_the_rest_is_copied() -> None:
    assert nap_s(Pace(window_s=1.0, durable_s=0.8), 1.01, 95) == 0


def test_of_the_first_one_nothing_is_copied_before_the_fence() -> None:
    assert nap_s(NO_FENCE_EXPECTED, 0.0, 0) > 0
    assert nap_s(NO_FENCE_EXPECTED, 5.0, 20) > 0
