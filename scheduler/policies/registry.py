"""All policies by name, the scheduler's own among them."""

from __future__ import annotations

from dataclasses import replace

from resihp.contracts import InfeasibleError, Job, Schedule

from ..planner import make_plan
from .base import Outcome, Pause, Policy, Speeds
from .malleus import malleus
from .rerouting import recycle
from .resihp_rule import resihp_rule
from .simple import drop_replica, greyhound, nothing, restart
from .split import split_backward
from .templates import oobleck


def joint(job: Job, speeds: Speeds) -> Outcome:
    """This scheduler's own plan."""
    try:
        plan = make_plan(job, speeds)
    except InfeasibleError as error:
        return Outcome(float("inf"), detail=error.detail)
    detail = "; ".join(plan.reason)
    return Outcome(plan.step_ms, plan.layout, plan.quotas, Pause.LIVE, detail)


def joint_split(job: Job, speeds: Speeds) -> Outcome:
    """This scheduler's own plan, run with a split backward (ZB-H1) in place of 1F1B."""
    outcome = joint(job, speeds)
    return outcome if outcome.layout is None else split_backward(job, outcome, speeds)


def joint_eager(job: Job, speeds: Speeds) -> Outcome:
    """This scheduler's own plan for eager 1F1B, which holds more activations."""
    return joint(replace(job, schedule=Schedule.EAGER_1F1B), speeds)


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
        Policy("joint-eager", "this scheduler, with eager 1F1B", joint_eager),
        Policy("joint-split", "this scheduler, with a split backward", joint_split),
    )
}


def outcome_of(name: str, job: Job, speeds: Speeds) -> Outcome:
    """What the policy of that name makes of a job at these speeds."""
    return POLICIES[name].decide(job, speeds)
