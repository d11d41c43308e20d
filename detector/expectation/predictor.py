"""Expected compute time from the work in a record: arithmetic, corrected by gradient boosting.

`AnalyticCost` is a non-negative combination of what arithmetic counts (fixed part, FLOPs of
matrices, FLOPs of attention); it extrapolates. `Predictor` multiplies it by a correction that
LightGBM learns from the log of observed over analytic time. Trees do not extrapolate: outside the
lengths that it was trained on, the correction fades to none and the stated error grows.
`LearnedCorrection` trains it while a job runs.

The estimators follow scikit-learn's conventions: `__init__` only stores parameters, `fit` sets
attributes with a trailing underscore and returns the estimator, `predict` changes nothing.
"""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from resihp.contracts import ContractError

from ..arrays import Bools, Floats, Ints, distinct_rows, group_median, mad_sigma
from ..persistence import Persistent, State, pack, unpack
from ..settings import DetectorSettings
from .lightgbm_alone import lightgbm
from .regression import CellRegression

FEATURES = ("tokens", "sequences", "sum_sq_len", "max_len", "backward", "layers", "share", "head")
"""Columns of the feature matrix; `backward` and `head` are 0 or 1, `share` is a fraction."""

_BACKWARD = FEATURES.index("backward")
_MONOTONE = (0, -1, 0, 0, 0, 0, -1, 0)
"""Signs of the trees' dependence on their features: at equal tokens, shorter documents and thinner
shards do not use a device better."""
_FADE = 0.7
"""Distance (log) beyond the trained range at which a correction has faded to a third."""


def check_features(features: Floats) -> Floats:
    """The matrix as float64. Raises `ContractError` for a wrong shape, values not finite, and a
    direction other than 0 and 1."""
    matrix = np.asarray(features, np.float64)
    if matrix.ndim != 2 or matrix.shape[1] != len(FEATURES):
        raise ContractError("features", f"must have shape (records, {len(FEATURES)})")
    if not np.isfinite(matrix).all():
        raise ContractError("features", "must be finite")
    if not np.isin(matrix[:, _BACKWARD], (0, 1)).all():
        raise ContractError("features", "must have 0 or 1 as backward")
    return matrix


def check_targets(name: str, values: Floats, matrix: Floats) -> Floats:
    """The values to be learned of the records in a matrix as float64. Raises `ContractError` unless
    there is a finite one for each record, and a record."""
    values = np.asarray(values, np.float64)
    if values.shape != (matrix.shape[0],) or not values.size:
        raise ContractError(name, "must have one entry for each of at least one record")
    if not np.isfinite(values).all():
        raise ContractError(name, "must be finite")
    return values


def check_times(times: Floats, matrix: Floats) -> Floats:
    """The times of the records in a matrix as float64; see `check_targets`."""
    times = check_targets("times", times, matrix)
    if not (times > 0).all():
        raise ContractError("times", "must be above 0")
    return times


def check_fitted(estimator: object, attribute: str, problem: str = "is not fitted") -> None:
    """Raises `ContractError` for an estimator without an attribute that the fit sets."""
    if not hasattr(estimator, attribute):
        raise ContractError("predictor", problem)


class AnalyticCost:
    """`time = layers * (a + share * (b * tokens + c * sum_sq_len)) + head`, one fit for each op.

    ridge   weight of proportionality as prior, in equivalent records

    Attributes after `fit`: `coefficients_`, shape (2 ops, 3 terms).
    """

    def __init__(self, *, hidden: int = 4096, head_layers: float = 1.0, ridge: float = 1e-3):
        self.hidden, self.head_layers, self.ridge = hidden, head_layers, ridge

    def fit(self, features: Floats, times: Floats) -> Self:
        """Fits `times` (ms, shape (records,)) in relative error."""
        matrix = check_features(features)
        times = check_times(times, matrix)
        terms, op = self._terms(matrix), matrix[:, _BACKWARD].astype(np.int64)
        cells = CellRegression(
            2, np.array([0.0, 1.0, 1.0]), np.full(3, self.ridge), np.ones(3, bool), fade=1.0
        )
        cells.open(op, terms, times)
        weights = np.ones(times.size)
        for _ in range(3):
            cells.forget()
            cells.learn(op, terms, times, weights)
            residual = np.log(times / cells.times(op, terms))
            weights = (np.abs(residual) < 4.0 * max(mad_sigma(residual), 1e-4)).astype(np.float64)
        known = np.isfinite(cells.theta).all(axis=1)
        other = cells.theta[::-1]
        self.coefficients_ = np.where(known[:, None], cells.theta, other)
        return self

    def predict(self, features: Floats) -> Floats:
        """Expected times in ms."""
        check_fitted(self, "coefficients_")
        matrix = check_features(features)
        coefficients = self.coefficients_[matrix[:, _BACKWARD].astype(np.int64)]
        result: Floats = np.maximum((self._terms(matrix) * coefficients).sum(axis=1), 1e-9)
        return result

    def _terms(self, matrix: Floats) -> Floats:
        tokens, squares = matrix[:, 0], matrix[:, 2]
        layers, share, head = matrix[:, 5], matrix[:, 6], matrix[:, 7]
        linear = tokens * share * (layers + self.head_layers * head)
        return np.stack([layers, linear, squares * share * layers / (12.0 * self.hidden)], axis=1)


