"""Which images stay in memory when ranks and lineages change."""

from __future__ import annotations

from resihp.checkpoint.format.index import FileIndex
from resihp.checkpoint.history import Lineage
from resihp.checkpoint.levels.host_memory import ImageStore, MemoryImage

OLD, NEW = Lineage("old", 1, 0), Lineage("new", 2, 4)
TWO, ONE = (0, 1), (0,)


def put(store: ImageStore, rank: int, step: int, lineage: Lineage, ranks: tuple[int, ...]) -> None:
    index = FileIndex(step, rank, lineage, ranks, (), 0)
    store.add(MemoryImage(index, [], b"", lambda: None))


def held(store: ImageStore) -> set[tuple[int, int, str]]:
    return {(index.rank, index.step, index.run) for index in store.indexes()}


def test_what_a_lost_rank_left_stays_until_the_new_lineage_is_as_well_kept() -> None:
    store = ImageStore(keep=2)
    for step in (2, 3):
        put(store, 0, step, OLD, TWO)
        put(store, 1, step, OLD, TWO)
    put(store, 0, 4, NEW, ONE)
    assert {(1, 3, "old"), (0, 3, "old")} <= held(store), "the newest of the old is still whole"
    put(store, 0, 5, NEW, ONE)
    assert held(store) == {(0, 4, "new"), (0, 5, "new")}


def test_what_a_rank_of_the_new_lineage_left_before_stays_until_it_sends_again() -> None:
    store = ImageStore(keep=1)
    put(store, 0, 3, OLD, TWO)
    put(store, 1, 3, OLD, TWO)
    put(store, 0, 4, NEW, TWO)
    assert held(store) == {(0, 4, "new"), (1, 3, "old")}
