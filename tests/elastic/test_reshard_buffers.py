"""What a change of layout holds twice: bounded, in files beyond that, or the plan is refused."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from resihp.contracts import ContractError, Layout
from resihp.elastic.models import Llama
from resihp.elastic.optim import Optimizer
from resihp.elastic.reshard.buffers import (
    HeldState,
    ReceivedBytes,
    ReshardBudget,
    ShardAllocator,
    Spill,
    buffer_zeros,
    held_twice,
    to_spill,
)
from resihp.elastic.step import Setup
from resihp.layout import Param, Range, StateCopies
from tests.elastic.engine_job import ALONE, GRID, SHAPE, SHIFTED, UNEVEN, Case, batch, plan, run
from tests.elastic.held import resident_bytes

PARAMETERS = Llama(SHAPE).parameters
LAYOUTS = (GRID, SHIFTED, UNEVEN, ALONE)
MOMENTS = 2
LINE = Param("layers.0.w", (8, 5), 0)


@given(
    old=st.sampled_from(LAYOUTS),
    new=st.sampled_from(LAYOUTS),
    limit=st.integers(1 << 10, 1 << 18),
    rank=st.integers(0, 7),
    copies=st.sampled_from([None, StateCopies(1), StateCopies(2)]),
)
def test_what_is_not_spilled_fits_the_limit(
    old: Layout, new: Layout, limit: int, rank: int, copies: StateCopies | None
) -> None:
    memory = ReshardBudget(limit_bytes=limit)
    before, after = (
        HeldState.by_rank(layout, PARAMETERS, copies).get(rank, HeldState())
        for layout in (old, new)
    )
    twice, sizes = held_twice(before, after, MOMENTS), ReceivedBytes.of(before, after, MOMENTS)
    excess = memory.excess(twice)
    spilled = to_spill(sizes, excess)
    in_files = sum(sizes.state[param] for param in spilled.state)
    in_files += sum(sizes.gradients[param] for param in spilled.gradients)
    assert memory.buffer_bytes + twice - in_files <= limit
    if excess == 0:
        assert not spilled.state
    if spilled.gradients:
        assert set(spilled.state) == set(sizes.state), (
            "what the pause fills stays in memory if it can"
        )
    if old == new:
        assert twice == 0


@pytest.mark.parametrize(
    ("old", "new", "rows"),
    [((0, 4), (0, 4), 0), ((0, 4), (0, 5), 4), ((0, 5), (1, 4), 3), ((0, 4), None, 0)],
)
def test_held_twice_is_the_lesser_of_what_goes_and_comes(
    old: Range, new: Range | None, rows: int
) -> None:
    before, after = (
        HeldState({LINE: span}, {LINE: (span,)}) if span else HeldState() for span in (old, new)
    )
    assert held_twice(before, after, MOMENTS) == (MOMENTS + 2) * rows * LINE.row_numel * 4


def test_state_that_stays_where_it_is_is_held_once() -> None:
    """Of a parameter that stays, moments and gradients of two rows come."""
    before = HeldState({LINE: (0, 8)}, {LINE: ((0, 4),)})
    after = HeldState({LINE: (0, 8)}, {LINE: ((0, 4), (6, 8))})
    sizes = ReceivedBytes.of(before, after, MOMENTS)
    assert (sizes.state[LINE], sizes.gradients[LINE]) == (MOMENTS * 40, 40)
    assert held_twice(before, after, MOMENTS) == 0, "nothing goes"


def test_a_plan_is_refused_only_where_nothing_can_be_spilled(tmp_path: Path) -> None:
    narrow, wide = ReshardBudget(1 << 12, None), ReshardBudget(1 << 30, None)
    assert wide.refusal(GRID, UNEVEN, PARAMETERS, MOMENTS) is None
    assert ReshardBudget(1 << 12, tmp_path).refusal(GRID, UNEVEN, PARAMETERS, MOMENTS) is None
    assert narrow.refusal(GRID, GRID, PARAMETERS, MOMENTS) is None
    why = narrow.refusal(GRID, UNEVEN, PARAMETERS, MOMENTS)
    assert why is not None
    assert "twice" in why


def test_on_a_device_nothing_is_spilled_and_its_free_memory_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"mem_get_info": (1 << 30, 1 << 32), "memory_reserved": 3 << 29}
    for name, found in {**sizes, "max_memory_allocated": 1 << 29}.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, found=found: found)
    budget, device = ReshardBudget(1 << 12, tmp_path), torch.device("cuda", 0)
    assert budget.on(torch.device("cpu")) is budget
    assert budget.on(device) == ReshardBudget(1 << 30, None)  # half of what is free or cached
    assert ReshardBudget(1 << 31).on(device).limit_bytes == 1 << 31
    assert budget.on(device).buffer_bytes >= budget.buffer_bytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (-(1 << 30), 1 << 32))
    assert budget.on(device).refusal(GRID, UNEVEN, PARAMETERS, MOMENTS) is not None


def test_a_thread_keeps_nothing_of_the_buffers_that_it_has_freed() -> None:
    """glibc keeps what is freed at the end of a thread's heap, once it has grown to that size."""
    numel, grown = 4 << 20, []

    def use() -> None:
        before = resident_bytes()
        for _ in range(3):
            buffer_zeros(2, numel // 2, device=torch.device("cpu"))
        grown.append(resident_bytes() - before)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert grown[0] < numel * 4 // 2


def test_settings_that_make_no_sense_are_named(tmp_path: Path) -> None:
    with pytest.raises(ContractError, match="limit_bytes"):
        ReshardBudget(0)
    with pytest.raises(ContractError, match="spill"):
        ReshardBudget(spill=tmp_path / "nowhere")
    with pytest.raises(ContractError, match="spill"):
        ReshardBudget(spill=str(tmp_path / "nowhere"))  # type: ignore[arg-type]
    assert ReshardBudget(spill=str(tmp_path)).spill == tmp_path  # type: ignore[arg-type]


def test_what_is_written_to_the_file_shows_in_the_tensor(tmp_path: Path) -> None:
    room = ShardAllocator(Spill({LINE}), tmp_path)
    seen = room.allot(LINE, torch.empty(8, 5))
    assert not list(tmp_path.iterdir()), "the file has no name any more"
    written = room.destination(seen)
    written.copy_(torch.arange(40.0).view(8, 5))
    assert seen.sum() == 780
    seen.add_(1.0)
    assert written.sum() == 780, "an update is the tensor's own"
    assert room.destination(seen[2:4]).equal(written[2:4])
    assert seen.sum() == 820
    assert room.spilled_bytes == 160
    room.gradient(LINE, torch.empty(8, 5))
    assert room.spilled_bytes == 160


def test_gradients_can_be_in_a_file_too(tmp_path: Path) -> None:
    room = ShardAllocator(Spill((), {LINE}), tmp_path)
    gradient = room.gradient(LINE, torch.empty(8, 5))
    assert gradient.equal(torch.zeros(8, 5))
    assert room.spilled_bytes == 160
    assert not list(tmp_path.iterdir())


def test_a_disk_without_room_is_an_error_not_a_crash(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"large|space"):
        ShardAllocator(Spill({LINE}), tmp_path).allot(
            LINE, torch.empty(1, device="meta").expand(1 << 48)
        )
    assert not list(tmp_path.iterdir())


def test_where_staying_is_no_choice_memory_takes_the_place_of_a_full_disk(tmp_path: Path) -> None:
    room = ShardAllocator(Spill({LINE}), tmp_path / "gone", is_forced=True)
    seen = room.allot(LINE, torch.empty(8, 5))
    moment = room.allot(LINE, torch.empty(8, 5))
    room.destination(seen).fill_(1.0)
    assert (float(seen.sum()), float(moment.sum())) == (40.0, 0.0)


def adagrad() -> Setup:
    """Its state is there before the first update."""
    make = Optimizer(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1)
    return Setup(Llama(SHAPE), make, batch)


def test_state_that_an_optimizer_makes_at_once_goes_to_files_too(tmp_path: Path) -> None:
    plans = (plan(1, UNEVEN, from_step=2),)
    outcome = run(Case(GRID, 5, plans, setup=adagrad), tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert all(event["spilled"] for event in outcome.switches), outcome.logs
    before, after = outcome.full_state("before0"), outcome.full_state("after1")
    assert before.keys() == after.keys()
    for key, held in before.items():
        assert all(torch.equal(*pair) for pair in zip(held, after[key], strict=True)), key


def test_a_job_goes_on_without_the_plan_that_it_refuses(tmp_path: Path) -> None:
    memory = ReshardBudget(limit_bytes=1 << 13, spill=None)
    plans = (plan(1, UNEVEN, from_step=99), plan(2, GRID, quotas=(4, 2), from_step=2))
    outcome = run(Case(GRID, 6, plans, memory=memory), tmp_path)
    assert set(outcome.exit_codes.values()) == {0}, outcome.logs
    assert "plan 1 is refused: rank" in outcome.logs
    assert {event["version"] for event in outcome.switches} == {2}, outcome.logs


def test_a_change_within_the_limit_touches_no_file(tmp_path: Path) -> None:
    plans = (plan(1, UNEVEN, from_step=2),)
    outcome = run(Case(GRID, 5, plans, memory=ReshardBudget(spill=None)), tmp_path)
    assert {event["version"] for event in outcome.switches} == {1}, outcome.logs
    assert all(event["spilled"] == 0 for event in outcome.switches), outcome.logs
