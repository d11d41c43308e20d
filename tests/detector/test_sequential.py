"""The sequential test keeps the rate of false alarms that it states."""

import doctest

import numpy as np
import pytest

from detector import arrays, persistence
from detector.evidence import sequential, status
from detector.evidence.sequential import DEGREES, EDetector


def alarms(noise: np.ndarray, level: float) -> int:
    """Times that any column's evidence passes `level`, starting again after each."""
    test, count = EDetector(noise.shape[1]), 0
    everyone, scale = np.ones(noise.shape[1], bool), np.full(noise.shape[1], 0.01)
    for row in noise:
        test.update(row, scale, everyone, 50.0)
        over = test.evidence() >= level
        count += int(over.sum())
        test.reset(over)
    return count


@pytest.mark.parametrize("draw", ["student", "normal"])
def test_the_mean_time_to_a_false_alarm_is_at_least_the_threshold(draw: str) -> None:
    rng = np.random.default_rng(0)
    shape = (400, 500)
    noise = rng.standard_t(DEGREES, shape) if draw == "student" else rng.standard_normal(shape)
    threshold = 2_000.0
    assert alarms(0.01 * noise, np.log(threshold)) <= noise.size / threshold


def test_a_lone_outlier_is_worth_less_than_a_name() -> None:
    series = np.zeros((20, 1))
    series[10] = 1.0
    assert alarms(series, np.log(3_000_000.0)) == 0


def test_a_lasting_shift_is_found_soon() -> None:
    noise = 0.01 * np.random.default_rng(1).standard_normal((12, 200))
    assert alarms(noise + 0.06, np.log(200_000.0)) >= 200


@pytest.mark.parametrize(
    "module",
    [arrays, persistence, sequential, status],
    ids=lambda m: m.__name__,
)
def test_examples_in_the_documentation_hold(module: object) -> None:
    import types

    assert isinstance(module, types.ModuleType)
    namespace = {**vars(module), "np": np}
    result = doctest.testmod(module, extraglobs=namespace)
    assert result.attempted > 0
    assert result.failed == 0
