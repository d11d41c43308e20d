"""States that providers give: composites, tensors and values that are made while they are saved."""

from __future__ import annotations

import contextlib
import copy
import enum
import itertools
import re
import threading
from collections import UserDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from resihp.checkpoint import (
    Checkpointer,
    IndependentRank,
    LazyObject,
    LazyTensor,
    LocalDisk,
    ShardedTensorPiece,
)
from resihp.checkpoint.format import shard_file
from resihp.checkpoint.format.index import CHUNK_BYTES, spans
from resihp.checkpoint.history import Lineage
from resihp.checkpoint.restore import restore
from resihp.checkpoint.staging import objects, stager
from resihp.checkpoint.staging.stager import LEAST_CACHE_BYTES
from resihp.checkpoint.state_dict import ObjectEntry
from resihp.contracts import CheckpointError, ContractError
from tests.checkpoint.helpers import GatedDisk

PATIENCE_S = 100


class Engine:
    """A composite with a tensor, a converted one, a value, and a part that is a provider too."""

    def __init__(self, step: float, log: list[str], part: Engine | None = None) -> None:
        self.master, self.step, self.log, self.part = torch.full((700, 900), step), step, log, part
        self.weights: Tensor | None = None

    def provide_state(self) -> dict[str, object]:
        """Give references alone."""
        state: dict[str, object] = {
            "weights": LazyTensor.converted(self.master, torch.bfloat16),
            "master": self.master,
            "step": self.step,
            "layer": torch.nn.Linear(3, 2),
        }
        return state | ({"part": self.part} if self.part is not None else {})

    def load_state(self, state: Any) -> None:
        """Take what has been restored."""
        self.log.append(f"load with {sorted(state)}")
        self.step, self.weights = state["step"], state["weights"]


def test_a_composite_is_saved_and_restored_with_what_is_inside(tmp_path: Path) -> None:
    log: list[str] = []
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(7, {"engine": Engine(3.0, log, Engine(4.0, log)), "lr": 0.5})
        assert saver.wait(PATIENCE_S)
        assert not saver.counters.failures
        engine = Engine(0.0, log, Engine(0.0, log))
        into: dict[str, object] = {"engine": engine, "lr": 0.0}
        saver.restore(into)
    assert into == {"engine": engine, "lr": 0.5}
    inner, outer = ["layer", "master", "step", "weights"], ["layer", "master", "part", "step"]
    assert log == [f"load with {inner}", f"load with {[*outer, 'weights']}"], "inside first"
    for found, value in ((engine, 3.0), (engine.part, 4.0)):
        assert found is not None
        assert found.step == value
        assert torch.equal(found.master, torch.full((700, 900), value))
        assert found.weights is not None
        assert torch.equal(found.weights, found.master.bfloat16())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_a_converted_tensor(tmp_path: Path) -> None:
    master = torch.randn(1000, 1001).t()  # with gaps
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"w": LazyTensor.converted(master, torch.float16)})
    into = {"w": torch.zeros(1001, 1000, dtype=torch.float16)}
    dcp.load(into, checkpoint_id=tmp_path / "step-000000000", no_dist=True)
    assert torch.equal(into["w"], master.half())


@pytest.mark.parametrize(
    "view", [torch.arange(6.0).view(2, 3)[1:2, 0], torch.tensor([1 + 2j, 3]).conj()]
)
def test_a_view_is_converted_to_the_dtype_that_it_has(tmp_path: Path, view: Tensor) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"w": LazyTensor.converted(view, view.dtype)})
        saver.wait()
        into = {"w": torch.zeros_like(view)}
        saver.restore(into)
    assert torch.equal(into["w"], view)


def counting(pieces: list[int]) -> Callable[[int, int], Tensor]:
    def read(start: int, stop: int) -> Tensor:
        pieces.append(stop - start)
        return torch.arange(start, stop, dtype=torch.int64)

    return read


@pytest.mark.parametrize("cache", [None, LEAST_CACHE_BYTES])
def test_a_lazy_tensor_never_exists_as_a_whole(tmp_path: Path, cache: int | None) -> None:
    pieces: list[int] = []
    count = 5 << 20  # 40 MiB, more than the smallest cache
    lazy = LazyTensor((count,), torch.int64, counting(pieces))
    with Checkpointer([LocalDisk(tmp_path)], host_cache_bytes=cache) as saver:
        saver.save(0, {"a": torch.ones(5), "lazy": lazy})
        saver.fence()
        assert saver.wait(PATIENCE_S)
        assert max(pieces) * 8 <= CHUNK_BYTES
        into: dict[str, Any] = {"a": torch.zeros(5), "lazy": lazy}
        saver.restore(into)
    assert torch.equal(into["lazy"], torch.arange(count))


