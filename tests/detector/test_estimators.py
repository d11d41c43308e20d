"""One suite for every estimator of compute time."""

import numpy as np
import pytest

from detector import Detector, DetectorSettings
from detector.expectation.predictor import FEATURES, AnalyticCost, Predictor
from detector.persistence import pack, unpack
from resihp.contracts import ContractError, Job, Layout

ESTIMATORS = [AnalyticCost, Predictor]


def records(count: int, longest: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, true times in ms and devices of records with documents up to `longest`."""
    rng = np.random.default_rng(seed)
    mean = longest * rng.uniform(0.02, 0.5, count)
    tokens = np.full(count, 8192.0)
    spread = rng.uniform(1.0, 2.0, count)
    backward = rng.integers(0, 2, count)
    device = rng.integers(0, 8, count)
    columns = [
        tokens,
        np.maximum(tokens / mean, 1.0),
        tokens * mean * spread,
        np.minimum(mean * spread * 2, longest),
        backward,
        np.full(count, 16.0),
        np.full(count, 1.0),
        np.zeros(count),
    ]
    matrix = np.stack([column.astype(float) for column in columns], axis=1)
    attention = 6e-8 * matrix[:, 2] / (1.0 + 400.0 / mean)
    times = 16 * (2e-4 * tokens + attention + 0.02) * (1.0 + 1.1 * backward)
    slow = np.array([0.0, 0.01, -0.01, 0.3, 0.0, 0.005, -0.005, 0.0])[device]
    return matrix, times * np.exp(slow + rng.normal(0, 0.01, count)), device


def fitted(kind: type, longest: float = 4096.0) -> AnalyticCost | Predictor:
    matrix, times, device = records(6000, longest)
    healthy = device != 3
    estimator = kind()
    if isinstance(estimator, Predictor):
        return estimator.fit(matrix, times, device)
    return estimator.fit(matrix[healthy], times[healthy])


@pytest.mark.parametrize("kind", ESTIMATORS)
class TestEveryEstimator:
    def test_fit_returns_itself_and_sets_only_underscored_attributes(self, kind: type) -> None:
        before = dict(vars(kind()))
        estimator = fitted(kind)
        new = set(vars(estimator)) - set(before)
        assert new
        assert all(name.endswith("_") for name in new)
        assert {name: getattr(estimator, name) for name in before} == before

    def test_predictions_are_close_on_records_that_it_has_not_seen(self, kind: type) -> None:
        matrix, times, device = records(2000, 4096.0, seed=1)
        healthy = device != 3
        error = np.abs(fitted(kind).predict(matrix[healthy]) / times[healthy] - 1.0)
        assert np.median(error) < 0.025

    def test_documents_four_times_longer_are_no_surprise(self, kind: type) -> None:
        matrix, times, device = records(2000, 16384.0, seed=2)
        healthy = device != 3
        error = np.abs(fitted(kind).predict(matrix[healthy]) / times[healthy] - 1.0)
        assert np.quantile(error, 0.95) < 0.15

    def test_predicting_changes_nothing_and_fitting_is_deterministic(self, kind: type) -> None:
        matrix, _, _ = records(500, 4096.0, seed=3)
        estimator = fitted(kind)
        first = estimator.predict(matrix)
        assert np.array_equal(first, estimator.predict(matrix))
        assert np.array_equal(first, fitted(kind).predict(matrix))
        assert (first > 0).all()

    def test_scaling_the_times_scales_the_predictions(self, kind: type) -> None:
        matrix, times, _ = records(3000, 4096.0)
        one, ten = kind().fit(matrix, times), kind().fit(matrix, 10.0 * times)
        assert np.allclose(10.0 * one.predict(matrix), ten.predict(matrix), rtol=1e-6)

    def test_bad_input_is_refused_by_name(self, kind: type) -> None:
        matrix, times, _ = records(100, 4096.0)
        with pytest.raises(ContractError, match="features"):
            kind().fit(matrix[:, :3], times)
        with pytest.raises(ContractError, match="times"):
            kind().fit(matrix, -times)
        broken = matrix.copy()
        broken[0, 0] = np.nan
        with pytest.raises(ContractError, match="finite"):
            fitted(kind).predict(broken)
        for value in (-1, 2):
            broken = matrix.copy()
            broken[0, FEATURES.index("backward")] = value
            with pytest.raises(ContractError, match="backward"):
                kind().fit(broken, times)
        for value in (np.inf, np.nan, 0.0):
            with pytest.raises(ContractError, match="times"):
                kind().fit(matrix, [value, *times[1:]])

    def test_lists_are_as_good_as_arrays(self, kind: type) -> None:
        matrix, times, _ = records(100, 4096.0)
        from_lists = kind().fit(matrix.tolist(), times.tolist()).predict(matrix.tolist())
        assert np.array_equal(from_lists, kind().fit(matrix, times).predict(matrix))

    def test_of_no_records_nothing_is_predicted(self, kind: type) -> None:
        assert fitted(kind).predict(np.empty((0, len(FEATURES)))).shape == (0,)

    def test_nothing_is_predicted_before_the_fit(self, kind: type) -> None:
        with pytest.raises(ContractError, match="not fitted"):
            kind().predict(records(10, 4096.0)[0])


def test_the_correction_helps_inside_and_is_neutral_far_outside() -> None:
    predictor, analytic = fitted(Predictor), fitted(AnalyticCost)
    assert isinstance(predictor, Predictor)
    matrix, times, device = records(2000, 4096.0, seed=1)
    healthy = device != 3
    errors = [
        np.median(np.abs(model.predict(matrix[healthy]) / times[healthy] - 1.0))
        for model in (predictor, analytic)
    ]
    assert errors[0] < errors[1]
    far = matrix.copy()
    far[:, FEATURES.index("sum_sq_len")] *= 1000.0
    assert np.allclose(predictor.correction(far), 0.0, atol=1e-6)
    assert (predictor.error(far) > 2.0 * predictor.error(matrix)).all()


def test_uncertainty_of_no_records_is_empty() -> None:
    predictor, none = fitted(Predictor), np.empty((0, len(FEATURES)))
    assert isinstance(predictor, Predictor)
    assert predictor.booster_ is not None
    for found in (predictor.beyond(none), predictor.error(none), *predictor.interval(none)):
        assert found.shape == (0,)


def test_a_correction_is_learned_from_finite_ratios_only() -> None:
    matrix, times, _ = records(100, 4096.0)
    for ratio in (np.full(100, np.nan), np.zeros(5)):
        with pytest.raises(ContractError, match="ratio"):
            Predictor().fit_correction(matrix, ratio)
    with pytest.raises(ContractError, match="ratio"):
        Predictor().fit_correction(np.empty((0, len(FEATURES))), np.zeros(0))
    predictor = Predictor().fit_correction(matrix, np.log(times).tolist())
    with pytest.raises(ContractError, match="correction of analytic times only"):
        predictor.interval(matrix)


def test_a_predictor_that_is_not_fitted_serves_no_detector() -> None:
    job = Job(name="job", layout=Layout.grid(dp=2, pp=1, tp=1, layers=1), microbatches=2)
    with pytest.raises(ContractError, match="not fitted"):
        Detector(job, predictor=Predictor())
    with pytest.raises(ContractError, match="not fitted"):
        Predictor().to_bytes()


@pytest.mark.parametrize("trees", ["no trees", 3])
def test_bytes_without_readable_trees_are_no_predictor(trees: object) -> None:
    state = unpack(fitted(Predictor).to_bytes())
    for broken in ({**state, "booster_": trees}, {"booster_": None}, [1]):
        with pytest.raises(ContractError, match="predictor"):
            Predictor.from_bytes(pack(broken))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_slowdown", np.nan),
        ("min_slowdown", np.inf),
        ("min_slowdown", 1.0),
        ("min_slowdown", "1.1"),
        ("probation_probe_s", np.nan),
        ("probation_probe_s", -1.0),
        ("confirm_steps", 1.5),
        ("recover_steps", 0),
        ("probes_per_minute", np.nan),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, value: object) -> None:
    with pytest.raises(ContractError, match=name):
        DetectorSettings(**{name: value})


def test_what_a_slow_device_is_slower_by_is_not_learned() -> None:
    matrix, times, device = records(6000, 4096.0)
    slow = device == 3
    predictor = Predictor().fit(matrix, times, device)
    ratio = np.log(times / predictor.predict(matrix))
    assert np.median(ratio[slow]) - np.median(ratio[~slow]) == pytest.approx(0.3, abs=0.02)


def test_more_and_shorter_documents_never_make_the_correction_smaller() -> None:
    predictor = fitted(Predictor)
    assert isinstance(predictor, Predictor)
    matrix, _, _ = records(300, 4096.0, seed=4)
    at = FEATURES.index("sequences")
    more = matrix.copy()
    more[:, at] = np.minimum(matrix[:, at] * 1.5, matrix[:, at].max())
    assert (predictor.correction(more) >= predictor.correction(matrix) - 1e-9).all()


def test_a_stored_predictor_predicts_the_same() -> None:
    predictor = fitted(Predictor)
    assert isinstance(predictor, Predictor)
    matrix, _, _ = records(300, 8192.0, seed=5)
    again = Predictor.from_bytes(predictor.to_bytes())
    assert np.array_equal(again.predict(matrix), predictor.predict(matrix))
    assert all(
        np.array_equal(a, b)
        for a, b in zip(again.interval(matrix), predictor.interval(matrix), strict=True)
    )


def test_the_interval_holds_what_it_promises() -> None:
    predictor = fitted(Predictor)
    assert isinstance(predictor, Predictor)
    matrix, times, device = records(4000, 4096.0, seed=6)
    usual = ~np.isin(device, [3])
    low, high = predictor.interval(matrix[usual])
    inside = (low <= times[usual]) & (times[usual] <= high)
    assert 0.9 < inside.mean() <= 1.0