class Predictor:
    """`AnalyticCost` times a learned correction, with its own uncertainty.

    trees, leaves, learning_rate, min_leaf   of LightGBM; single-threaded and deterministic
    min_gain   least share of the held-out spread that the correction must remove to be used
    seed       of LightGBM

    Attributes after `fit`: `analytic_`, `booster_` (None where trees did not help), `low_` and
    `high_` (trained range of the tree features), `scale_` (robust standard deviation of the log
    residual on held-out records), `margin_` (its 95% conformal quantile), `gain_`.
    """

    def __init__(
        self,
        *,
        trees: int = 60,
        leaves: int = 12,
        learning_rate: float = 0.15,
        min_leaf: int = 60,
        min_gain: float = 0.03,
        seed: int = 0,
    ) -> None:
        self.trees, self.leaves, self.learning_rate = trees, leaves, learning_rate
        self.min_leaf, self.min_gain, self.seed = min_leaf, min_gain, seed

    def fit(self, features: Floats, times: Floats, devices: Ints | None = None) -> Self:
        """Learns from healthy records. `devices`, the device of each record, lets the fit remove
        each device's own level."""
        matrix = check_features(features)
        times = check_times(times, matrix)
        self.analytic_ = AnalyticCost().fit(matrix, times)
        return self.fit_correction(matrix, np.log(times / self.analytic_.predict(matrix)), devices)

    def fit_correction(self, features: Floats, ratio: Floats, devices: Ints | None = None) -> Self:
        """Learns only the correction; `ratio` is the log of observed over some analytic time."""
        matrix = check_features(features)
        ratio = check_targets("ratio", ratio, matrix)
        target = ratio if devices is None else _without_devices(ratio, devices, matrix)
        trees = _tree_features(matrix)
        self.low_, self.high_ = trees.min(axis=0), trees.max(axis=0)
        held = np.arange(target.size) % 5 == 4
        self.booster_ = None
        self.gain_, before = 0.0, mad_sigma(target[held], 0.0)
        clipped = np.clip(target, *np.quantile(target, [0.005, 0.995]))
        if target.size >= 10 * self.min_leaf and before > 0:
            self.booster_ = self._train(trees[~held], clipped[~held])
            after = mad_sigma(target[held] - self.correction(matrix[held]), 0.0)
            self.gain_ = 1.0 - after / before
            if self.gain_ < self.min_gain:
                self.booster_ = None
        left = np.abs(target - self.correction(matrix))[held]
        left = left if left.size else np.abs(target)
        self.scale_ = 1.4826 * float(np.median(left))
        self.margin_ = float(np.quantile(left, min(1.0, 0.95 * (1.0 + 1.0 / left.size))))
        return self

    def _train(self, trees: Floats, target: Floats) -> Any:
        parameters = {
            "objective": "regression",
            "num_leaves": self.leaves,
            "learning_rate": self.learning_rate,
            "min_data_in_leaf": self.min_leaf,
            "lambda_l2": 5.0,
            "max_bin": 127,
            "monotone_constraints": list(_MONOTONE),
            "seed": self.seed,
            "num_threads": 1,
            "deterministic": True,
            "force_row_wise": True,
            "verbosity": -1,
        }
        data = lightgbm().Dataset(trees, target)
        return lightgbm().train(parameters, data, num_boost_round=self.trees)

    def predict(self, features: Floats) -> Floats:
        """Expected times in ms, shape (records,). Raises `ContractError` after `fit_correction`, as
        that learns nothing of the analytic time."""
        check_fitted(self, "booster_")
        check_fitted(self, "analytic_", "has learned the correction of analytic times only")
        matrix = check_features(features)
        result: Floats = self.analytic_.predict(matrix) * np.exp(self.correction(matrix))
        return result

    def correction(self, features: Floats) -> Floats:
        """Log of the factor on the analytic time; fades to 0 outside the trained range."""
        check_fitted(self, "booster_")
        matrix = check_features(features)
        if self.booster_ is None or not matrix.size:
            return np.zeros(matrix.shape[0])
        trees = _tree_features(matrix)
        clipped = np.clip(trees, self.low_, self.high_)
        raw = np.asarray(self.booster_.predict(clipped, num_threads=1))
        return raw * np.exp(-((self.beyond(matrix) / _FADE) ** 2))

    def beyond(self, features: Floats) -> Floats:
        """Distance (log) of each record from the trained range; 0 inside."""
        check_fitted(self, "booster_")
        trees = _tree_features(check_features(features))
        over = np.maximum(trees - self.high_, self.low_ - trees)
        result: Floats = np.maximum(over, 0.0).max(axis=1)
        return result

    def error(self, features: Floats) -> Floats:
        """Standard deviation (log) of a single prediction: held-out scale, larger outside the
        range."""
        return np.hypot(self.scale_, 0.05 * self.beyond(features))

    def interval(self, features: Floats) -> tuple[Floats, Floats]:
        """95% conformal interval of a healthy record's time in ms, wider outside the trained
        range."""
        middle = self.predict(features)
        width = np.exp(self.margin_ + 0.1 * self.beyond(features))
        return middle / width, middle * width

    def to_bytes(self) -> bytes:
        """The fitted predictor, for the next job of the same model and device type."""
        check_fitted(self, "booster_")
        state = dict(vars(self))
        if self.booster_ is not None:
            state["booster_"] = self.booster_.model_to_string()
        if "analytic_" in state:
            state["analytic_"] = self.analytic_.coefficients_
        return pack(state)

    @classmethod
    def from_bytes(cls, data: bytes) -> Predictor:
        """The predictor that `to_bytes` wrote. Raises `ContractError` for anything else."""
        predictor, state = cls(), unpack(data)
        if not isinstance(state, dict) or not state.keys() >= _FITTED:
            raise ContractError("predictor", "is not a fitted predictor")
        state["booster_"] = _booster(state["booster_"])
        if "analytic_" in state:
            analytic = AnalyticCost()
            analytic.coefficients_, state["analytic_"] = state["analytic_"], analytic
        vars(predictor).update(state)
        return predictor