def test_lazy_shards_are_ranges_of_a_global_tensor(tmp_path: Path) -> None:
    whole = torch.randn(6, 4)
    for rank, (start, stop) in enumerate([(0, 1), (1, 6)]):
        rows = whole[start:stop]
        lazy = LazyTensor(
            (stop - start, 4), torch.float32, lambda a, b, rows=rows: rows.reshape(-1)[a:b],
            (rows,), (6, 4), (start, 0),
        )  # fmt: skip
        ranks = IndependentRank(rank, (0, 1), run="one")
        with Checkpointer([LocalDisk(tmp_path)], ranks=ranks, clock=lambda: 1) as saver:
            assert saver.save(0, {"w": lazy})
    into = torch.zeros(3, 4)
    piece = ShardedTensorPiece("w", (6, 4), (2, 0), into)
    restore([LocalDisk(tmp_path)], [piece], IndependentRank())
    assert torch.equal(into, whole[2:5])
    with pytest.raises(ContractError, match="lies outside"):
        LazyTensor((2,), torch.float32, counting([]), (), (6,), (5,))


def test_what_a_lazy_tensor_reads_may_change_after_its_fence(tmp_path: Path) -> None:
    disk, master = GatedDisk(tmp_path), torch.full((3 << 20,), 5.0)
    with Checkpointer([disk]) as saver:
        saver.save(0, {"w": LazyTensor.converted(master, torch.bfloat16), "b": torch.ones(9)})
        saver.fence([master])
        master.fill_(6.0)
        disk.gate.set()
        assert saver.wait(PATIENCE_S)
        into = {"w": torch.zeros(3 << 20, dtype=torch.bfloat16), "b": torch.zeros(9)}
        saver.restore(into)
    assert torch.equal(into["w"], torch.full_like(into["w"], 5.0))


def test_a_lazy_tensor_that_makes_something_else_costs_its_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = LazyTensor((9,), torch.int64, lambda a, b: torch.zeros(b - a))
    disk = LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.save(0, {"w": wrong})
        assert saver.wait(PATIENCE_S)
        saver.fence()
        assert saver.counters.levels[disk.name].failed == 1
        saver.save(1, {"w": torch.zeros(9)})
    assert disk.steps() == [1]
    assert "LazyTensor.read: made 9 of torch.float32: 9 elements of torch.int64" in caplog.text


def test_a_lazy_object_is_made_behind_the_training_thread(tmp_path: Path) -> None:
    made: list[threading.Thread] = []

    def make() -> list[int]:
        made.append(threading.current_thread())
        return [1, 2]

    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"index": LazyObject(make), "w": torch.ones(2)})
        assert saver.wait(PATIENCE_S)
        into: dict[str, Any] = {"index": None, "w": torch.zeros(2)}
        saver.restore(into)
    assert into["index"] == [1, 2]
    assert len(made) == 1
    assert made[0] is not threading.current_thread()


def test_a_lazy_object_is_made_once_for_levels_that_need_it_at_the_same_time() -> None:
    """One that packs the time, for example, differs from call to call."""
    both, made = threading.Barrier(2), itertools.count()

    def make() -> int:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)  # until the other level makes it too, which it should not
        return next(made)

    state = {"index": LazyObject(make)}
    mover = stager.Stager(IndependentRank())
    captured = mover.capture(0, Lineage("run"), mover.fit(state), {})
    checkpoint = mover.lend(captured, 0.0)
    assert checkpoint is not None
    with ThreadPoolExecutor(2) as levels:
        section = levels.submit(lambda: checkpoint.section)
        index = levels.submit(checkpoint.index).result(PATIENCE_S)
    (start, stop), *_ = spans(0, len(section.result()))
    assert index.is_intact(0, memoryview(section.result())[start:stop])
    assert next(made) == 1
    mover.close()


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"a": {"b": Engine(1.0, [])}}, "a.b"),
        ({"a": {"b": torch.nn.Linear(3, 2)}}, "a.b"),
        ({"a": [torch.nn.Linear(3, 2)]}, "a.0"),
    ],
)
def test_a_provider_where_none_is_looked_for_is_refused_by_name(
    tmp_path: Path, state: dict[str, object], name: str
) -> None:
    problem = f"{name}: providers, modules and optimizers are values of the state"
    with Checkpointer([LocalDisk(tmp_path)]) as saver, pytest.raises(ContractError, match=problem):
        saver.prepare(state)


