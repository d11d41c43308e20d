"""The bytes are those of the step they claim, whatever training does right after the fence."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

from resihp.checkpoint import Checkpointer, HostMemory, IndependentRank, LazyTensor, LocalDisk
from resihp.checkpoint.restore import restore
from resihp.checkpoint.staging.copier import write_order
from tests.checkpoint.helpers import (
    GatedDisk,
    SlowDisk,
    assert_stamped,
    back_from,
    load_by_torch,
    room_for,
    stamp,
    stamped,
)

naps = st.sampled_from([0.0, 0.0, 0.0002, 0.001, 0.004])


@settings(max_examples=25, deadline=None)
@given(
    compute=st.lists(naps, min_size=3, max_size=8),
    storage=st.lists(naps, min_size=1, max_size=3),
    room=st.sampled_from([None, room_for(2), room_for(3)]),
    in_memory=st.booleans(),
)
def test_every_checkpoint_holds_one_step_alone(
    compute: list[float], storage: list[float], room: int | None, in_memory: bool
) -> None:
    state = stamped(-2)
    with tempfile.TemporaryDirectory() as folder:
        disk = SlowDisk(Path(folder), 0.0, keep=20)
        levels = [HostMemory(keep=1), disk] if in_memory else [disk]
        with Checkpointer(levels, host_cache_bytes=room) as saver:
            saver.prepare(state)
            for step, nap in enumerate(compute):
                disk.delay_s = storage[step % len(storage)]
                stamp(state, step)  # the optimizer
                saver.save(step, state, extra={"step": step})
                time.sleep(nap)  # forward and backward
                saver.fence()
            stamp(state, 99)
            assert saver.wait(300)
            assert not saver.counters.failures
            steps = disk.steps()
            assert len(steps) == saver.counters.levels[disk.name].saved
            if in_memory:
                restored, into = back_from(levels[0])
                assert_stamped(into, restored.step)
        for step in steps:
            restored, into = back_from(LocalDisk(Path(folder)), step=step)
            assert_stamped(into, step)
            assert restored.extra == {"step": step}
        assert steps, "the first one always finds room"


def test_a_fence_for_some_tensors_lets_only_those_change(tmp_path: Path) -> None:
    state = stamped(5)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.prepare(state)
        saver.save(5, state)
        for tensor in state.values():
            saver.fence([tensor])
            tensor.fill_(-1.0)
        saver.wait()
    assert_stamped(back_from(LocalDisk(tmp_path))[1], 5)


@pytest.mark.parametrize("is_whole_saved", [True, False])
def test_a_fence_covers_all_that_shares_memory_with_its_tensors(
    tmp_path: Path, is_whole_saved: bool
) -> None:
    whole = torch.full((4, 300_000), 5.0)
    state = {"whole": whole} if is_whole_saved else {str(i): row for i, row in enumerate(whole)}
    with Checkpointer([SlowDisk(tmp_path, 0.2)]) as saver:
        saver.save(5, state)
        for tensor in whole if is_whole_saved else (whole.t(),):
            saver.fence([tensor])
            tensor.fill_(-1.0)
    into = {key: torch.zeros_like(tensor) for key, tensor in state.items()}
    restore([LocalDisk(tmp_path)], into, IndependentRank())
    assert_stamped(into, 5)


def test_a_fence_that_is_given_no_tensors_gives_the_checkpoint_up(tmp_path: Path) -> None:
    state = stamped(5)
    disk = GatedDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.save(5, state)
        saver.fence([None])  # type: ignore[list-item]
        stamp(state, 6)
        disk.gate.set()
    assert sum(saver.counters.failures.values()) == 1
    assert not LocalDisk(tmp_path).steps()


def test_an_attached_optimizer_is_fenced_and_gives_the_order(tmp_path: Path) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2_000_000)) for _ in range(2)]
    optimizer = torch.optim.SGD(parameters[::-1], lr=1.0, momentum=0.5)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    moments = [optimizer.state[parameter]["momentum_buffer"] for parameter in parameters]
    tensors = [parameters[0].detach(), *moments, parameters[1].detach()]
    assert write_order(tensors, [optimizer]) == [3, 2, 0, 1]
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.attach(optimizer)
        for step in range(4):
            saver.save(step, {"p": [p.detach() for p in parameters], "optimizer": optimizer})
            optimizer.step()  # fences first
            saver.wait()
    into = {"p": [torch.zeros(2_000_000) for _ in range(2)]}
    restored = Checkpointer([LocalDisk(tmp_path)]).restore(into)
    assert restored.step == 3
    lr_sum = sum(2.0 - 0.5**k for k in range(4))  # what the steps before it have subtracted
    assert all(torch.equal(p, torch.full_like(p, -lr_sum)) for p in into["p"])


def test_statistics_that_the_forward_pass_changes_are_those_of_the_save(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(300_000)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        for step in range(3):
            before = model.running_mean.clone()
            saver.save(step, {"model": model})
            model(torch.full((2, 300_000), 1.0 + step))
            saver.wait()
    again = torch.nn.BatchNorm1d(300_000)
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.restore({"model": again})
    assert torch.equal(again.running_mean, before)


@pytest.mark.parametrize(
    "buffer", [torch.eye(3).to_sparse(), torch.nn.UninitializedBuffer()], ids=["sparse", "lazy"]
)
def test_a_buffer_that_cannot_be_saved_and_is_not_is_in_nobodys_way(
    tmp_path: Path, buffer: torch.Tensor
) -> None:
    model = torch.nn.BatchNorm1d(3)
    model.register_buffer("adjacency", buffer, persistent=False)
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state[model.weight]["adjacency"] = buffer  # of an attached one that is not saved
    disk = LocalDisk(tmp_path)
    with Checkpointer([disk]) as saver:
        saver.attach(optimizer)
        assert saver.save(0, {"model": model}), saver.counters.failures
        assert saver.wait(300)
    assert disk.steps() == [0]


class Holder:
    """A provider with a module inside."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def provide_state(self) -> dict[str, object]:
        return {"model": self.model}

    def load_state(self, state: dict[str, object]) -> None:
        """Do nothing: the module has loaded its own."""