_FITTED = {"booster_", "low_", "high_", "gain_", "scale_", "margin_"}


def _booster(model: object) -> Any:
    """The trees of a saved predictor; None where it has none."""
    if model is None:
        return None
    try:
        return lightgbm().Booster(model_str=str(model))
    except lightgbm().basic.LightGBMError as error:
        raise ContractError("predictor", f"has trees that cannot be read: {error}") from None


def _without_devices(ratio: Floats, devices: Ints, matrix: Floats) -> Floats:
    """Ratios with every device's level replaced by that of all devices with the same layers."""
    _, device = np.unique(devices, return_inverse=True)
    _, part = np.unique(matrix[:, 5:], axis=0, return_inverse=True)
    part = part.reshape(-1)
    own = group_median(ratio, device, int(device.max()) + 1)[device]
    return ratio - own + group_median(ratio, part, int(part.max()) + 1)[part]


def _tree_features(matrix: Floats) -> Floats:
    """Features of the trees, shape (records, 8); in logs, so that a range has a scale-free
    width."""
    tokens = np.maximum(matrix[:, 0], 1.0)
    sequences = np.maximum(matrix[:, 1], 1.0)
    mean_square = np.maximum(matrix[:, 2], 1.0) / tokens
    longest = np.where(matrix[:, 3] > 0, matrix[:, 3], mean_square)
    columns = [np.log(tokens), np.log(tokens / sequences), np.log(mean_square), np.log(longest)]
    return np.stack(
        [
            *columns,
            matrix[:, 4],
            np.log(np.maximum(matrix[:, 5], 0.1)),
            np.log(matrix[:, 6]),
            matrix[:, 7],
        ],
        axis=1,
    )


