"""Ranks compared with their peers: in the first steps of a job, and where all lie off zero."""

import numpy as np
import pytest

from detector import DetectorSettings
from detector.evidence.rank_tests import RankTests, StepEvidence
from detector.evidence.status import SUSPECT_AT
from detector.residuals import Misfit, StepResidual

RANKS, SLOW = 4, 1
EVERYONE = np.ones(RANKS, bool)
CALM = np.random.default_rng(0).normal(0.0, 0.01, (60, RANKS))
KNOWN = Misfit(np.zeros(RANKS), np.zeros(RANKS), np.zeros(RANKS, bool))


def four_ranks() -> RankTests:
    return RankTests(np.zeros(RANKS, np.int64), DetectorSettings())


def observe(tests: RankTests, value: np.ndarray, misfit: Misfit = KNOWN) -> StepEvidence:
    error, records = np.full(RANKS, 1e-3), np.full(RANKS, 2)
    residual = StepResidual(value.copy(), error, records, 1e-3, misfit=misfit)
    return tests.observe(tests.count, residual, EVERYONE, EVERYONE)


def slow(by: float, steps: int = 1) -> np.ndarray:
    """Residuals of a rank that is slow `by` so much (log)."""
    return np.tile(by * (np.arange(RANKS) == SLOW), (steps, 1))


@pytest.mark.parametrize("level", [-0.06, 0.0, 0.06])
def test_peers_that_all_lie_off_zero_do_not_hide_a_slow_one(level: float) -> None:
    """The level of a class is learned in a few noisy steps, with the slow ranks among them."""
    tests, named = four_ranks(), set[int]()
    for row in 4.0 * CALM + level + slow(0.12, len(CALM)):
        named |= set(np.flatnonzero(observe(tests, row).evidence >= tests.name_at).tolist())
    assert named == {SLOW}
    assert tests.slowest_healthy().max() < level + 0.1


def test_noise_of_the_first_step_does_not_hide_a_slow_rank_for_long() -> None:
    tests, values = four_ranks(), CALM[:8] + slow(0.06, 8)
    values[0] += np.array([0.1, 0.0, -0.1, -0.05])
    found = [observe(tests, row).evidence[SLOW] >= tests.name_at for row in values]
    assert not found[0]
    assert found[-1]


def test_a_rank_that_recovered_in_the_first_steps_is_not_blamed_for_them_again() -> None:
    tests = four_ranks()
    for row in CALM[:5] + slow(0.2, 5):
        now = observe(tests, row)
    assert now.evidence[SLOW] >= tests.name_at
    tests.clear(slow(1.0)[0] > 0)
    for row in CALM[5:8]:
        assert observe(tests, row).evidence[SLOW] < 0.5 * SUSPECT_AT


def test_a_probe_in_the_first_steps_counts_in_the_next_ones() -> None:
    asked, other = four_ranks(), four_ranks()
    for row in CALM[:3] + slow(0.05, 3):
        observe(asked, row)
        observe(other, row)
    asked.add(SLOW, 6.0)
    for row in CALM[3:5] + slow(0.05, 2):
        observe(asked, row)
        observe(other, row)
        gained = asked.peer_test.evidence() - other.peer_test.evidence()
        assert gained[SLOW] > 3.0


def test_work_unlike_any_before_is_still_excused_when_its_step_is_judged_again() -> None:
    tests = four_ranks()
    for row in CALM[:4]:
        observe(tests, row)
    strange = Misfit(slow(0.3)[0], slow(0.3)[0], np.zeros(RANKS, bool))
    for row in CALM[4:6] + slow(0.25, 2):
        observe(tests, row, strange)
    for row in CALM[6:8]:
        assert observe(tests, row).evidence[SLOW] < 0.5 * SUSPECT_AT


@pytest.mark.parametrize("classes", [[0, 0, 1, 1], [0, 0, 0, 0]])
def test_what_is_common_is_told_by_ranks_whose_work_is_as_before(classes: list[int]) -> None:
    tests = RankTests(np.array(classes), DetectorSettings())
    for row in CALM[:20]:
        observe(tests, row)
    quicker = np.array([True, False, True, False])
    strange = Misfit(0.2 * quicker, 0.2 * quicker, np.zeros(RANKS, bool))
    for row in CALM[20:30] - 0.1 * quicker:
        assert observe(tests, row, strange).excess[~quicker] == pytest.approx(0.0, abs=0.04)
