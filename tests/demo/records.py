"""A synthetic demo run, for everything that shows one."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

from resihp.contracts import Layout, Plan, Replica, Stage, Status, Verdict
from resihp.demo.record import (
    Check,
    DemoRecord,
    LayoutChangeRecord,
    SlowdownRecord,
    StepRecord,
    VerdictRecord,
)

SCRIPT = {"slow_rank": 5, "slow_factor": 1.5, "slow_at": 22, "dead_rank": 2, "dead_at": 52}
BEFORE = Layout.grid(dp=2, pp=2, tp=2, layers=8, units=4)
START = Plan(version=0, layout=BEFORE, quotas=(4, 4))
RESIZED = Layout(
    (
        Replica((Stage((0, 1), (0, 5), (2, 2)), Stage((4, 5), (5, 8), (3, 1)))),
        Replica((Stage((2, 3), (0, 4), (2, 2)), Stage((6, 7), (4, 8), (2, 2)))),
    )
)
SURVIVED = Layout(
    (
        Replica((Stage((0, 1), (0, 5), (2, 2)), Stage((4, 5), (5, 8), (3, 1)))),
        Replica((Stage((3,), (0, 2), (4,)), Stage((6, 7), (2, 8), (2, 2)))),
    )
)
RESIZE_AT, LOSS_AT, STEPS = 29, 52, 72


def demo_record(**changes: object) -> DemoRecord:
    """A run in which all went as promised; `changes` replaces fields."""
    steps = tuple(_steps())
    fields: dict[str, object] = {
        "machine": "4-core x86-64 (2 usable), Linux, Python 3.11, torch 2.13.0, CPU",
        "seconds": 141.0,
        "layout": BEFORE,
        "script": dict(SCRIPT),
        "steps": steps,
        "reference": tuple(_loss(step) for step in range(STEPS)),
        "switches": _switches(),
        "verdicts": _verdicts(),
        "health": tuple(_health()),
        "checks": _checks(),
        "quotas": (4, 4),
        "trained": (
            "A Llama of 0.4 million parameters on the sources of the standard library, byte by"
            " byte, packed to 512 tokens a microbatch, with AdamW."
        ),
        "emulated": (
            "Device speed: 8 CPU processes stand for 8 accelerators. Each computes for real and is"
            " then held until work/speed has passed on a monotonic clock.",
            "The slow device: rank 5 is paced at 1/1.5 of its speed from step 22 on.",
            "The network between nodes: all ranks share one machine and talk over loopback.",
        ),
    }
    return DemoRecord(**{**fields, **changes})  # type: ignore[arg-type]


def plain_record() -> DemoRecord:
    """A run with nothing in it: stopped before its first step."""
    return demo_record(
        script=dict.fromkeys(SCRIPT, -1.0),
        steps=(),
        reference=(),
        switches=(),
        verdicts=(),
        health=(),
        checks=(),
        emulated=(),
    )


def _loss(step: int) -> float:
    wave = 0.06 * math.sin(1.7 * step) + 0.04 * math.sin(0.61 * step)
    return 2.3 + 3.3 * math.exp(-step / 14) + wave * (0.4 + math.exp(-step / 30))


def _steps() -> Iterator[StepRecord]:
    noise = random.Random(0)
    for step in range(STEPS):
        version = (step >= RESIZE_AT) + (step >= LOSS_AT)
        slow = SCRIPT["slow_at"] <= step < RESIZE_AT
        base = (410.0, 470.0, 540.0)[version] if not slow else 588.0
        yield StepRecord(
            step=step,
            loss=_loss(step) + 4e-7 * noise.gauss(0, 1) * step,
            step_ms=base * (1 + 0.03 * noise.gauss(0, 1)) + (600 if step == 0 else 0),
            plan_version=version,
        )


def _switches() -> tuple[LayoutChangeRecord, ...]:
    resize = Plan(
        version=1,
        layout=RESIZED,
        quotas=(4, 4),
        from_step=RESIZE_AT,
        step_ms=462.0,
        bound_ms=431.0,
        reason=(
            "rank 5 runs at 0.67 of its speed: its share of stage 1 falls from 2 of 4 to 1 of 4",
            "one layer of replica 0 moves from stage 1 to stage 0",
        ),
    )
    loss = Plan(
        version=2,
        layout=SURVIVED,
        quotas=(5, 3),
        from_step=LOSS_AT,
        step_ms=533.0,
        bound_ms=489.0,
        reason=(
            "rank 2 is gone: rank 3 alone holds stage 0 of replica 1, which keeps 2 layers",
            "replica 1 is the slower one now: one of its microbatches moves to replica 0",
        ),
    )
    return (
        LayoutChangeRecord(
            step=RESIZE_AT, pause_ms=41.7, received_bytes=612_352, lost=(), plan=resize
        ),
        LayoutChangeRecord(
            step=LOSS_AT, pause_ms=1873.0, received_bytes=1_310_720, lost=(2,), plan=loss
        ),
    )


def _verdicts() -> tuple[VerdictRecord, ...]:
    suspect = Verdict(
        rank=5, status=Status.SUSPECT, slowdown=1.46, since_step=22, confidence=0.71, step=24
    )
    slow = Verdict(
        rank=5,
        status=Status.FAIL_SLOW,
        slowdown=1.49,
        since_step=22,
        confidence=0.998,
        evidence=(
            "computes 49.2% longer than expected from its own past since step 22"
            " (95% interval 46.0% to 52.5%)",
            "odds of that by chance: 1 in more than a billion",
        ),
        interval=(1.46, 1.525),
        step=26,
    )
    dead = Verdict(
        rank=2,
        status=Status.FAIL_STOP,
        since_step=52,
        evidence=("its process ended with signal 9",),
        step=52,
    )
    return (
        VerdictRecord(at_step=25, verdict=suspect),
        VerdictRecord(at_step=27, verdict=slow),
        VerdictRecord(at_step=52, verdict=dead),
    )


def _health() -> Iterator[SlowdownRecord]:
    noise = random.Random(1)
    for step in range(8, STEPS, 2):
        for rank in range(8):
            dead = rank == SCRIPT["dead_rank"] and step >= LOSS_AT
            slow = rank == SCRIPT["slow_rank"] and step >= SCRIPT["slow_at"]
            status = "fail_stop" if dead else "fail_slow" if slow and step > 26 else "healthy"
            slowdown = (1.49 if slow else 1.0) * (1 + 0.01 * noise.gauss(0, 1))
            yield SlowdownRecord(step=step, rank=rank, slowdown=slowdown, status=status)


def _checks() -> tuple[Check, ...]:
    return (
        Check(name="the slow rank is named", passed=True, detail="rank 5, 1.49x since step 22"),
        Check(name="no other rank is named", passed=True, detail="7 ranks stayed healthy"),
        Check(name="the plan is applied live", passed=True, detail="before step 29, 42 ms"),
        Check(name="the kill is survived", passed=True, detail="20 steps with 7 ranks"),
        Check(name="steps are faster after the resize", passed=True, detail="588 -> 470 ms"),
    )