_LEAST_ROWS, _MOST_ROWS = 2_000, 20_000
"""Records to train on."""
_ROUNDS = 3
"""Trainings of one job: after `train_after_steps`, and after four and sixteen times as many."""
_WORSE = 1.1
"""Spread with the correction over spread without, from which it no longer fits."""


class LearnedCorrection(Persistent):
    """Correction of analytic times that is trained while a job runs, at fixed points of the stream,
    on a bounded sample of healthy records; a replay learns the same.

    predictor   None before the first training
    misfit      whether the correction made records less regular than without it; it is then out of
                use until trained anew
    """

    _saved = ("misfit", "_rows", "_ratio", "_steps", "_trained", "_spreads")

    def __init__(self, settings: DetectorSettings, predictor: Predictor | None = None) -> None:
        if predictor is not None:
            check_fitted(predictor, "booster_")
        self._settings = settings
        self._use(predictor)
        self.misfit = False
        self._rows = np.empty((0, len(FEATURES)), np.float32)
        self._ratio = np.empty(0, np.float32)
        self._steps = 0
        self._trained = 0
        self._spreads = np.zeros(2)

    @property
    def active(self) -> bool:
        """True while the correction is in use."""
        predictor = self.predictor
        return predictor is not None and predictor.booster_ is not None and not self.misfit

    def of(self, features: Floats) -> tuple[Floats, Floats]:
        """Log correction and its standard error (log) for each record.

        The ranks of a tensor-parallel group do the same work, whose features are predicted once.
        """
        predictor = self.predictor
        if predictor is None or not self.active:
            return np.zeros(features.shape[0]), np.zeros(features.shape[0])
        rows, equal = distinct_rows(features)
        distinct = features[rows]
        return predictor.correction(distinct)[equal], 0.05 * predictor.beyond(distinct)[equal]

    def observe(self, features: Floats, plain: Floats, applied: Floats, usable: Bools) -> None:
        """Takes one step's records: features, log of observed over analytic time without the
        device's own level, the correction that was applied, and a mask of healthy records."""
        if self.active:
            seen = np.array([mad_sigma(plain - applied, 0.0), mad_sigma(plain, 0.0)])
            fresh = not self._spreads.any()
            self._spreads = seen if fresh else 0.8 * self._spreads + 0.2 * seen
            self.misfit = bool(self._spreads[0] > _WORSE * self._spreads[1])
        if not self._settings.train or self._trained >= _ROUNDS:
            return
        self._steps += 1
        limit = max(_MOST_ROWS // (4 * self._settings.train_after_steps), 64)
        rows = np.flatnonzero(usable)
        rows = rows[:: max(1, -(-rows.size // limit))]
        fresh_rows, fresh_ratio = features[rows].astype(np.float32), plain[rows].astype(np.float32)
        self._rows = np.concatenate([self._rows, fresh_rows])[-_MOST_ROWS:]
        self._ratio = np.concatenate([self._ratio, fresh_ratio])[-_MOST_ROWS:]
        due = self._settings.train_after_steps * 4**self._trained
        if self._steps >= due and self._ratio.size >= _LEAST_ROWS:
            self._train()

    def _train(self) -> None:
        predictor = Predictor(seed=self._settings.seed)
        rows, ratio = self._rows.astype(np.float64), self._ratio.astype(np.float64)
        self._use(predictor.fit_correction(rows, ratio))
        self._trained += 1
        if self._trained >= _ROUNDS:
            self._rows, self._ratio = self._rows[:0], self._ratio[:0]
        self.misfit = False
        self._spreads = np.zeros(2)

    def _use(self, predictor: Predictor | None) -> None:
        self.predictor = predictor
        self._fitted = None if predictor is None else predictor.to_bytes()

    def state(self) -> State:
        """The saved attributes, and the predictor in the form of `Predictor.to_bytes`."""
        return {**super().state(), "predictor": self._fitted}

    def load(self, state: State) -> None:
        """Restores what `state` returned."""
        super().load(state)
        fitted = state["predictor"]
        self._use(None if fitted is None else Predictor.from_bytes(fitted))
