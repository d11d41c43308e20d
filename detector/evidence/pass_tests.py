"""Faults that slow one kind of pass only, in steps of few microbatches.

Some kernels run in the forward or in the backward pass alone, and so does what makes them slow. In
steps of many microbatches the levels of the two kinds are apart by more than their noise; in others
half of the slowness drowns in the noise of the healthy kind. So the forward and the backward passes
are tested alone, too. A mean of e-values is an e-value (Vovk and Wang, "E-values", 2021), so that
more tests name no more healthy ranks.
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

    _saved = ("_tests",)

    def __init__(self, classes: Ints, settings: DetectorSettings) -> None:
        self._tests = RankTests(np.concatenate([2 * classes, 2 * classes + 1]), settings)

    def joined(
        self, step: int, residual: StepResidual, trusted: Bools, now: StepEvidence
    ) -> StepEvidence:
        """Take the residuals of a step by kind of pass, if it has them; return `now` with what they
        say."""
        if residual.passes is None:
            return now
        value, error = (np.concatenate(rows) for rows in residual.passes)
        passes = StepResidual(
            value,
            error,
            np.ones(value.size, np.int64),
            residual.spread,
            misfit=residual.misfit and residual.misfit.for_both_passes(),
        )
        kinds = self._tests.observe(step, passes, np.tile(trusted, 2), np.ones(value.size, bool))
        each = kinds.evidence.reshape(2, -1)
        alone = np.logaddexp(*each) + np.log((1.0 - _BOTH) / 2.0)
        sure = (each >= self._tests.name_at) & kinds.able.reshape(2, -1)
        return replace(
            now,
            evidence=np.logaddexp(now.evidence + np.log(_BOTH), alone),
            able=now.able | sure.any(axis=0),
        )

    def clear(self, ranks: Bools) -> None:
        """Reset the evidence on some ranks."""
        self._tests.clear(np.tile(ranks, 2))
