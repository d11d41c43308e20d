"""What the detector costs: the predictor's error and time, and records per second."""

from __future__ import annotations

import time

import numpy as np

from benchmarks._detector_cases import MODEL, job_of, text_lengths
from detector import Detector, DetectorSettings
from detector.expectation.length_model import features_of
from detector.expectation.predictor import AnalyticCost, Predictor
from detector.rank_table import RankTable
from resihp.contracts import Job, Layout, TelemetryBatch
from resihp.testing.scenarios import Noise, steps_of

ERRORS = ("predictor", "median", "95%", "beyond: median", "95% ", "training", "µs a record")
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]


def rows_of(longest: int, steps: int, seed: int, shortest: int = 8) -> Rows:
    """Features, times and devices of generated healthy records, documents cut at `longest`."""
    job = job_of(8, 2, 1, budget=16384)
    lengths = np.clip(text_lengths(), shortest, longest)
    places = RankTable.of(job.layout)
    features, times, devices = [], [], []
    for batch in steps_of(job, lengths, steps=steps, seed=seed, noise=Noise()):
        index = places.index(batch.rank.astype(np.int64))
        features.append(features_of(places, batch, index))
        times.append(batch.compute_ms)
        devices.append(index)
    return np.concatenate(features), np.concatenate(times), np.concatenate(devices)


class TreesAlone:
    """LightGBM on the log of the time, without arithmetic under it: what a tree model would do."""

    def fit(self, features: np.ndarray, times: np.ndarray) -> TreesAlone:
        """Learns the log of the time."""
        import lightgbm

        options = {"num_leaves": 31, "num_threads": 1, "verbosity": -1, "deterministic": True}
        data = lightgbm.Dataset(features, np.log(times), params={"verbosity": -1})
        self.booster_ = lightgbm.train(options, data, num_boost_round=100)
        return self

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Times in ms."""
        times: np.ndarray = np.exp(np.asarray(self.booster_.predict(features)))
        return times


class ScikitTrees:
    """The gradient boosting of scikit-learn on the log of the time."""

    def fit(self, features: np.ndarray, times: np.ndarray) -> ScikitTrees:
        """Learns the log of the time."""
        from sklearn.ensemble import HistGradientBoostingRegressor
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1):
            self.trees_ = HistGradientBoostingRegressor(random_state=0).fit(features, np.log(times))
        return self

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Times in ms."""
        from threadpoolctl import threadpool_limits

        with threadpool_limits(1):
            times: np.ndarray = np.exp(self.trees_.predict(features))
        return times


def predictor_rows(train_steps: int = 75) -> list[list[str]]:
    """Error of each model within the trained lengths and beyond (four times longer)."""
    # A job's documents are new: other seeds, other packings.
    within, beyond = rows_of(4096, 10, seed=2), rows_of(16384, 10, seed=2, shortest=8192)
    return error_rows(rows_of(4096, train_steps, seed=1), within, beyond)


def error_rows(learned: Rows, within: Rows, beyond: Rows) -> list[list[str]]:
    """Every model's error on records like those it learned from, and on longer documents."""
    features, times, devices = learned
    result = []
    for name, model in (
        ("analytic cost", AnalyticCost()),
        ("LightGBM alone", TreesAlone()),
        ("scikit-learn alone", ScikitTrees()),
        ("predictor (both)", Predictor()),
    ):
        start = time.perf_counter()
        if isinstance(model, Predictor):
            model.fit(features, times, devices)
        else:
            model.fit(features, times)
        trained = time.perf_counter() - start
        cells = [name]
        for rows in (within, beyond):
            error = np.abs(model.predict(rows[0]) / rows[1] - 1.0)
            cells += [f"{np.median(error):.2%}", f"{np.quantile(error, 0.95):.2%}"]
        start = time.perf_counter()
        model.predict(features)
        cost = (time.perf_counter() - start) / len(features) * 1e6
        result.append([*cells, f"{trained:.2f} s", f"{cost:.2f}"])
    return result


def large_step(job: Job, step: int, *, with_lengths: bool) -> TelemetryBatch:
    """One step of a large job: 32 microbatches, forward and backward, on every rank."""
    rng = np.random.default_rng(step)
    places = RankTable.of(job.layout)
    axes = np.meshgrid(np.arange(places.size), np.arange(32), [0, 1], indexing="ij")
    at, microbatch, op = (axis.reshape(-1) for axis in axes)
    squares = rng.integers(1_000_000, 30_000_000, (job.layout.dp, 32))
    held = squares[places.dp[at], microbatch]
    times = (8192 + held / 6000) * 1e-3 * (1 + op) * rng.lognormal(0.0, 0.01, at.size)
    count = at.size
    work = {
        "tokens": np.full(count, 8192),
        "sequences": np.full(count, 4),
        "sum_sq_len": held,
        "max_len": np.full(count, 4096),
    }
    return TelemetryBatch(
        rank=places.ranks[at].astype(np.int32),
        step=np.full(count, step),
        microbatch=microbatch.astype(np.int32),
        op=op.astype(np.uint8),
        compute_ms=times,
        **(work if with_lengths else {}),
    )


def throughput_rows(ranks: int, steps: int = 3) -> list[list[str]]:
    """Records per second through one detector, by whole steps and by nodes of eight ranks."""
    layout = Layout.grid(dp=ranks // 128, pp=16, tp=8, layers=MODEL.layers)
    job = Job(name="large", layout=layout, microbatches=32 * layout.dp)
    result = []
    for name, with_lengths, pieces in (
        ("whole steps, lengths", True, 1),
        ("whole steps, no lengths", False, 1),
        ("a message a node, lengths", True, ranks // 8),
    ):
        detector = Detector(job, settings=DetectorSettings(train=False))
        detector.update(large_step(job, 0, with_lengths=with_lengths))
        spent, records = 0.0, 0
        for step in range(1, steps + 1):
            batch = large_step(job, step, with_lengths=with_lengths)
            size = len(batch) // pieces
            parts = [batch.select(slice(k * size, (k + 1) * size)) for k in range(pieces)]
            start = time.process_time()
            for part in parts:
                detector.update(part)
            spent += time.process_time() - start
            records += len(batch)
        load = spent / steps / 10.0
        speed = f"{records / spent / 1e6:.2f} M"
        result.append([name, f"{ranks:,}", speed, f"{spent / records * 1e6:.2f}", f"{load:.0%}"])
    return result
