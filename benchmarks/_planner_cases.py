"""Jobs and faults of the planner benchmark."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from resihp.contracts import Job, LayerCost, Layout, Links, Memory, Schedule

HEADS = 64  # units of a share: a 70B model's attention heads
PEERS = ("nothing", "nvrx", "restart", "greyhound", "recycle", "oobleck", "malleus", "resihp-rule")

# A 70B model in bf16 over TP4 and PP8 on devices of 80 GB: 12 GB hold parameters, gradients and the
# rank's part of the optimizer state, 4 GB stay free; the activations of one layer for one
# microbatch of 4,096 tokens take 34 bytes per token and hidden unit (8,192).
MEMORY = Memory(budget_bytes=64_000_000_000, activation_bytes_per_layer=34 * 4096 * 8192)

DEFAULT = "what fits (default)"
PERMITTED: dict[str, tuple[Schedule, ...]] = {
    DEFAULT: (),
    "1F1B alone": (Schedule.ONE_F_ONE_B,),
    "a split backward too": (
        Schedule.ONE_F_ONE_B,
        Schedule.EAGER_1F1B,
        Schedule.ZERO_BUBBLE,
    ),
}


@dataclass(frozen=True)
class Row:
    """Microbatches per step, and numbers of slow and dead devices."""

    microbatches: int
    slow: int
    dead: int

    def __str__(self) -> str:
        return f"{self.microbatches}; {self.slow}, {self.dead}"


ROWS = [Row(m, s, d) for m in (64, 256, 512) for s in (1, 4, 16) for d in (0, 4, 8)]


def job_of(
    microbatches: int,
    *,
    dp: int = 8,
    pp: int = 8,
    tp: int = 4,
    units: int = HEADS,
    schedules: tuple[Schedule, ...] = (),
) -> Job:
    """A job of 80 layers whose only cost is compute."""
    return Job(
        name="planner",
        layout=Layout.grid(dp=dp, pp=pp, tp=tp, layers=80, units=units),
        microbatches=microbatches,
        cost=LayerCost(forward_ms=1.0, backward_ms=2.0),
        links=Links(latency_ms=0.0),
        memory=MEMORY,
        schedules=schedules,
    )


def faults(ranks: int, slow: int, dead: int, seed: int) -> dict[int, float]:
    """Speeds of randomly chosen devices: slow by a factor of 1.2 to 4, or dead (0)."""
    random = np.random.default_rng([seed, ranks, slow, dead])
    picked = random.permutation(ranks)[: slow + dead].tolist()
    speeds = (1.0 / random.uniform(1.2, 4.0, slow)).tolist() + [0.0] * dead
    return dict(zip(picked, speeds, strict=True))


def remaining(ranks: int, speeds: dict[int, float]) -> float:
    """Remaining fraction of the total speed."""
    return (ranks - len(speeds) + sum(speeds.values())) / ranks
