"""Policies by name, including this scheduler."""

from __future__ import annotations

from dataclasses import replace

from resihp.contracts import Action, InfeasibleError, Job, Schedule

from ..memory import plan_schedules
from ..planner import make_plan
from .base import FaultPolicy, PolicyOutcome, Speeds, Transition
from .baselines import drop_replica, greyhound, nothing, oobleck, recycle, restart
from .malleus import malleus
from .resihp_rule import resihp_rule

_CHOICE = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE)


def joint(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Plan of this scheduler."""
    try:
        plan = make_plan(job, speeds)
    except InfeasibleError as error:
        return PolicyOutcome(float("inf"), detail=error.detail)
    detail = "; ".join(plan.reason)
    restarts = plan.action is Action.RESTART
    transition = Transition.RESTART if restarts else Transition.LIVE
    return PolicyOutcome(plan.step_ms, plan.layout, plan.quotas, transition, plan.schedule, detail)


def joint_any(job: Job, speeds: Speeds) -> PolicyOutcome:
    """Plan of this scheduler with a free choice of the schedule, as memory permits."""
    return joint(replace(job, schedules=_CHOICE), speeds)


POLICIES: dict[str, FaultPolicy] = {
    policy.name: policy
    for policy in (
        FaultPolicy("nothing", "the job as it was started", nothing),
        FaultPolicy("nvrx", "nvidia-resiliency-ext: leave the rank's replica out", drop_replica),
        FaultPolicy("restart", "checkpoint and restart on fewer devices", restart),
        FaultPolicy("greyhound", "Greyhound, USENIX ATC'25", greyhound),
        FaultPolicy("recycle", "ReCycle, SOSP'24", recycle),
        FaultPolicy("oobleck", "Oobleck, SOSP'23", oobleck),
        FaultPolicy("malleus", "Malleus (Hetu), arXiv 2410.13333", malleus),
        FaultPolicy("resihp-rule", "ResiHP's three steps, arXiv 2605.06374", resihp_rule),
        FaultPolicy("joint", "this scheduler", joint),
        FaultPolicy("joint-any", "this scheduler, choosing the schedule too", joint_any),
    )
}


def policy_outcome(name: str, job: Job, speeds: Speeds) -> PolicyOutcome:
    """Outcome of the named policy for a job at these speeds.

    If plans of the job may choose the schedule, so may every policy: the best of its outcomes.
    Replicas that a policy keeps unchanged stay interleaved; new ones run 1F1B.
    """
    decide = POLICIES[name].decide
    if job.schedule is Schedule.INTERLEAVED:
        return decide(job, speeds)
    options = [
        decide(replace(job, schedule=schedule, schedules=(schedule,)), speeds)
        for schedule in plan_schedules(job)
    ]
    return min(options, key=lambda outcome: outcome.step_ms)
