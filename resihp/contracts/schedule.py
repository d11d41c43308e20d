"""The orders in which a pipeline may run its passes."""

from __future__ import annotations

from enum import StrEnum


class Schedule(StrEnum):
    """Order of the microbatches' passes within a pipeline."""

    ONE_F_ONE_B = "1f1b"
    EAGER_1F1B = "eager_1f1b"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero_bubble"
