"""Description of a loss that no cause explains."""

from __future__ import annotations

import numpy as np

from detector.diagnosis import WORTH_NAMING, Costs
from detector.whatif import WhatIf

_WORTH = 1.05
"""Slowdown from which a loss wants an explanation."""
_MOST = 0.5
"""Share of the loss from which most of it is somewhere."""


def unexplained(whatif: WhatIf, costs: Costs) -> str | None:
    """With which operations, and on which rank, most of the published loss goes; None where a cause
    is worth naming or the loss is small."""
    costly = max(costs.lost.values()) >= WORTH_NAMING * costs.step
    if costly or whatif.slowdown < _WORTH:
        return None
    said = f"Steps take {whatif.slowdown:.2f}x the ideal, and none of the causes explains it"
    by_kind = {kind: float(whatif.slowdown_of(step)) for kind, step in whatif.by_kind_s.items()}
    kind = max(by_kind, key=lambda name: by_kind[name])
    share = (by_kind[kind] - 1.0) / (whatif.slowdown - 1.0)
    if share < _MOST:
        return f"{said}: no kind of operation has most of it."
    return f"{said}: {min(share, 1.0):.0%} of the loss goes with {kind}{_place(whatif)}."


def _place(whatif: WhatIf) -> str:
    """The one rank that most of the loss goes with."""
    rec = whatif.recording
    slowdown = np.where(rec.rank >= 0, whatif.by_worker, 0.0)
    dp, stage = np.unravel_index(int(np.argmax(slowdown)), slowdown.shape)
    here = (rec.stage == stage)[:, None, None] & (np.arange(rec.replicas.size) == dp)[:, None]
    if rec.rank.size == 1 or (whatif.explained(here) or 0.0) < _MOST:
        return ""
    return f", most of it on rank {rec.rank[dp, stage]} (replica {rec.replicas[dp]}, stage {stage})"