@pytest.mark.parametrize("held", [Holder, lambda model: model])
def test_statistics_of_any_module_in_the_state_are_those_of_the_save(
    tmp_path: Path, held: Callable[[torch.nn.Module], object]
) -> None:
    """Also those of a distributed module, which are `DTensor`s."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, disk = init_device_mesh("cpu", (1,)), GatedDisk(tmp_path)
        model, again = (distribute_module(torch.nn.BatchNorm1d(4), mesh) for _ in range(2))
        with Checkpointer([disk], ranks=IndependentRank()) as saver:
            saver.save(0, {"held": held(model)})
            model.running_mean.to_local().fill_(9.0)
            disk.gate.set()
            assert saver.wait(300)
            again.running_mean.to_local().fill_(5.0)
            saver.restore({"held": held(again)})
        assert torch.equal(again.running_mean.to_local(), torch.zeros(4))
    finally:
        dist.destroy_process_group()


def test_tensors_with_gaps_and_of_all_kinds_come_back(tmp_path: Path) -> None:
    wide = torch.arange(60.0).reshape(3, 4, 5)
    state = {
        "transposed": wide.transpose(0, 2),
        "every second": wide[:, ::2],
        "channels last": torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "one element": wide[1:2, 0, 0],  # its stride is not 1
        "bits": torch.tensor([True, False]),
    }
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, state)
        saver.wait()
        into = {key: torch.zeros_like(value) for key, value in state.items()}
        into["one element"] = torch.zeros_like(wide)[1:2, 0, 0]
        saver.restore(into)
    for key, value in state.items():
        assert torch.equal(into[key], value), key


def test_a_default_device_is_that_of_the_model_alone(tmp_path: Path) -> None:
    def state_of(weight: float) -> dict[str, Any]:
        model = torch.nn.Linear(3, 2)
        torch.nn.init.constant_(model.weight, weight)
        return {"model": model, "optimizer": torch.optim.Adam(model.parameters()), "list": [weight]}

    state, into = state_of(3.0), state_of(0.0)
    state["model"](torch.ones(1, 3)).sum().backward()
    state["optimizer"].step()
    gaps, ones = torch.zeros(2, 4).t(), torch.ones(2, 4).t()
    lazy = LazyTensor.converted(torch.ones(5), torch.float64)
    with torch.device("meta"), Checkpointer([LocalDisk(tmp_path)]) as saver:
        assert saver.save(0, {**state, "gaps": ones, "lazy": lazy})
        assert saver.wait(300)
        into |= {"gaps": gaps, "lazy": lazy}
        assert saver.restore(into).step == 0
    model, optimizer = into["model"], into["optimizer"]
    assert torch.equal(model.weight, state["model"].weight)
    assert into["list"] == [3.0]
    assert torch.equal(gaps, ones)
    assert torch.equal(into["lazy"], torch.ones(5, dtype=torch.float64))
    assert torch.equal(
        optimizer.state[model.weight]["exp_avg"],
        state["optimizer"].state[state["model"].weight]["exp_avg"],
    )
    by_torch = {"model": torch.nn.Linear(3, 2).state_dict()}
    load_by_torch(tmp_path / "step-000000000", by_torch)
    assert torch.equal(by_torch["model"]["weight"], state["model"].weight)


def test_an_evaluation_in_inference_mode_may_save_and_restore(tmp_path: Path) -> None:
    model, again = torch.nn.Linear(300, 300), torch.nn.Linear(300, 300)
    optimizer, new = torch.optim.Adam(model.parameters()), torch.optim.Adam(again.parameters())
    state, levels = {"model": model, "optimizer": optimizer}, [HostMemory(), LocalDisk(tmp_path)]

    def train(of: torch.nn.Module, by: torch.optim.Optimizer) -> None:
        of(torch.ones(1, 300)).sum().backward()
        by.step()

    with Checkpointer(levels) as saver:
        saver.attach(optimizer)
        train(model, optimizer)
        for step in range(4):
            with torch.inference_mode(step == 0):
                assert saver.save(step, state, extra={"seen": torch.ones(1)})
            assert saver.wait(300)
            train(model, optimizer)
        assert not saver.counters.failures
        assert [level.saved for level in saver.counters.levels.values()] == [4, 4]
    into = {"model": again, "optimizer": new}
    with torch.inference_mode(), Checkpointer([LocalDisk(tmp_path)]) as saver:
        restored = saver.restore(into)
    train(again, new)
    seen = restored.extra["seen"]
    assert isinstance(seen, torch.Tensor)
    assert not seen.is_inference()
    assert not any(moment.is_inference() for moment in new.state[again.weight].values())


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view])
def test_a_view_whose_memory_differs_from_its_values_is_filled(
    tmp_path: Path, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {"w": torch.full((4,), 1 + 2j)})
        saver.wait()
        into = view(torch.zeros(4, dtype=torch.complex64))
        saver.restore({"w": into})
    assert torch.equal(into, torch.full((4,), 1 + 2j))


def test_an_optimizer_under_an_integer_gets_moments_it_does_not_have_yet(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer, again = (torch.optim.Adam(model.parameters()) for _ in range(2))
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.save(0, {0: optimizer})
        saver.wait()
        saver.restore({0: again})
    for restored, moments in zip(again.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(restored["exp_avg"], moments["exp_avg"])


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.Adagrad, torch.optim.RMSprop])
def test_an_optimizer_goes_back_to_before_its_first_step(
    tmp_path: Path, kind: type[torch.optim.Optimizer]
) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = kind(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def train() -> torch.Tensor:
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        return model.weight.detach().clone()

    with Checkpointer([LocalDisk(tmp_path)]) as saver:
        saver.attach(optimizer)
        saver.save(0, state)
        saver.wait()
        first = train()
        train()
        saver.restore(state)
    assert torch.equal(train(), first)


def test_a_state_that_grows_while_host_memory_holds_the_smaller_one(tmp_path: Path) -> None:
    model = torch.nn.Linear(100, 100)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    memory, disk = HostMemory(keep=2), LocalDisk(tmp_path)
    with Checkpointer([memory, disk]) as saver:
        saver.attach(optimizer)
        for step in range(6):
            assert saver.save(step, {"model": model, "optimizer": optimizer})
            assert saver.wait(300)
            model(torch.ones(1, 100)).sum().backward()
            optimizer.step()
    assert memory.steps() == disk.steps() == [4, 5]
