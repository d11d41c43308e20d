"""Checks of the promises of the demo on the record of a run."""

from __future__ import annotations

from dataclasses import replace

from resihp.contracts import Status

from .phases import step_times
from .record import Check, DemoRecord

_LOSS_TOLERANCE = 1e-3


def check(record: DemoRecord) -> DemoRecord:
    """`record` with its checks."""
    return replace(
        record,
        checks=(
            _only_the_slow_rank_was_named(record),
            _plan_was_applied_live(record),
            _kill_was_survived(record),
            _faster_than_while_slow(record),
            _loss_falls_and_follows(record),
        ),
    )


def _only_the_slow_rank_was_named(record: DemoRecord) -> Check:
    slow = int(record.script["slow_rank"])
    named = [seen for seen in record.verdicts if seen.verdict.status is Status.FAIL_SLOW]
    ranks = {seen.verdict.rank for seen in named}
    passed = ranks == ({slow} if slow >= 0 else set())
    if not named:
        return Check(name="slow rank named", passed=passed, detail="no rank was named")
    first = named[0]
    detail = (
        f"named {sorted(ranks)}; first at step {first.at_step}, factor "
        f"{first.verdict.slowdown:.2f}, since step {first.verdict.since_step}"
    )
    return Check(name="slow rank named, and no other", passed=passed, detail=detail)


def _plan_was_applied_live(record: DemoRecord) -> Check:
    live = [switch for switch in record.switches if not switch.lost]
    passed = bool(live) == (record.script["slow_rank"] >= 0)
    detail = "; ".join(
        f"plan {s.plan.version} before step {s.step}, pause {s.pause_ms:.0f} ms" for s in live
    )
    return Check(name="plan applied live", passed=passed, detail=detail or "no plan was applied")


def _kill_was_survived(record: DemoRecord) -> Check:
    dead = int(record.script["dead_rank"])
    if dead < 0:
        return Check(name="kill survived", passed=True, detail="no rank was killed")
    after = [switch for switch in record.switches if dead in switch.lost]
    last = record.steps[-1].step if record.steps else -1
    passed = bool(after) and last > record.script["dead_at"]
    pause = f", pause {after[0].pause_ms:.0f} ms" if after else ""
    detail = f"rank {dead} died in step {record.script['dead_at']:.0f}; went on to {last}{pause}"
    return Check(name="kill survived", passed=passed, detail=detail)


def _faster_than_while_slow(record: DemoRecord) -> Check:
    times = step_times(record)
    slow, resized = times["slow"], times["resized"]
    if slow is None or resized is None:
        passed = record.script["slow_rank"] < 0
        return Check(name="faster after the resize", passed=passed, detail="not measured")
    detail = f"{slow:.0f} ms while slow, {resized:.0f} ms after ({slow / resized:.2f}x)"
    return Check(name="faster after the resize", passed=resized < slow, detail=detail)


def _loss_falls_and_follows(record: DemoRecord) -> Check:
    """The parallel run is the same training: it differs by the order of fp32 sums only."""
    if not record.steps:
        return Check(name="loss follows the undisturbed run", passed=False, detail="no step")
    apart = max(abs(seen.loss - record.reference[seen.step]) for seen in record.steps)
    first, last = record.steps[0].loss, record.steps[-1].loss
    passed = apart < _LOSS_TOLERANCE and last < first
    detail = f"{first:.2f} -> {last:.2f}, at most {apart:.1e} from the undisturbed run"
    return Check(name="loss falls, as undisturbed", passed=passed, detail=detail)
