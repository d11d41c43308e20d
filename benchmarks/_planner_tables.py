"""Results and tables of the planner benchmark."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import inf
from statistics import fmean, geometric_mean
from typing import Any

from benchmarks._planner_cases import PEERS, Row
from benchmarks._report import print_table


@dataclass(frozen=True)
class Result:
    """Results of one row, by policy and seed: fraction of the remaining speed, processor time."""

    fractions: dict[str, list[float]]
    took_ms: dict[str, list[float]]
    gaps: list[float]
    schedules: Counter[str]

    def mean(self, name: str) -> float:
        """Mean fraction of a policy."""
        return fmean(self.fractions[name])

    def json(self) -> dict[str, Any]:
        """JSON document."""
        return {**vars(self), "schedules": dict(self.schedules)}


@dataclass(frozen=True)
class Scale:
    """Best and worst planning time for one number of devices."""

    devices: int
    faulty: int
    least_ms: float
    most_ms: float
    fraction: float
    gap: float
    peak_mib: float

    def json(self) -> dict[str, Any]:
        """JSON document."""
        return asdict(self)


def print_quality(permitted: str, rows: Sequence[Row], results: Sequence[Result]) -> None:
    """Print means of every row, and over the rows of equal microbatches."""
    names = (*PEERS, "joint", "own")
    table = []
    for row, result in zip(rows, results, strict=True):
        used = ", ".join(f"{name} {count}" for name, count in result.schedules.most_common())
        took = result.took_ms["joint"]
        means = [f"{result.mean(name):.3f}" for name in names]
        spent = [f"{fmean(took):.0f}", f"{max(took):.0f}"]
        table.append([row, *means, f"{fmean(result.gaps):.2%}", *spent, used])
    columns = ["microbatches; slow, dead", *names, "gap", "cpu ms", "max", "our schedules"]
    print_table(f"Jobs that permit {permitted}: fraction of the remaining speed", columns, table)
    for size in sorted({row.microbatches for row in rows}):
        same = [r for row, r in zip(rows, results, strict=True) if row.microbatches == size]
        print(f"{size} microbatches: {_summary(same)}")


def _summary(results: Sequence[Result]) -> str:
    means = [result.mean("joint") for result in results]
    own = [result.mean("own") for result in results]
    gap = fmean(fmean(result.gaps) for result in results)
    reached = sum(mean >= 0.985 for mean in means)
    return (
        f"mean {fmean(means):.3f}, least {min(means):.3f}, "
        f"0.985 or more in {reached} of {len(means)} rows; "
        f"own {fmean(own):.3f}, least {min(own):.3f}; gap {gap:.2%}"
    )


def print_ratios(
    permitted: str, rows: Sequence[Row], results: Sequence[Result], published: Sequence[Result]
) -> None:
    """Print our throughput over that of each policy: with the same and the published schedule."""
    table = []
    for name in PEERS:
        if name == "recycle" and "split" not in permitted:
            continue
        ratios = _ratios(name, results, results)
        behind = [str(row) for row, ratio in zip(rows, ratios, strict=True) if ratio < 1.0]
        finite = [ratio for ratio in ratios if ratio < inf]
        own = [ratio for ratio in _ratios(name, results, published) if ratio < inf]
        took = fmean(ms for result in results for ms in result.took_ms[name])
        ratios_text = (
            f"{geometric_mean(finite):.3f}",
            f"{min(finite):.3f}",
            f"{geometric_mean(own):.3f}",
        )
        stopped = len(ratios) - len(finite)
        table.append([name, *ratios_text, stopped, f"{took:.0f}", "; ".join(behind) or "none"])
    columns = ["policy", "ratio", "least row", "as published", "stopped", "its cpu ms", "behind in"]
    title = f"Jobs that permit {permitted}: ours over each policy (geometric mean of the rows)"
    print_table(title, columns, table)


def _ratios(name: str, ours: Sequence[Result], theirs: Sequence[Result]) -> list[float]:
    """Ratio by row; inf if the job cannot run under the policy."""
    means = [(one.mean("joint"), other.mean(name)) for one, other in zip(ours, theirs, strict=True)]
    return [one / other if other else inf for one, other in means]


def print_scales(scales: Sequence[Scale]) -> None:
    """Print planning times by number of devices."""
    table = []
    for s in scales:
        quality = f"{s.fraction:.3f}", f"{s.gap:.2%}"
        spent = f"{s.least_ms:.0f}", f"{s.most_ms:.0f}"
        table.append([s.devices, s.faulty, *spent, *quality, f"{s.peak_mib:.0f}"])
    columns = ["devices", "faulty", "cpu ms, best of 5", "worst", "fraction", "gap", "peak MiB"]
    print_table("Planning time, 3% of the devices faulty (a quarter of them dead)", columns, table)
