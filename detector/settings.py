"""Settings of the detector that a user may change."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real

from resihp.contracts import ContractError


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """Thresholds of the verdicts, training and probes. The defaults suit every known job.

    The sidecar reads all but `train`, `train_after_steps` and `seed` from its environment, such as
    `RESIHP_MIN_SLOWDOWN=1.05`.

    false_alarm_steps    one false name per job in this many steps is accepted (on average), but
                         never more than one in 100,000 steps of a device
    min_slowdown         smaller slowdowns are never named
    confirm_steps        consecutive slow steps, of one size, before a name; an intermittently slow
                         device needs none running
    recover_steps        consecutive healthy steps before a named device is healthy again; more for
                         one that is slow intermittently
    train                whether to train the predictor (False: the analytic model alone)
    train_after_steps    steps after which the predictor is trained for the first time
    seed                 of the predictor
    probes_per_minute    most probes asked for; 0 forbids them
    probation_probe_s    seconds between two rounds of probes of a slow device outside the layout
    """

    false_alarm_steps: int = 1_500
    min_slowdown: float = 1.02
    confirm_steps: int = 2
    recover_steps: int = 3
    train: bool = True
    train_after_steps: int = 16
    seed: int = 0
    probes_per_minute: int = 12
    probation_probe_s: float = 60.0

    def __post_init__(self) -> None:
        for name, least in _WHOLE.items():
            value = getattr(self, name)
            if not isinstance(value, Integral) or value < least:
                raise ContractError(name, f"must be a whole number, {least} or more")
        if not _is_finite(self.min_slowdown) or self.min_slowdown <= 1.0:
            raise ContractError("min_slowdown", "must be finite and above 1")
        if not _is_finite(self.probation_probe_s) or self.probation_probe_s < 0:
            raise ContractError("probation_probe_s", "must be finite and 0 or more")


_WHOLE = {
    "false_alarm_steps": 1,
    "confirm_steps": 1,
    "recover_steps": 1,
    "train_after_steps": 1,
    "probes_per_minute": 0,
}
"""Settings that count, with their least values."""


def _is_finite(value: object) -> bool:
    return isinstance(value, Real) and math.isfinite(value)