class Schedule:
    """Has a part with a `state_dict` of its own in its own, as schedulers have."""

    def __init__(self, part: Schedule | None = None, count: Any = 0) -> None:
        self.part, self.count = part, count

    def state_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


def test_what_a_state_dict_holds_is_its_owners(tmp_path: Path) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {0: Schedule(Schedule(count=5)), "kind": Schedule})
        assert saver.wait(PATIENCE_S)
        into: dict[Any, Any] = {0: Schedule(Schedule()), "kind": None}
        saver.restore(into)
    assert into[0].part.count == 5
    assert into["kind"] is Schedule


ROW = {"loss": 1.0}


@pytest.mark.parametrize(
    ("saved", "now"),
    [
        ({"loss": 1.0}, None),
        (None, {"loss": 1.0, "at": {"step": 3}}),
        ({"loss": 1.0}, 0.5),
        ([ROW, {"w": torch.ones(2)}], [ROW, {"w": torch.zeros(2)}, {"a": 5, "w": torch.ones(3)}]),
        ([ROW, ROW, ROW], [ROW]),
        ([ROW], [ROW, 5, torch.ones(2), 6, torch.ones(2)]),
        ([ROW, {}, ROW], [ROW, {"a": 5}, ROW, ROW]),
        ([torch.ones(2)], [torch.zeros(2), torch.zeros(2), [torch.zeros(2)]]),
        ([ROW, torch.ones(2)], [5, torch.zeros(2)]),
        ({0.5: 7}, {"a": 5}),
        ({"a": 5}, {0.5: 7}),
        (torch.ones(5), torch.zeros(3)),
        (torch.ones(5), 0.5),
        (0.5, torch.ones(5)),
    ],
)
def test_a_stateful_takes_what_was_saved_whatever_its_structure_is_now(
    tmp_path: Path, saved: object, now: object
) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"s": Schedule(count=copy.deepcopy(saved))})
        assert saver.wait(PATIENCE_S)
        schedule = Schedule(count=copy.deepcopy(now))
        saver.restore({"s": schedule})
    assert str(schedule.count) == str(saved)


class Live(Schedule):
    """Gives what it has, without a copy."""

    added = 0

    def state_dict(self) -> dict[str, Any]:
        return vars(self)


def test_what_a_checkpoint_lacks_stays_with_its_owner(tmp_path: Path) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"s": Live(count=[ROW])})
        assert saver.wait(PATIENCE_S)
        rows = [ROW, ROW]
        live = Live(count=rows)
        live.added = 5
        saver.restore({"s": live})
    assert (live.count, live.added) == ([ROW], 5)
    assert rows == [ROW, ROW]


def test_a_state_provider_judges_values_alone(tmp_path: Path) -> None:
    """It need not look at what is filled in place."""
    log: list[str] = []
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"engine": Engine(3.0, log)})
        assert saver.wait(PATIENCE_S)
        engine = Engine(0.0, log)
        engine.step = {"count": 1}  # type: ignore[assignment]
        saver.restore({"engine": engine})
        assert engine.step == 3.0
        engine.master = torch.zeros(4)
        with pytest.raises(CheckpointError, match=r"shapes differ: engine\.master"):
            saver.restore({"engine": engine})
        with pytest.raises(CheckpointError, match=r"lacks engine\.part"):
            saver.restore({"engine": Engine(0.0, log, Engine(0.0, log))})


