"""Layout of a job from the process groups in its profiles, else from who sends to whom."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from resihp.contracts import ContractError, Layout
from resihp.layout.rank_groups import RankDescription, layout_of

from ._rank_records import RankRecords

_TENSOR = re.compile(r"(?:mesh_)?tp|tensor_model_parallel_group", re.IGNORECASE)
_PIPELINE = re.compile(r"(?:mesh_)?pp|pipeline_model_parallel_group", re.IGNORECASE)


def layout_of_ranks(ranks: Sequence[RankRecords], chunks: int) -> Layout:
    """The layout, with `chunks` model chunks in each stage.

    A replica of which any rank was recorded is whole: the groups of its other ranks are those of a
    regular grid, where none are listed. Replicas of which none was recorded are left out.
    """
    recorded = sorted(one.rank for one in ranks)
    tensor = _groups(ranks, _TENSOR)
    pipeline = _groups(ranks, _PIPELINE) or _chains(ranks)
    described: dict[int, RankDescription] = {}
    for rank in recorded:
        group, stages = tensor.get(rank, (rank,)), pipeline.get(rank, (rank,))
        for mate in group:
            for stage in stages:
                at = mate + stage - rank
                own = tensor.setdefault(at, _shifted(group, stage - rank))
                order = pipeline.setdefault(at, _shifted(stages, mate - rank))
                described[at] = RankDescription(at, own, order, len(order) * chunks, chunks)
    return layout_of([described[rank] for rank in sorted(described)])


_Groups = dict[int, tuple[int, ...]]


def _shifted(ranks: Iterable[int], by: int) -> tuple[int, ...]:
    return tuple(rank + by for rank in ranks)


def _groups(ranks: Iterable[RankRecords], kind: re.Pattern[str]) -> _Groups:
    """The group of a kind of every rank that is in one of several ranks."""
    return {
        rank: group.ranks
        for one in ranks
        for group in one.groups
        if kind.fullmatch(group.description) and len(group.ranks) > 1
        for rank in group.ranks
    }


def _chains(ranks: Sequence[RankRecords]) -> _Groups:
    """Ranks that send to each other, recorded or not, form a pipeline, in the order of their
    numbers. Raises `ContractError` where these are not equally long."""
    talks = [(one.rank, each.communication) for one in ranks for each in one.exposed]
    pairs = [(rank, talk.peer) for rank, talk in talks if talk.is_p2p and talk.peer >= 0]
    root = {rank: rank for rank in (*(one.rank for one in ranks), *(peer for _, peer in pairs))}
    for pair in pairs:
        ends = [root[rank] for rank in pair]
        root = {of: min(ends) if at in ends else at for of, at in root.items()}
    chains: dict[int, list[int]] = {}
    for rank in sorted(root):
        chains.setdefault(root[rank], []).append(rank)
    lengths = sorted({len(chain) for chain in chains.values()})
    if len(lengths) > 1:
        found = " and ".join(map(str, lengths))
        raise ContractError(
            "pipelines",
            f"the ranks that send to each other form chains of {found} ranks; are files missing?",
        )
    return {rank: tuple(chain) for chain in chains.values() for rank in chain}
