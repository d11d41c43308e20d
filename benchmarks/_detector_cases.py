"""Trials of the detector: recorded jobs with injected slowdowns, and generated jobs."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from detector import Detector
from resihp.contracts import Job, Layout, ModelShape, Op, Status, TelemetryBatch
from resihp.testing.scenarios import Fault, Noise, Surge, steps_of

MODEL = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)


def trace_path(name: str) -> Path | None:
    """A recorded trace: from RESIHP_TRACES or ../shared/traces; None where it is not there."""
    folder = Path(os.environ.get("RESIHP_TRACES", "../shared/traces"))
    path = folder / f"trace-{name}.parquet"
    return path if path.exists() else None


def text_lengths() -> np.ndarray:
    """Lengths in tokens (a quarter of the bytes) of the modules of Python's standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(p for p in root.rglob("*.py") if "site-packages" not in p.parts)
    return np.array([max(path.stat().st_size // 4, 8) for path in files], np.int64)


def job_of(dp: int, pp: int, tp: int, *, per_replica: int = 8, budget: int = 8192) -> Job:
    """A regular job of the benchmark's model."""
    return Job(
        name=f"dp{dp}-pp{pp}-tp{tp}",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=MODEL.layers),
        microbatches=dp * per_replica,
        model=MODEL,
        tokens_per_microbatch=budget,
    )


@dataclass
class Tally:
    """Outcome of trials.

    delays       steps from onset to the name, for each fault; None if it was never named
    wrong        healthy devices named slow
    inconclusive devices called inconclusive
    factors      slowdown that was stated, over the true one
    """

    delays: list[int | None] = field(default_factory=list)
    wrong: int = 0
    inconclusive: int = 0
    factors: list[float] = field(default_factory=list)
    device_steps: int = 0

    def within(self, steps: int) -> float:
        """Share of the faults named within so many steps."""
        found = sum(1 for delay in self.delays if delay is not None and delay <= steps)
        return found / max(len(self.delays), 1)

    def row(self) -> list[str]:
        """within 2, 5, 8 steps, ever; wrong names; error of the factor."""
        shares = [f"{self.within(steps):.1%}" for steps in (2, 5, 8, 10**6)]
        error = np.median(np.abs(np.array(self.factors) - 1.0)) if self.factors else np.nan
        return [*shares, str(self.wrong), f"{error:.2%}"]


COLUMNS = ("case", "trials", "≤2 steps", "≤5", "≤8", "ever", "wrong names", "factor error")


def run_trial(
    job: Job, stream: Iterable[TelemetryBatch], truth: Sequence[Fault], tally: Tally
) -> None:
    """One job through one detector. Steps count as recorded, not by their numbers."""
    detector = Detector(job)
    onset: dict[int, int | None] = {fault.rank: None for fault in truth}
    named: dict[int, int] = {}
    factor = {fault.rank: fault.factor for fault in truth}
    for at, batch in enumerate(stream):
        tally.device_steps += len(job.layout.ranks)
        for fault in truth:
            if onset[fault.rank] is None and fault.from_step <= int(batch.step[0]):
                onset[fault.rank] = at
        for verdict in detector.update(batch):
            tally.inconclusive += verdict.status is Status.INCONCLUSIVE
            if verdict.status is not Status.FAIL_SLOW:
                continue
            if onset.get(verdict.rank) is None:
                tally.wrong += 1
            elif verdict.rank not in named:
                named[verdict.rank] = at
                tally.factors.append(verdict.slowdown / factor[verdict.rank])
    for rank, start in onset.items():
        found = named.get(rank)
        delay = None if found is None or start is None else found - start + 1
        tally.delays.append(delay)


def injected(
    batches: Sequence[TelemetryBatch], rank: int, factor: float, onset: int
) -> Iterator[TelemetryBatch]:
    """The recorded steps, with one rank slowed from the step at position `onset` on."""
    for at, batch in enumerate(batches):
        slow = (batch.rank == rank) & ((batch.op == Op.FORWARD) | (batch.op == Op.BACKWARD))
        if at >= onset:
            yield replace(batch, compute_ms=batch.compute_ms * np.where(slow, factor, 1.0))
        else:
            yield batch


def trace_trials(job: Job, batches: Sequence[TelemetryBatch], factor: float, trials: int) -> Tally:
    """Random single devices, slowed from a random step on."""
    rng, tally = np.random.default_rng(0), Tally()
    for _ in range(trials):
        rank = int(rng.choice(job.layout.ranks))
        onset = int(rng.integers(3, len(batches) - 8))
        fault = Fault(rank=rank, factor=factor, from_step=int(batches[onset].step[0]))
        run_trial(job, injected(batches, rank, factor, onset), [fault], tally)
    return tally


def clean_trace(job: Job, batches: Sequence[TelemetryBatch], device_steps: int) -> Tally:
    """The recorded steps in random orders, nothing injected."""
    rng, tally = np.random.default_rng(0), Tally()
    while tally.device_steps < device_steps:
        order = rng.permutation(len(batches))
        stream = (
            replace(batches[k], step=np.full(len(batches[k]), at)) for at, k in enumerate(order)
        )
        run_trial(job, stream, [], tally)
    return tally


Onset = Callable[[int, float, int], Fault]


def plain(rank: int, factor: float, onset: int) -> Fault:
    """Slow from the onset on."""
    return Fault(rank=rank, factor=factor, from_step=onset)


def from_the_start(rank: int, factor: float, onset: int) -> Fault:
    """Slow from the first step on."""
    return Fault(rank=rank, factor=factor, from_step=0)


def gradual(rank: int, factor: float, onset: int) -> Fault:
    """Ten steps to the full factor, as a device that heats up."""
    return Fault(rank=rank, factor=factor, from_step=onset, ramp_steps=10)


def on_off(rank: int, factor: float, onset: int) -> Fault:
    """Four steps slow, four steps not."""
    return Fault(rank=rank, factor=factor, from_step=onset, period=4)


def every_other(rank: int, factor: float, onset: int) -> Fault:
    """Slow in every other step."""
    return Fault(rank=rank, factor=factor, from_step=onset, period=1)


def generated_trials(
    job: Job,
    factor: float,
    trials: int,
    *,
    make: Onset = plain,
    devices: int = 1,
    steps: int = 36,
    with_lengths: bool = True,
    coupled: bool = False,
    noise: Noise | None = None,
    surges: Sequence[Surge] = (),
) -> Tally:
    """Generated jobs with documents as long as the standard library's modules."""
    lengths, tally = text_lengths(), Tally()
    for seed in range(trials):
        rng = np.random.default_rng(seed)
        ranks = rng.choice(job.layout.ranks, devices, replace=False).tolist()
        faults = [make(rank, factor, int(rng.integers(10, 24))) for rank in ranks] if factor else []
        stream = steps_of(
            job,
            lengths,
            steps=steps,
            seed=seed,
            faults=faults,
            noise=noise,
            surges=surges,
            with_lengths=with_lengths,
            coupled=coupled,
        )
        run_trial(job, stream, faults, tally)
    return tally
