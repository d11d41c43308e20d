"""Policies of other systems for the same job and faults, each after its publication.

All share the job model and the cost model, so that only decisions are compared. Where a publication
leaves a choice open, the choice that is best for the policy is taken.
"""

from .base import FaultPolicy, PolicyOutcome
from .registry import POLICIES, policy_outcome

__all__ = ["POLICIES", "FaultPolicy", "PolicyOutcome", "policy_outcome"]