class Strict(Schedule):
    """Needs all that it has."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@pytest.mark.parametrize(
    ("saved", "now", "problem"),
    [
        (torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2), r"s\.bias .*\s*Missing key"),
        (torch.nn.Linear(4, 2), torch.nn.Linear(3, 2), r"s\.weight .*\s*size mismatch"),
        (torch.nn.Linear(3, 2), Strict(count=1), r"s\.part, s\.count .* 'count'"),
    ],
)
def test_an_owner_that_needs_what_is_not_there_refuses_the_checkpoint(
    tmp_path: Path, saved: object, now: object, problem: str
) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"s": saved})
        assert saver.wait(PATIENCE_S)
        with pytest.raises(CheckpointError, match=f"it lacks {problem}"):
            saver.restore({"s": now})


@pytest.mark.parametrize(
    "new", [Schedule(), torch.nn.Linear(3, 2), torch.optim.SGD([torch.ones(2)])]
)
def test_an_owner_of_which_a_checkpoint_has_nothing_refuses_it(tmp_path: Path, new: object) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"s": Schedule()})
        assert saver.wait(PATIENCE_S)
        with pytest.raises(CheckpointError, match="it lacks new"):
            saver.restore({"s": Schedule(), "new": new})


def test_a_checkpoint_with_files_of_some_ranks_has_to_have_everything(tmp_path: Path) -> None:
    """What it lacks may be in another one's file."""
    ranks, disk = IndependentRank(0, (0, 1), run="one"), LocalDisk(tmp_path, ranks=[0])
    with Checkpointer([disk], ranks=ranks) as saver:
        saver.save(0, {"s": Schedule(count=5)})
        assert saver.wait(PATIENCE_S)
    with pytest.raises(CheckpointError, match=r"it lacks s\.count\.a"):
        restore([disk], {"s": Schedule(count={"a": 5})}, ranks)
    restore([disk], {"s": Schedule(count=1)}, ranks)


class Scaled(torch.nn.Linear):
    """Has an extra state of varying size."""

    history = torch.zeros(1)

    def get_extra_state(self) -> Tensor:
        return self.history

    def set_extra_state(self, state: Tensor) -> None:
        self.history = state


def test_the_extra_state_of_a_module_may_have_grown(tmp_path: Path) -> None:
    saved, again = Scaled(3, 2), Scaled(3, 2)
    saved.history = torch.ones(5)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"model": saved})
        assert saver.wait(PATIENCE_S)
        saver.restore({"model": again})
    assert torch.equal(again.history, torch.ones(5))
    assert torch.equal(again.weight, saved.weight)


@pytest.mark.parametrize("key", [("en", "web"), 0.5, None])
def test_a_mapping_whose_keys_are_no_names_is_one_object(tmp_path: Path, key: object) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"seen": {key: 7, "all": {"more": 8}}, "w": torch.ones(2)})
        assert saver.wait(PATIENCE_S)
        into: dict[str, Any] = {"seen": {key: 0}, "w": torch.zeros(2)}
        saver.restore(into)
        assert into["seen"] == {key: 7, "all": {"more": 8}}
        for state in ({"seen": {key: {"w": torch.ones(2)}}}, {key: 7}):
            with pytest.raises(ContractError, match=re.escape(f"not {key!r}")):
                saver.prepare(state)  # type: ignore[arg-type]


class Split(str, enum.Enum):  # noqa: UP042 - whose `str` is not its value, unlike that of StrEnum
    """Names that many configurations use as keys."""

    TRAIN = "train"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_key_whose_text_is_not_its_value_is_restored(tmp_path: Path) -> None:
    """Its name is that of torch, which takes the text."""

    def seen(count: int) -> dict[str, Any]:
        rows = torch.full((2,), float(count))
        return {"seen": {Split.TRAIN: count, "rows": {Split.TRAIN: rows}}}

    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, seen(7) | {"schedule": Schedule(count={Split.TRAIN: 7})})
        assert saver.wait(PATIENCE_S)
        into = seen(0) | {"schedule": Schedule(count={})}
        saver.restore(into)
    assert into["schedule"].count == {Split.TRAIN: 7}
    assert into["seen"][Split.TRAIN] == 7
    assert list(into["seen"]) == [Split.TRAIN, "rows"]
    assert into["seen"]["rows"][Split.TRAIN].tolist() == [7.0, 7.0]
    read_by_torch = seen(0)
    dcp.load(read_by_torch, checkpoint_id=tmp_path / "step-000000000", no_dist=True)
    assert read_by_torch["seen"]["rows"][Split.TRAIN].tolist() == [7.0, 7.0]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner),
    max_leaves=6,
)


