"""What a plan changes and why, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from resihp.contracts import Job, Layout, Place, Schedule, Stage

_SHOWN = 12
SCHEDULE_WORDS = {
    Schedule.ONE_F_ONE_B: "1F1B",
    Schedule.EAGER_1F1B: "eager 1F1B",
    Schedule.INTERLEAVED: "interleaved 1F1B",
    Schedule.ZERO_BUBBLE: "1F1B with a split backward",
}


def reasons(
    job: Job,
    old: Layout,
    new: Layout,
    quotas: Sequence[int],
    speeds: Mapping[int, float],
    schedule: Schedule,
) -> tuple[str, ...]:
    """Sentences about every device that is not healthy, about layers, replicas and quotas."""
    faulty = [rank for rank, speed in sorted(speeds.items()) if speed != 1.0]
    before, after = _places(old, faulty), _places(new, faulty)
    told = [_of_rank(new, rank, speeds[rank], before.get(rank), after.get(rank)) for rank in faulty]
    told = [sentence for sentence in told if sentence]
    if len(told) > _SHOWN:
        told = [*told[:_SHOWN], f"{len(told) - _SHOWN} more devices are not at full speed"]
    joined = sorted(set(new.ranks) - set(old.ranks))
    if joined:
        again = " again" if set(joined) <= set(job.layout.ranks) else ""
        told.append(f"{_ranks(joined)} {'take' if len(joined) > 1 else 'takes'} part{again}")
    told += _of_replicas(old, new)
    if len(set(quotas)) > 1:
        told.append(f"microbatches of the replicas: {_numbers(quotas)}")
    if schedule is not job.schedule and (job.schedules or job.schedule is Schedule.INTERLEAVED):
        told.append(f"the pipelines run {SCHEDULE_WORDS[schedule]}")
    return tuple(told) or ("all devices are healthy: nothing to change",)


def _places(layout: Layout, ranks: Iterable[int]) -> dict[int, Place]:
    """Where those of the ranks are that are in the layout."""
    wanted = set(ranks)
    return {
        rank: Place(rank, dp, pp, stage.ranks.index(rank))
        for dp, replica in enumerate(layout.replicas)
        for pp, stage in enumerate(replica.stages)
        for rank in wanted.intersection(stage.ranks)
    }


def _of_rank(
    new: Layout, rank: int, speed: float, before: Place | None, after: Place | None
) -> str:
    if speed <= 0.0:
        return f"rank {rank} has stopped" + (" and is left out" if before else "")
    state = f"rank {rank} runs at {speed:.0%} of its speed"
    if after is None:
        return f"{state} and is left out" if before else ""
    stage = new.stage_at(after)
    share, units = stage.shares[after.tp], sum(stage.shares)
    if stage.tp == 1:
        return f"{state}: stage {after.pp} of replica {after.dp} holds {_layers(stage)}"
    return f"{state} and holds {share} of {units} units of its stage"


def _of_replicas(old: Layout, new: Layout) -> list[str]:
    told = []
    if new.dp != old.dp:
        told.append(f"{new.dp} replicas instead of {old.dp}")
    usual = [stage.layer_count for stage in old.replicas[0].stages]
    uneven: dict[tuple[int, ...], list[int]] = {}
    for index, replica in enumerate(new.replicas):
        counts = tuple(stage.layer_count for stage in replica.stages)
        if list(counts) != usual:
            uneven.setdefault(counts, []).append(index)
    for counts, members in list(uneven.items())[:_SHOWN]:
        told.append(f"layers per stage {_numbers(counts)} in {_named('replica', members)}")
    return told


def layer_ranges(stage: Stage) -> str:
    """The layers of a stage, first and last of each model chunk.

    >>> layer_ranges(Stage((0,), (0, 4), more_layers=((8, 9), (12, 12))))
    '0-3, 8'
    """
    spans = [(start, stop - 1) for start, stop in stage.chunks if stop > start]
    told = [f"{first}-{last}" if last > first else str(first) for first, last in spans]
    return ", ".join(told) or "none"


def _layers(stage: Stage) -> str:
    return f"{stage.layer_count} layer{'' if stage.layer_count == 1 else 's'}"


def _ranks(ranks: Sequence[int]) -> str:
    return _named("rank", ranks)


def _named(noun: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN])) + (", …" if len(numbers) > _SHOWN else "")
    return f"{noun}{'' if len(numbers) == 1 else 's'} {shown}"


def _numbers(values: Sequence[int]) -> str:
    shown = ", ".join(map(str, values[:32]))
    return shown + (", …" if len(values) > 32 else "")
