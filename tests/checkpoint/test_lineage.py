"""A job that goes back: the newest of the living lineage comes back, the abandoned past goes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.checkpoint import (
    Checkpointer,
    HostMemory,
    IndependentRank,
    LocalDisk,
    PeerMemory,
    SharedStorage,
)
from resihp.checkpoint.history import UNKNOWN, Lineage, RunHistory, StoredCheckpoint, best_first
from resihp.checkpoint.levels import Level
from resihp.contracts import CheckpointError
from tests.checkpoint.helpers import assert_stamped, back_from, stamp, stamped

AGAIN = 1000
"""Added to the stamps of a step that is trained again."""


def train(saver: Checkpointer, steps: range, plus: int = 0) -> None:
    """Checkpoints of these steps, each complete before the next."""
    state = stamped(-1)
    for step in steps:
        stamp(state, step + plus)
        saver.save(step, state)
        assert saver.wait(300)
    assert not any(level.failed for level in saver.counters.levels.values())


@pytest.fixture
def levels(tmp_path: Path) -> list[Level]:
    return [LocalDisk(tmp_path / "disk", keep=9), SharedStorage(f"file://{tmp_path}/far", keep=9)]


@pytest.mark.parametrize("now", [1, 1 << 62], ids=["clock set back", "clock"])
def test_restored_from_an_older_step_and_trained_again(levels: list[Level], now: int) -> None:
    with Checkpointer(levels) as saver:
        train(saver, range(6))
    with Checkpointer(levels, clock=lambda: now) as saver:
        assert saver.restore(stamped(-1), step=2).step == 2
        assert [level.steps() for level in levels] == [[0, 1, 2, 3, 4, 5]] * 2, "only looked at"
        train(saver, range(3, 4), AGAIN)
    for level in levels:
        assert level.steps() == [0, 1, 2, 3]
        restored, into = back_from(level)
        assert restored.step == 3
        assert_stamped(into, 3 + AGAIN)


def go_back_without_disk(levels: list[Level], again: range) -> None:
    """Six steps on both levels; then, from step 2 on, others on the second one alone."""
    with Checkpointer(levels) as saver:
        train(saver, range(6))
    with Checkpointer(levels[1:]) as saver:
        saver.restore(stamped(-1), step=2)
        train(saver, again, AGAIN)


def test_a_level_that_was_away_does_not_bring_the_abandoned_past_back(levels: list[Level]) -> None:
    disk, shared = levels
    go_back_without_disk(levels, range(3, 5))
    assert disk.steps() == [0, 1, 2, 3, 4, 5]
    restored, into = back_from(disk, shared)
    assert (restored.step, restored.level) == (4, shared.name)
    assert_stamped(into, 4 + AGAIN)
    assert_stamped(back_from(disk, shared, step=5)[1], 5)  # asked for by name, it is given


def test_what_is_damaged_gives_way_to_its_own_past_alone(levels: list[Level]) -> None:
    disk, shared = levels
    go_back_without_disk(levels, range(3, 4))
    (file,) = Path(shared.name.removeprefix("file://")).glob("step-000000003/*.distcp")
    file.unlink()
    restored, into = back_from(disk, shared)
    assert (restored.step, restored.level) == (2, disk.name)
    assert_stamped(into, 2)
    assert f"step-000000003/{file.name}" in restored.skipped[0]


def test_what_came_after_the_restored_step_is_abandoned_though_the_next_save_is_later(
    levels: list[Level],
) -> None:
    disk, shared = levels
    go_back_without_disk(levels, range(5, 6))
    (file,) = Path(shared.name.removeprefix("file://")).glob("step-000000005/*.distcp")
    file.unlink()
    restored, into = back_from(disk, shared)
    assert restored.step == 2
    assert_stamped(into, 2)


def test_going_back_within_a_process(levels: list[Level]) -> None:
    memory = HostMemory()
    with Checkpointer([memory, *levels]) as saver:
        train(saver, range(8, 10))
        train(saver, range(3, 6), AGAIN)
        assert [level.steps() for level in (memory, *levels)] == [[5], [3, 4, 5], [3, 4, 5]]
        for level in (memory, *levels):
            assert_stamped(back_from(level)[1], 5 + AGAIN)


def test_a_peer_does_not_mix_runs() -> None:
    """Rank 1's newer image of step 7 is of another run than rank 0's."""
    own = HostMemory(keep=2)
    peers = PeerMemory(own, token="t")
    peers.connect(0, {0: peers.address})
    try:
        for rank, run in ((0, "one"), (1, "two")):
            state = {f"w{rank}": torch.full((5,), float(rank))}
            with Checkpointer([own], ranks=IndependentRank(rank, (0, 1), run=run)) as saver:
                saver.save(7, state)
                saver.wait()
        assert peers.steps() == []
        with pytest.raises(CheckpointError):
            back_from(peers, step=7)
    finally:
        peers.close()


def test_files_of_different_runs_are_no_checkpoint(tmp_path: Path) -> None:
    disk = LocalDisk(tmp_path)
    for run in ("one", "two"):
        for rank in (0, 1):
            state = {f"w{rank}": torch.zeros(5)}
            with Checkpointer([disk], ranks=IndependentRank(rank, (0, 1), run=run)) as saver:
                saver.save(1 if run == "one" else 2, state)
    for name in ("__1_0.distcp", "__1.index.json"):
        (tmp_path / "step-000000001" / name).rename(tmp_path / "step-000000002" / name)
    with pytest.raises(CheckpointError, match="different runs"):
        disk.open(2)


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: LocalDisk(folder, keep=1),
        lambda folder: SharedStorage(f"file://{folder}", keep=1),
    ],
    ids=["disk", "shared"],
)
def test_what_comes_late_from_an_abandoned_past_replaces_nothing(
    tmp_path: Path, make: Callable[[Path], Level]
) -> None:
    level, state = make(tmp_path), stamped(7 + AGAIN)
    with Checkpointer([level], clock=lambda: 10) as late:
        train(late, range(6, 7))
        with Checkpointer([make(tmp_path)], clock=lambda: 20) as saver:
            saver.save(7, state)
        stamp(state, 7)
        late.save(7, state)
        assert late.wait(300)
        counters = late.counters.levels[level.name]
        assert (counters.saved, counters.failed, counters.newest_step) == (1, 1, 6)
    assert_stamped(back_from(level)[1], 7 + AGAIN)
    assert level.steps() == [7]
    assert not list(tmp_path.glob(".*.part"))
    assert len(list(tmp_path.rglob("*.distcp"))) == 1


def test_a_run_from_the_beginning_is_the_newest_whatever_the_clock(tmp_path: Path) -> None:
    """In the folder of an earlier run, without restore, while the clock was set back."""
    disk = LocalDisk(tmp_path)
    with Checkpointer([disk], clock=lambda: 1 << 40) as saver:
        train(saver, range(6))
    with Checkpointer([disk], clock=lambda: 1) as saver:
        train(saver, range(3), AGAIN)
    assert disk.steps() == [1, 2]
    restored, into = back_from(disk)
    assert restored.step == 2
    assert_stamped(into, 2 + AGAIN)


founds = st.builds(
    StoredCheckpoint,
    st.integers(0, 9),
    st.builds(Lineage, st.just(""), st.integers(1, 4), st.integers(0, 9)),
).map(
    lambda f: StoredCheckpoint(
        f.step, Lineage(f"run{f.lineage.born}", f.lineage.born, f.lineage.first)
    )
)


@given(st.lists(founds, max_size=12))
def test_nothing_newer_began_at_or_before_what_is_living(found: list[StoredCheckpoint]) -> None:
    best = best_first(found)
    assert len(best) == len(set(best))
    for one in best:
        assert all(o.lineage.born <= one.lineage.born or o.lineage.first > one.step for o in found)
    for one in set(found) - set(best):
        assert any(o.lineage.born > one.lineage.born and o.lineage.first <= one.step for o in found)


def test_what_does_not_tell_its_lineage_is_the_last_choice() -> None:
    told = StoredCheckpoint(3, Lineage("a", 5, 2))
    assert best_first([StoredCheckpoint(9, UNKNOWN), told]) == [told, StoredCheckpoint(9, UNKNOWN)]


def test_a_lineage_lasts_while_steps_go_up() -> None:
    ticks = iter([10, 20, 5, 5])
    descent = RunHistory("r", lambda: next(ticks))
    assert descent.at(4) is descent.at(5)
    back = descent.at(5)
    assert (back.run, back.born, back.first) == ("r-1", 20, 5)
    descent.branch(restored=3, newest_born=90)
    assert (descent.at(6).born, descent.at(7).first) == (91, 4)
    descent.branch(restored=7, newest_born=0)
    assert descent.at(7).first == 7, "saved again"