@settings(max_examples=15, deadline=None)
@given(states=st.lists(st.tuples(values, values), min_size=1, max_size=4))
def test_objects_are_those_of_their_save(
    tmp_path_factory: pytest.TempPathFactory, states: list[tuple[Any, Any]]
) -> None:
    box: list[Any] = [None]
    disk = LocalDisk(tmp_path_factory.mktemp("objects"), keep=9)
    with Checkpointer([disk]) as saver:
        for step, (first, second) in enumerate([*states, states[-1]]):
            box[0] = first
            saver.save(step, {"box": box, "value": second, "w": torch.ones(2)}, {"box": box})
            box[0] = "changed right after"
            saver.fence()
            assert saver.wait(PATIENCE_S)
        for step, (first, second) in enumerate([*states, states[-1]]):
            into: dict[str, Any] = {"box": None, "value": None, "w": torch.zeros(2)}
            restored = saver.restore(into, step=step)
            assert repr((into["box"], into["value"])) == repr(([first], second))
            assert repr(restored.extra) == repr({"box": [first]})


def test_extra_is_any_mapping_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        assert saver.save(0, {"w": torch.ones(2)}, extra=UserDict(cursor=5))
        assert saver.wait(PATIENCE_S)
        assert dict(saver.restore({"w": torch.zeros(2)}).extra) == {"cursor": 5}
        wrong: Any = [5]
        assert not saver.save(1, {"w": torch.ones(2)}, extra=wrong)
        assert "extra: a mapping of names to values, not list" in str(saver.counters.failures)
        as_given = ObjectEntry("resihp.extra.0", ("resihp", "extra", "0"), wrong)
        monkeypatch.setattr(stager, "extra_entry", lambda *_: as_given)
        saver.save(2, {"w": torch.ones(2)})  # as earlier versions did
        assert saver.wait(PATIENCE_S)
        assert saver.restore({"w": torch.zeros(2)}).extra == [5]


class Uncopied:
    """A value that refuses a deep copy."""

    number = 0

    def __deepcopy__(self, memo: object) -> Uncopied:
        raise AssertionError("copied")


def test_objects_that_did_not_change_are_neither_copied_nor_encoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[object] = []

    def encode(value: object) -> memoryview:
        encoded.append(copy.copy(value))
        return shard_file.encode_object(value)

    monkeypatch.setattr(objects, "encode_object", encode)
    table, uncopied, rng = {"rows": [*range(9)]}, Uncopied(), torch.zeros(3, dtype=torch.uint8)
    disk = LocalDisk(tmp_path, keep=9)
    with Checkpointer([disk]) as saver:
        for step in range(3):
            state = {"options": [table], "uncopied": uncopied, "name": "run", "w": torch.ones(2)}
            saver.save(step, state, extra={"rng": rng})
            rng += 1
            assert saver.wait(PATIENCE_S)
            saver.fence()
        assert not saver.counters.failures
        assert len([one for one in encoded if isinstance(one, Uncopied)]) == 1
        assert sum(one == [*range(9)] for one in encoded) == 1, "the rows"
        uncopied.number = 5
        saver.save(3, state)
        assert saver.wait(PATIENCE_S)
        for step, number in ((2, 0), (3, 5)):
            into: dict[str, Any] = {**state, "uncopied": None}
            restored = saver.restore(into, step=step)
            assert into["uncopied"].number == number
            if step == 2:
                assert torch.equal(restored.extra["rng"], torch.full_like(rng, 2))


def test_moments_have_the_strides_of_their_parameters(tmp_path: Path) -> None:
    """A fused optimizer goes through both in the order of memory."""

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)

    def update(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        pixels = torch.arange(512.0).sin().view(2, 4, 8, 8)
        model(pixels.contiguous(memory_format=torch.channels_last)).square().mean().backward()
        optimizer.step()

    (model, optimizer), (again, its_optimizer) = made(0), made(1)
    update(model, optimizer)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        assert saver.save(1, {"model": model, "optimizer": optimizer})
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.restore({"model": again, "optimizer": its_optimizer})
    update(model, optimizer)
    update(again, its_optimizer)
    assert all(map(torch.equal, model.parameters(), again.parameters()))
    for parameter in again.parameters():
        moment = its_optimizer.state[parameter]["exp_avg"]
        assert moment.stride() == parameter.stride()
        assert not moment.requires_grad
