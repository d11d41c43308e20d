"""Faults that slow one kind of pass only.

Some kernels run in the forward or in the backward pass alone, and so does what makes them slow. If
the levels of the two kinds are not apart by more than their noise, half of the slowness drowns in
that of the healthy kind, also in steps of many microbatches where a host slows all passes of a step
together. So the forward and the backward passes are tested alone, too. A mean of e-values is an
e-value (Vovk and Wang, "E-values", 2021), so that more tests name no more healthy ranks.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..arrays import Bools, Ints
from ..persistence import Persistent
from ..residuals import StepResidual
from ..settings import DetectorSettings
from .rank_tests import RankTests, StepEvidence

_BOTH = 0.5
"""Weight of the test of both kinds together; the others share the rest."""


class PassTests(Persistent):
    """Sequential tests of the forward passes and of the backward passes of all ranks."""

    _saved = ("_forward", "_backward")

    def __init__(self, classes: Ints, settings: DetectorSettings) -> None:
        self._forward = RankTests(classes, settings)
        self._backward = RankTests(classes, settings)

    def joined(
        self,
        step: int,
        residual: StepResidual,
        trusted: Bools,
        now: StepEvidence,
        healthy: Bools,
    ) -> StepEvidence:
        """Take the residuals of a step by kind of pass, if it has them; return `now` with what they
        say. `trusted` and `healthy` are those of `RankTests.observe`."""
        if residual.passes is None:
            return now
        joined, able = now.evidence + np.log(_BOTH), now.able
        for tests, passes in zip((self._forward, self._backward), residual.passes, strict=True):
            passes = replace(passes, misfit=residual.misfit)  # noqa: PLW2901 of the same work
            everyone = np.ones(trusted.size, bool)
            alone = tests.observe(step, passes, trusted, everyone, healthy=healthy)
            joined = np.logaddexp(joined, alone.evidence + np.log((1.0 - _BOTH) / 2.0))
            able = able | (alone.able & (alone.evidence >= tests.name_at))
        return replace(now, evidence=joined, able=able)

    def clear(self, ranks: Bools) -> None:
        """Reset the evidence on some ranks."""
        self._forward.clear(ranks)
        self._backward.clear(ranks)
