"""The layouts of a run as boxes in boxes: replicas, stages, ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from resihp.contracts import Stage, Status
from resihp.formatting import rank_list

from ..descriptions import layer_range
from ..findings import PlanPeriod, known_at, lost_by, plan_periods
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
    """The layout of one plan, `rows` a replica each with its microbatches (None: not known)."""

    title: str
    steps: str
    rows: tuple[tuple[tuple[StageBox, ...], int | None], ...]
    absent: tuple[tuple[int, str], ...]


def diagrams(record: DemoRecord) -> list[Diagram]:
    """The layout at the start and that of every plan applied."""
    every = plan_periods(record)
    before: list[PlanPeriod | None] = [None, *every[:-1]]
    return [_diagram(record, period, last) for period, last in zip(every, before, strict=True)]


def _diagram(record: DemoRecord, period: PlanPeriod, last: PlanPeriod | None) -> Diagram:
    rows = []
    quotas: Sequence[int | None] = period.quotas or [None] * period.layout.dp
    for index, (replica, quota) in enumerate(zip(period.layout.replicas, quotas, strict=True)):
        old = _stages(last, index)
        boxes = tuple(
            _stage_box(record, period, stage, at, old[at] if at < len(old) else None)
            for at, stage in enumerate(replica.stages)
        )
        rows.append((boxes, quota))
    gone = lost_by(record, period.start)
    steps = f"steps {period.start}-{period.stop - 1}" if period.stop > period.start else "no step"
    absent = sorted(set(record.layout.ranks) - set(period.layout.ranks))
    return Diagram(
        title=_title(period),
        steps=steps,
        rows=tuple(rows),
        absent=tuple((rank, "dead" if rank in gone else "idle") for rank in absent),
    )


def _stages(period: PlanPeriod | None, replica: int) -> Sequence[Stage]:
    if period is None or replica >= period.layout.dp:
        return ()
    return period.layout.replicas[replica].stages


def _title(period: PlanPeriod) -> str:
    if period.switch is None:
        return "At the start"
    if period.switch.lost:
        return f"Plan {period.version}, without {rank_list(period.switch.lost)}"
    return f"Plan {period.version}, resized live"


def _stage_box(
    record: DemoRecord, period: PlanPeriod, stage: Stage, at: int, old: Stage | None
) -> StageBox:
    was = layer_range(old).removeprefix("layers ") if old and old.chunks != stage.chunks else ""
    verdicts = known_at(record, period.start)
    boxes = []
    for rank, share in zip(stage.ranks, stage.shares, strict=True):
        verdict = verdicts.get(rank)
        status = verdict.status if verdict else Status.HEALTHY
        note = f"{verdict.slowdown:.2f}x" if verdict and _slow(status) else ""
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


def _slow(status: Status) -> bool:
    return status in (Status.FAIL_SLOW, Status.SUSPECT)
