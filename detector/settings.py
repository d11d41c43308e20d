"""All thresholds of the detector in one place, with what they mean."""

from __future__ import annotations

from dataclasses import dataclass

from resihp.contracts import ContractError


@dataclass(frozen=True, kw_only=True)
class DetectorSettings:
    """How eager the detector is. The defaults hold for every job that we know of.

    horizon_steps        one false name per job in this many steps is accepted (on average), but
                         never more than one in 100,000 steps of a device
    suspect_steps        one false suspicion per device in this many steps is accepted
    min_slowdown         smaller slowdowns are never named
    confirm_steps        consecutive slow steps, of one size, before a name; a device that is slow
                         by turns needs none running
    recover_steps        consecutive healthy steps before a named device is healthy again; more for
                         one that is slow by turns
    offset_spread        prior of the spread (log) of healthy devices around their peers
    lag_steps            a step is decided without the missing ranks once this many later steps,
                         in this many later messages of one rank, have arrived
    max_open_steps       most steps held open at once
    window_steps         steps of residuals kept for each rank
    silent_steps         decided steps without a record before a rank counts as missing
    train_rows           rows that the predictor learns from at most
    train_after_steps    decided steps after which the predictor is trained for the first time
    train                whether to train at all (False leaves the analytic model alone)
    seed                 of the predictor
    probes_per_minute    most probes asked for; 0 forbids them
    probation_probe_s    seconds between two rounds of probes of a slow device outside the layout
    """

    horizon_steps: int = 1_500
    suspect_steps: int = 2_000
    min_slowdown: float = 1.02
    confirm_steps: int = 2
    recover_steps: int = 3
    offset_spread: float = 0.007
    lag_steps: int = 3
    max_open_steps: int = 256
    window_steps: int = 48
    silent_steps: int = 3
    train_rows: int = 20_000
    train_after_steps: int = 16
    train: bool = True
    seed: int = 0
    probes_per_minute: int = 12
    probation_probe_s: float = 60.0

    def __post_init__(self) -> None:
        for name in (
            "horizon_steps",
            "suspect_steps",
            "confirm_steps",
            "recover_steps",
            "lag_steps",
            "max_open_steps",
            "silent_steps",
            "train_rows",
            "train_after_steps",
        ):
            if getattr(self, name) < 1:
                raise ContractError(name, "must be 1 or more")
        if self.window_steps < 16:
            raise ContractError("window_steps", "must be 16 or more")
        if self.min_slowdown <= 1.0 or self.offset_spread <= 0.0:
            raise ContractError("min_slowdown, offset_spread", "must be above 1 and above 0")
        if self.probes_per_minute < 0 or self.probation_probe_s < 0:
            raise ContractError("probes_per_minute, probation_probe_s", "must be 0 or more")
