"""What other systems would do with the same job and the same faults, each from its own paper.

All of them share the job model and the cost model, so that a comparison is of decisions alone.
Where a paper leaves a choice open, the choice that serves the policy best was taken.
"""

from .base import FaultPolicy, PolicyOutcome
from .registry import POLICIES, policy_outcome

__all__ = ["POLICIES", "FaultPolicy", "PolicyOutcome", "policy_outcome"]
