"""Sentences of `Plan.reason`: changes of a plan and their causes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from resihp.contracts import Action, ContractError, Job, Layout, Place, Plan, Schedule
from resihp.formatting import byte_size, duration, listed, noun_for, numbers, plural, rank_list

from .link_costs import ALL_LINKS_HEALTHY, LinkSlowdowns, is_in_use
from .memory import fullest_rank, own_schedule

_SHOWN = 12
SCHEDULE_NAMES = {
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
    links: LinkSlowdowns = ALL_LINKS_HEALTHY,
) -> tuple[str, ...]:
    """Sentences about devices and links that are not healthy, new ranks, replicas, layers and
    quotas."""
    faulty = [rank for rank, speed in sorted(speeds.items()) if speed != 1.0]
    before, after = _places(old, faulty), _places(new, faulty)
    by_rank = (
        _rank_sentence(old, new, rank, speeds[rank], before.get(rank), after.get(rank))
        for rank in faulty
    )
    sentences = [sentence for sentence in by_rank if sentence]
    if len(sentences) > _SHOWN:
        more = len(sentences) - _SHOWN
        sentences = [*sentences[:_SHOWN], f"{more} more devices are not at full speed"]
    sentences += _link_sentences(old, new, links)
    healthy = set(old.ranks) - set(new.ranks) - set(faulty)
    if healthy:
        verb = "is" if len(healthy) == 1 else "are"
        sentences.append(f"{rank_list(healthy)} {verb} healthy and left out")
    joined = set(new.ranks) - set(old.ranks)
    if joined:
        verb = "takes" if len(joined) == 1 else "take"
        again = " again" if joined <= set(job.layout.ranks) else ""
        sentences.append(f"{rank_list(joined)} {verb} part{again}")
    sentences += _replica_sentences(old, new)
    if len(set(quotas)) > 1:
        sentences.append(f"microbatches of the replicas: {numbers(quotas)}")
    sentences += _in_flight_sentences(new)
    if schedule is not job.schedule and (job.schedules or job.schedule is Schedule.INTERLEAVED):
        sentences.append(f"the pipelines run {SCHEDULE_NAMES[schedule]}")
    return tuple(sentences) or ("all devices are healthy: nothing to change",)


def memory_reasons(job: Job, current: Plan) -> tuple[str, ...]:
    """Sentence on the memory that a current plan lacks, if it does."""
    budget = job.memory.budget_bytes
    if budget is None:
        return ()
    schedule = own_schedule(job, current)
    try:
        needed, rank = fullest_rank(job, current.layout, current.quotas, schedule)
    except ContractError:  # it cannot run within `max_in_flight`
        return ()
    if needed <= budget:
        return ()
    sizes = f"{byte_size(needed)} of {byte_size(budget)}"
    return (f"the present layout needs {sizes} on rank {rank}",)


def action_reason(action: Action | None, cost_ms: float, restart_ms: float) -> str:
    """Sentence on the action by which a job that can restart applies a plan, and on its cost."""
    if action is Action.RESTART:
        return f"applied by a restart, for {duration(cost_ms)} of pause and of work done again"
    return f"applied live, for {duration(cost_ms)}; a restart would cost {duration(restart_ms)}"


def _places(layout: Layout, ranks: Iterable[int]) -> dict[int, Place]:
    """Places of those of the ranks that work in the layout."""
    wanted = set(ranks)
    return {
        rank: Place(rank, dp, pp, stage.ranks.index(rank))
        for dp, replica in enumerate(layout.replicas)
        for pp, stage in enumerate(replica.stages)
        for rank in wanted.intersection(stage.ranks)
    }


def _rank_sentence(
    old: Layout, new: Layout, rank: int, speed: float, before: Place | None, after: Place | None
) -> str:
    if speed <= 0.0:
        return f"rank {rank} has stopped" + (" and is left out" if before else "")
    state = f"rank {rank} runs at {speed:.0%} of its speed"
    if after is None:
        return f"{state} and is left out" if before else ""
    stage = new.stage_at(after)
    share, units = stage.shares[after.tp], sum(stage.shares)
    if stage.tp == 1:
        layers = plural(stage.layer_count, "layer")
        return f"{state}: stage {after.pp} of replica {after.dp} holds {layers}"
    verb = "holds"
    if before is not None:
        past = old.stage_at(before).shares
        verb = "keeps" if (past[before.tp], sum(past)) == (share, units) else verb
    return f"{state} and {verb} {share} of {units} units of its stage"


def _link_sentences(old: Layout, new: Layout, links: LinkSlowdowns) -> list[str]:
    """Sentences about slow links and groups, and about their ranks that have changed places."""
    sentences, ends = [], dict.fromkeys(rank for pair in links.links for rank in pair)
    for link, factor in sorted(links.links.items()):
        ranks = f"ranks {link[0]} and {link[1]}"
        sentence = f"transfers between {ranks} take {factor:.3g} times as long"
        sentences.append(sentence if is_in_use(new, link) else f"{sentence}: none goes that way")
    for group, factor in links.groups:
        members = sorted(group)
        ends |= dict.fromkeys(members)
        sentences.append(f"collectives of {rank_list(members)} take {factor:.3g} times as long")
    for pair, factor in sorted(links.nodes.items()):
        nodes = f"nodes {pair[0]} and {pair[1]}"
        sentences.append(f"all links between {nodes} count as slow by {factor:.3g}")
    if len(sentences) > _SHOWN:
        sentences = [*sentences[:_SHOWN], f"{len(sentences) - _SHOWN} more links are slow"]
    before, after = _places(old, ends), _places(new, ends)
    moved = [
        f"rank {rank} works in stage {now.pp} of replica {now.dp} instead of stage {was.pp} of "
        f"replica {was.dp}"
        for rank in sorted(ends)
        if (was := before.get(rank)) and (now := after.get(rank))
        if (was.dp, was.pp) != (now.dp, now.pp)
    ]
    return [*sentences, *moved[:_SHOWN]]


def _in_flight_sentences(new: Layout) -> list[str]:
    """Sentences about replicas that hold more in flight than others of as many stages."""
    held = Counter((replica.in_flight) for replica in new.replicas if replica.in_flight)
    return [
        f"microbatches in flight per stage {numbers(counts)} in {plural(count, 'replica')}"
        for counts, count in held.most_common(_SHOWN)
    ]


def _replica_sentences(old: Layout, new: Layout) -> list[str]:
    sentences = []
    if new.dp != old.dp:
        sentences.append(f"{plural(new.dp, 'replica')} instead of {old.dp}")
    usual = [stage.layer_count for stage in old.replicas[0].stages]
    uneven: dict[tuple[int, ...], list[int]] = {}
    for index, replica in enumerate(new.replicas):
        counts = tuple(stage.layer_count for stage in replica.stages)
        if list(counts) != usual:
            uneven.setdefault(counts, []).append(index)
    for counts, members in list(uneven.items())[:_SHOWN]:
        replicas = f"{noun_for(len(members), 'replica')} {listed(members, _SHOWN)}"
        sentences.append(f"layers per stage {numbers(counts)} in {replicas}")
    return [*sentences, *_group_sentences(old, new)]


def _group_sentences(old: Layout, new: Layout) -> list[str]:
    """Sentences about longer replicas that consist of several, and about ranks in other groups."""
    homes = {place.rank: (place.dp, place.pp) for place in old.places()}
    sentences, moved = [], list[int]()
    for index, replica in enumerate(new.replicas):
        origins = set[int]()
        for stage in replica.stages:
            known = [rank for rank in stage.ranks if rank in homes]
            for home, _ in Counter(homes[rank] for rank in known).most_common(1):
                moved += [rank for rank in known if homes[rank] != home]
                origins.add(home[0])
        if len(origins) > 1 and len(replica.stages) > max(len(r.stages) for r in old.replicas):
            sources = listed(sorted(origins), _SHOWN)
            sentences.append(f"replica {index} consists of stages of replicas {sources}")
    if moved:
        verb = "works" if len(moved) == 1 else "work"
        sentences.append(f"{rank_list(sorted(moved))} {verb} in other groups")
    return sentences
