"""All policies by name, the scheduler's own among them."""

from __future__ import annotations

from dataclasses import replace

from resihp.contracts import InfeasibleError, Job, Schedule

from ..planner import make_plan
from ..schedules import plan_schedules
from .base import Outcome, Pause, Policy, Speeds
from .malleus import malleus
from .rerouting import recycle
from .resihp_rule import resihp_rule
from .simple import drop_replica, greyhound, nothing, restart
from .templates import oobleck

_CHOICE = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE)


def joint(job: Job, speeds: Speeds) -> Outcome:
    """This scheduler's own plan."""
    try:
        plan = make_plan(job, speeds)
    except InfeasibleError as error:
        return Outcome(float("inf"), detail=error.detail)
    detail = "; ".join(plan.reason)
    return Outcome(plan.step_ms, plan.layout, plan.quotas, Pause.LIVE, plan.schedule, detail)


def joint_any(job: Job, speeds: Speeds) -> Outcome:
    """This scheduler's own plan where it may choose the schedule too, as memory allows."""
    return joint(replace(job, schedules=_CHOICE), speeds)


POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        Policy("nothing", "the job as it was started", nothing),
        Policy("nvrx", "nvidia-resiliency-ext: leave the rank's replica out", drop_replica),
        Policy("restart", "checkpoint and restart on fewer devices", restart),
        Policy("greyhound", "Greyhound, USENIX ATC'25", greyhound),
        Policy("recycle", "ReCycle, SOSP'24", recycle),
        Policy("oobleck", "Oobleck, SOSP'23", oobleck),
        Policy("malleus", "Malleus (Hetu), arXiv 2410.13333", malleus),
        Policy("resihp-rule", "ResiHP's three steps, arXiv 2605.06374", resihp_rule),
        Policy("joint", "this scheduler", joint),
        Policy("joint-any", "this scheduler, choosing the schedule too", joint_any),
    )
}


def outcome_of(name: str, job: Job, speeds: Speeds) -> Outcome:
    """What the policy of that name makes of a job at these speeds.

    Where plans may choose the schedule, so may every policy: the best of what it makes of each.
    Replicas of interleaved stages stay so where a policy keeps them as they are; stages that it
    makes anew run 1F1B.
    """
    decide = POLICIES[name].decide
    if job.schedule is Schedule.INTERLEAVED:
        return decide(job, speeds)
    options = [
        decide(replace(job, schedule=schedule, schedules=(schedule,)), speeds)
        for schedule in plan_schedules(job)
    ]
    return min(options, key=lambda outcome: outcome.step_ms)
