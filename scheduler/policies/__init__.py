"""What other systems would do with the same job and the same faults, each from its own paper.

All of them share the job model and the cost model, so that a comparison is of decisions alone.
Where a paper leaves a choice open, the choice that serves the policy best was taken.
"""

from .base import Outcome, Policy
from .registry import POLICIES, outcome_of

__all__ = ["POLICIES", "Outcome", "Policy", "outcome_of"]
