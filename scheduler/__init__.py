"""Planner: the layout, quotas and schedule with the shortest step for given device speeds. Pure."""

from .job_file import MODEL_PRESETS, model_preset, parse_job
from .migration import PlanOption, migration_ms
from .planner import make_plan, plan_front, replan
from .policies import POLICIES, FaultPolicy, PolicyOutcome, policy_outcome
from .scenario import (
    FaultEvent,
    PolicyRun,
    Scenario,
    Segment,
    parse_scenario,
    play_scenario,
    throughput,
)
from .simulator import TimedPass, Timeline, simulate
from .switching_rule import ReplanDecision, SkiRental, SwitchCandidate

__all__ = [
    "MODEL_PRESETS",
    "POLICIES",
    "FaultEvent",
    "FaultPolicy",
    "PlanOption",
    "PolicyOutcome",
    "PolicyRun",
    "ReplanDecision",
    "Scenario",
    "Segment",
    "SkiRental",
    "SwitchCandidate",
    "TimedPass",
    "Timeline",
    "make_plan",
    "migration_ms",
    "model_preset",
    "parse_job",
    "parse_scenario",
    "plan_front",
    "play_scenario",
    "policy_outcome",
    "replan",
    "simulate",
    "throughput",
]
