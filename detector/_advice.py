"""A diagnosis in sentences: what is lost, where, since when, and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from resihp.contracts import Cause

if TYPE_CHECKING:
    from .whatif.slow import SlowDevice

WORTH_SAYING = 0.005
"""What costs less than this share of the step is not spoken of."""
NOTHING = "No cause costs enough of the step to be named."

_CAUSES = {
    Cause.DEVICE: "Slow devices cost",
    Cause.STAGE_IMBALANCE: "Stages of unequal weight cost",
    Cause.SEQUENCE_IMBALANCE: "Microbatches of unequal work cost",
    Cause.COMMUNICATION: "Slow or heavy communication costs",
    Cause.HOST: "The host (data loading, garbage collection, late launches) costs",
}
_ADVICE = {
    Cause.STAGE_IMBALANCE: "give the heavy stage fewer layers",
    Cause.SEQUENCE_IMBALANCE: "pack microbatches by tokens and squared lengths together",
    Cause.COMMUNICATION: "check the links, or overlap more of it with computation",
    Cause.HOST: "load data ahead, and collect garbage on all ranks in the same step",
}
_UNTOLD = "Devices that compute longer than their peers, by more work or by themselves, cost"
_NOT_TOLD = (
    "Whether the devices are slow or have more work cannot be told: the records carry no lengths, "
    "and no other rank computes the same microbatches by a timer of its own. Hooks record lengths "
    "that are given as `monitor.microbatch(seq_lens=...)`."
)
_NOT_NAMED = "which ones could not be told for certain: see the verdicts that are not healthy"
_MOST_DEVICES = 4


def sentences(
    shares: Mapping[Cause, float],
    where: Mapping[Cause, str],
    slow: Sequence[SlowDevice],
    *,
    told: bool,
    least: float,
) -> tuple[str, ...]:
    """What each cause costs, the dearest first; `shares` of the step.

    `least` is the share from which unnamed slow devices are spoken of as such.
    """
    lines = []
    for cause, share in sorted(shares.items(), key=lambda item: -item[1]):
        if share < WORTH_SAYING:
            continue
        if cause is not Cause.DEVICE:
            place = f": {where[cause]}" if cause in where else ""
            lines.append(f"{_CAUSES[cause]} {share:.1%} of the step{place}; {_ADVICE[cause]}.")
        elif slow:
            lines.append(_named(slow, share))
        else:
            unnamed = f"; {_NOT_NAMED}" if told and share >= least else ""
            words = _CAUSES[cause] if told else _UNTOLD
            lines.append(f"{words} {share:.1%} of the step{unnamed}.")
    if shares.get(Cause.DEVICE, 0.0) < WORTH_SAYING:
        return (*lines, _hidden(slow)) if slow else tuple(lines)
    return tuple(lines) if told or slow else (*lines, _NOT_TOLD)


def _named(slow: Sequence[SlowDevice], share: float) -> str:
    first = slow[0]
    if len(slow) == 1:
        took = "computes" if first.until is None else "computed"
        return (
            f"Rank {first.rank} (replica {first.dp}, stage {first.pp}) {took} {first.factor:.2f}x "
            f"as long as it should {_when(first)}, which costs {share:.1%} of the step: check the "
            f"device, or give it less work (speed {1.0 / first.factor:.2f})."
        )
    return (
        f"{_several(slow)} compute longer than they should, which costs {share:.1%} of the step: "
        "check the devices, or give them less work."
    )


def _hidden(slow: Sequence[SlowDevice]) -> str:
    if len(slow) > 1:
        return f"{_several(slow)} are slow, but the step waits for others: they cost next to none."
    first = slow[0]
    took = "computes" if first.until is None else "computed"
    return (
        f"Rank {first.rank} (replica {first.dp}, stage {first.pp}) {took} {first.factor:.2f}x as "
        f"long as it should {_when(first)}, but the step waits for others: it costs next to none."
    )


def _several(slow: Sequence[SlowDevice]) -> str:
    each = [
        f"{device.rank} (replica {device.dp}, stage {device.pp}, {device.factor:.2f}x "
        f"{_when(device)})"
        for device in slow[:_MOST_DEVICES]
    ]
    more = len(slow) - len(each)
    each += [f"{more} more"] if more else []
    return f"Ranks {', '.join(each[:-1])} and {each[-1]}"


def _when(device: SlowDevice) -> str:
    since = "from the start" if device.since is None else f"from step {device.since} on"
    if device.until is None:
        return since if device.since is None else f"since step {device.since}"
    return f"{since.removesuffix(' on')} to step {device.until - 1}"
