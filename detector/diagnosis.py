"""Diagnosis of a slow job from microbatch records: every cause is removed in turn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from resihp.contracts import Cause, Diagnosis, Job, Layout, TelemetryBatch
from resihp.formatting import listed

from .whatif.places import SlowDevice
from .whatif.step_replay import StepReplay

CAUSES: tuple[Cause, ...] = tuple(cause for cause in Cause if cause is not Cause.NONE)
WORTH_NAMING = 0.02
"""A cause that costs less than this share of the step is not named."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Step time of a job and the cost of each cause, in one unit of time.

    step and ideal are means over `steps` steps; `lost` per step, 0 or more. `separates_devices` is
    whether the records separate slow devices from more work; `where` names the place at which a
    cause is largest. `by_host` is that part of the host's cost by which it makes ranks slow.
    """

    step: float
    ideal: float
    lost: Mapping[Cause, float]
    steps: int
    separates_devices: bool = True
    where: Mapping[Cause, str] = field(default_factory=dict)
    by_host: float = 0.0

    @property
    def slowdown(self) -> float:
        """Step over ideal step; at least 1.

        The ideal is made of averages and so contains a part of what causes cost: the excess of slow
        devices where there are few, communication that is heavy at all times, quotas that differ by
        design. The step without its largest cause may be shorter; the shorter one counts. The
        excess of a heavy stage stays in the ideal, by the published definition.
        """
        lost = {**self.lost, Cause.STAGE_IMBALANCE: 0.0}
        slow = lost.get(Cause.DEVICE, 0.0) + self.by_host
        ideal = min(self.ideal, self.step - max(slow, *lost.values()))
        return max(self.step / ideal, 1.0) if ideal > 0 else 1.0

    @classmethod
    def mean(cls, parts: Iterable[Costs]) -> Costs:
        """The mean over several stretches of a job, by their numbers of steps."""
        parts = [part for part in parts if part.steps]
        steps = sum(part.steps for part in parts)

        def over(values: Iterable[float]) -> float:
            pairs = zip(values, parts, strict=True)
            return sum(value * part.steps for value, part in pairs) / max(steps, 1)

        return cls(
            step=over(part.step for part in parts),
            ideal=over(part.ideal for part in parts),
            lost={cause: over(part.lost.get(cause, 0.0) for part in parts) for cause in CAUSES},
            steps=steps,
            separates_devices=all(part.separates_devices for part in parts),
            where=max(parts, key=lambda part: part.steps).where if parts else {},
            by_host=over(part.by_host for part in parts),
        )


def costs_of(
    job: Job,
    layout: Layout,
    batches: Iterable[TelemetryBatch],
    slow: Sequence[SlowDevice] = (),
) -> Costs:
    """Costs of each cause in the steps of `batches`, recorded under `layout`; milliseconds.

    Records of an older plan version than the newest are left out. The steps are replayed in the
    order of the job's schedule, as they were and with one cause removed at a time. `slow` are the
    devices that the detector has named, possibly from earlier records.
    """
    replayed = StepReplay.of(job, layout, batches, slow)
    if replayed is None:
        return Costs(step=0.0, ideal=0.0, lost={}, steps=0)
    return Costs(
        step=replayed.step_ms,
        ideal=replayed.ideal_ms,
        lost=replayed.lost_ms,
        steps=replayed.steps,
        separates_devices=replayed.effects.separates_devices,
        where=replayed.where,
        by_host=replayed.by_host_ms,
    )


def diagnose(
    job: Job,
    layout: Layout,
    batches: Iterable[TelemetryBatch],
    slow: Sequence[SlowDevice] = (),
) -> Diagnosis:
    """Diagnosis of the steps in `batches`; see `costs_of` and `conclude`."""
    return conclude(costs_of(job, layout, batches, slow), slow=slow)


def conclude(
    costs: Costs, slowdown: float | None = None, *, slow: Sequence[SlowDevice] = ()
) -> Diagnosis:
    """The diagnosis from the cost of each cause.

    Shares are of the cost of all causes. No cause is named where even the largest costs
    less than `WORTH_NAMING` of the step, or less than `WORTH_SAYING` for slow devices and hosts
    where the detector has named some (`slow`). Slow devices are not named where the records do not
    separate them from more work, unless the detector has. `slowdown` overrides the one that follows
    from `costs`.
    """
    total = sum(costs.lost.values())
    shares: dict[Cause, float] = {
        cause: costs.lost.get(cause, 0.0) / total if total > 0 else 0.0 for cause in CAUSES
    }
    worst = max(CAUSES, key=lambda cause: shares[cause])
    devices = [device for device in slow if not device.by_host]
    ranks = {Cause.DEVICE: bool(devices), Cause.HOST: len(devices) < len(slow)}
    least = WORTH_SAYING if ranks.get(worst) else WORTH_NAMING
    costly = total > 0 and costs.lost[worst] >= least * costs.step
    named = costly and (worst is not Cause.DEVICE or costs.separates_devices or bool(devices))
    words: tuple[str, ...] = ()
    if costly or slow:
        of_step = {cause: cost / costs.step for cause, cost in costs.lost.items() if costs.step}
        words = sentences(
            of_step,
            costs.where,
            slow,
            separated=costs.separates_devices,
            least=WORTH_NAMING,
            by_host=costs.by_host / costs.step if costs.step else 0.0,
        )
    return Diagnosis(
        slowdown=costs.slowdown if slowdown is None else slowdown,
        root_cause=worst if named else Cause.NONE,
        attribution=shares,
        steps=costs.steps,
        detail=words if costly else (NOTHING, *words),
    )


WORTH_SAYING = 0.005
"""A cause that costs less than this share of the step is not mentioned."""
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
_NOT_SEPARATED = "Devices that compute longer than their peers, by more work or by themselves, cost"
_NO_LENGTHS = (
    "Whether the devices are slow or have more work cannot be told: the records carry no lengths, "
    "and no other rank computes the same microbatches by a timer of its own. Hooks record lengths "
    "that are given as `monitor.microbatch(seq_lens=...)`, PyTorch's profiler records shapes with "
    "`record_shapes=True`."
)
_NOT_NAMED = (
    "which ones could not be told for certain: see the verdicts that are not healthy, if any"
)
_MOST_DEVICES = 4


def sentences(
    shares: Mapping[Cause, float],
    where: Mapping[Cause, str],
    slow: Sequence[SlowDevice],
    *,
    separated: bool,
    least: float,
    by_host: float = 0.0,
) -> tuple[str, ...]:
    """Sentences on the cost of each cause, the largest first; `shares` of the step.

    `least` is the share from which unnamed slow devices are mentioned as such. `by_host` is the
    share that those of `slow` cost which are slow because of their hosts.
    """
    hosts, slow = (
        [device for device in slow if device.by_host],
        [device for device in slow if not device.by_host],
    )
    shares = {**shares, Cause.HOST: shares.get(Cause.HOST, 0.0) - by_host} if hosts else shares
    lines = [(by_host, _held_back(hosts, by_host))] if hosts else []
    for cause, share in shares.items():
        if share < WORTH_SAYING:
            continue
        if cause is not Cause.DEVICE:
            place = f": {where[cause]}" if cause in where else ""
            line = f"{_CAUSES[cause]} {share:.1%} of the step{place}; {_ADVICE[cause]}."
        elif slow:
            line = _named(slow, share)
        else:
            unnamed = f"; {_NOT_NAMED}" if separated and share >= least else ""
            words = _CAUSES[cause] if separated else _NOT_SEPARATED
            line = f"{words} {share:.1%} of the step{unnamed}."
        lines.append((share, line))
    said = tuple(line for _, line in sorted(lines, key=lambda item: -item[0]))
    if shares.get(Cause.DEVICE, 0.0) < WORTH_SAYING:
        return (*said, _hidden(slow)) if slow else said
    return said if separated or slow else (*said, _NO_LENGTHS)


def _subject(slow: Sequence[SlowDevice], one: str, several: str) -> str:
    """The slow devices, and how much longer one of them computes or what several do."""
    stretches: dict[int, list[SlowDevice]] = {}
    for device in slow:
        stretches.setdefault(device.rank, []).append(device)
    if len(stretches) > 1:
        each = [
            f"{rank} ({_place(own[0])}, {listed(map(_how_long, own))})"
            for rank, own in stretches.items()
        ]
        return f"Ranks {listed(each, _MOST_DEVICES)} {several}"
    first = slow[0]
    took = "computed" if all(device.until is not None for device in slow) else "computes"
    much = f"{first.factor:.2f}x as long as it should {_when(first)}"
    if len(slow) > 1:
        much = f"longer than it should ({listed(map(_how_long, slow))})"
    return f"Rank {first.rank} ({_place(first)}) {took} {much}, {one}"


def _place(device: SlowDevice) -> str:
    return f"replica {device.dp}, stage {device.pp}"


def _how_long(device: SlowDevice) -> str:
    return f"{device.factor:.2f}x {_when(device)}"


def _named(slow: Sequence[SlowDevice], share: float) -> str:
    speed = f"check the device, or give it less work (speed {1.0 / slow[0].factor:.2f})"
    costs = f"which costs {share:.1%} of the step"
    return _subject(
        slow,
        f"{costs}: {speed}.",
        f"compute longer than they should, {costs}: check the devices, or give them less work.",
    )


def _held_back(slow: Sequence[SlowDevice], share: float) -> str:
    """Sentence on ranks that are slow because of their hosts, as their sensors show."""
    if share < WORTH_SAYING:
        return _hidden(slow)
    costs = f"which costs {share:.1%} of the step"
    return _subject(
        slow,
        f"{costs}: its host holds it back, not its device (see the evidence of its verdict).",
        f"compute longer than they should, {costs}: their hosts hold them back, not their devices "
        "(see the evidence of their verdicts).",
    )


def _hidden(slow: Sequence[SlowDevice]) -> str:
    why = "but the step waits for others"
    return _subject(
        slow, f"{why}: it costs next to none.", f"are slow, {why}: they cost next to none."
    )


def _when(device: SlowDevice) -> str:
    since = "from the start" if device.since is None else f"from step {device.since} on"
    if device.until is None:
        return since if device.since is None else f"since step {device.since}"
    return f"{since.removesuffix(' on')} to step {device.until - 1}"
