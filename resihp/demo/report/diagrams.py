"""The layouts of a run as boxes in boxes: replicas, stages, ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from resihp.contracts import Stage, Status, Verdict
from resihp.formatting import rank_list, ratio

from ..descriptions import layer_range
from ..findings import PlanPeriod, plan_periods
from ..record import DemoRecord


@dataclass(frozen=True, kw_only=True)
class RankBox:
    """One rank of a stage in a diagram: as wide as its share."""

    rank: int
    share: int
    of: int
    status: str
    note: str


@dataclass(frozen=True, kw_only=True)
class StageBox:
    """One stage of a diagram; `count` layers make its width, `was` the layers before, if others."""

    name: str
    count: int
    layers: str
    was: str
    ranks: tuple[RankBox, ...]


@dataclass(frozen=True, kw_only=True)
class Diagram:
    """The layout of one plan, `rows` a replica each with its microbatches."""

    title: str
    steps: str
    rows: tuple[tuple[tuple[StageBox, ...], int], ...]
    absent: tuple[tuple[int, str], ...]


def diagrams(record: DemoRecord) -> list[Diagram]:
    """The layout at the start and that of every plan applied."""
    every = plan_periods(record)
    before: list[PlanPeriod | None] = [None, *every[:-1]]
    return [_diagram(record, period, last) for period, last in zip(every, before, strict=True)]


def _diagram(record: DemoRecord, period: PlanPeriod, last: PlanPeriod | None) -> Diagram:
    layout, before = period.plan.layout, last.plan.layout.replicas if last else ()
    verdicts = {
        seen.verdict.rank: seen.verdict for seen in record.verdicts if seen.at_step <= period.start
    }
    rows = []
    for index, (replica, quota) in enumerate(zip(layout.replicas, period.plan.quotas, strict=True)):
        old = before[index].stages if index < len(before) else ()
        boxes = tuple(
            _stage_box(verdicts, stage, at, old[at] if at < len(old) else None)
            for at, stage in enumerate(replica.stages)
        )
        rows.append((boxes, quota))
    gone = {r for switch in record.switches if switch.step <= period.start for r in switch.lost}
    steps = f"steps {period.start}-{period.stop - 1}" if period.stop > period.start else "no step"
    absent = sorted(set(record.layout.ranks) - set(layout.ranks))
    title = "At the start"
    if period.switch is not None:
        lost = period.switch.lost
        how = f"without {rank_list(lost)}" if lost else "resized live"
        title = f"Plan {period.plan.version}, {how}"
    return Diagram(
        title=title,
        steps=steps,
        rows=tuple(rows),
        absent=tuple((rank, "dead" if rank in gone else "idle") for rank in absent),
    )


def _stage_box(
    verdicts: Mapping[int, Verdict], stage: Stage, at: int, old: Stage | None
) -> StageBox:
    was = layer_range(old).removeprefix("layers ") if old and old.chunks != stage.chunks else ""
    boxes = []
    for rank, share in zip(stage.ranks, stage.shares, strict=True):
        verdict = verdicts.get(rank)
        status = verdict.status if verdict else Status.HEALTHY
        is_slow = status in (Status.FAIL_SLOW, Status.SUSPECT)
        note = ratio(verdict.slowdown) if verdict and is_slow else ""
        boxes.append(
            RankBox(rank=rank, share=share, of=sum(stage.shares), status=status.value, note=note)
        )
    return StageBox(
        name=f"stage {at}",
        count=stage.layer_count,
        layers=layer_range(stage),
        was=was,
        ranks=tuple(boxes),
    )
