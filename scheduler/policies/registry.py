"""Policies by name, including this scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from resihp.contracts import Action, ContractError, InfeasibleError, Job, LinkVerdict, Schedule

from ..cost_model import layer_cost
from ..link_costs import LinkSlowdowns
from ..memory import plan_schedules
from ..planner import make_plan
from .base import FaultPolicy, PolicyOutcome, Speeds, Transition, replica_makespans
from .baselines import drop_replica, greyhound, nothing, oobleck, recycle, restart
from .malleus import malleus
from .resihp_rule import resihp_rule
from .slow_links import adaptra, greyhound_topology

_CHOICE = (Schedule.ONE_F_ONE_B, Schedule.EAGER_1F1B, Schedule.ZERO_BUBBLE)


def joint(job: Job, speeds: Speeds, links: Sequence[LinkVerdict] = ()) -> PolicyOutcome:
    """Plan of this scheduler."""
    try:
        plan = make_plan(job, speeds, links=links)
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
        FaultPolicy("greyhound", "Greyhound, USENIX ATC'25", greyhound, greyhound_topology),
        FaultPolicy("adaptra", "Adaptra, arXiv 2504.19232", nothing, adaptra),
        FaultPolicy("recycle", "ReCycle, SOSP'24, with known speeds", recycle),
        FaultPolicy("oobleck", "Oobleck, SOSP'23, with known speeds", oobleck),
        FaultPolicy("malleus", "Malleus (Hetu), arXiv 2410.13333", malleus),
        FaultPolicy("resihp-rule", "ResiHP's three steps, arXiv 2605.06374", resihp_rule),
        FaultPolicy("joint", "this scheduler", joint, joint),
        FaultPolicy("joint-any", "this scheduler, choosing the schedule too", joint_any),
    )
}


def policy_outcome(
    name: str, job: Job, speeds: Speeds, links: Sequence[LinkVerdict] = ()
) -> PolicyOutcome:
    """Outcome of the named policy for a job at these speeds and with these slow links.

    If plans of the job may choose the schedule, so may every policy: the best of its outcomes.
    Replicas that a policy keeps unchanged stay interleaved; new ones run 1F1B. A policy that knows
    nothing of links decides without them and is timed with them, unless it has no layout. Raises
    `ContractError` for an unknown name.
    """
    if name not in POLICIES:
        raise ContractError("policy", f"must be one of {', '.join(POLICIES)}, not {name}")
    policy = POLICIES[name]
    if job.schedule is Schedule.INTERLEAVED or policy.decide is joint:
        return _outcome(policy, job, speeds, links)
    options = [
        _outcome(policy, replace(job, schedule=schedule, schedules=(schedule,)), speeds, links)
        for schedule in plan_schedules(job)
    ]
    return min(options, key=lambda outcome: outcome.step_ms)


def _outcome(
    policy: FaultPolicy, job: Job, speeds: Speeds, links: Sequence[LinkVerdict]
) -> PolicyOutcome:
    if links and policy.decide_links is not None:
        return policy.decide_links(job, speeds, links)
    found = policy.decide(job, speeds)
    if not links or found.layout is None:
        return found
    slow = LinkSlowdowns.of(job, links)
    given = found.layout.replicas, found.quotas, speeds, found.schedule, slow
    step_ms = max(replica_makespans(job, *given)) + layer_cost(job).step_ms
    return replace(found, step_ms=step_ms)
