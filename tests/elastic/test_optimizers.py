"""Optimizers: which may be used, that their state moves to the last bit, and what rates say."""

from __future__ import annotations

import dataclasses
import random
from functools import cache
from math import nan
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import Phase, given, settings

from resihp.contracts import ContractError, Layout, ModelShape
from resihp.elastic.models import Gpt2, Llama, Mixture, Model
from resihp.elastic.optim import (
    Optimizer,
    constant,
    no_decay_on_vectors,
    warmup,
    warmup_cosine,
)
from resihp.elastic.process_groups.abortable import AbortableProcessGroup
from resihp.elastic.process_groups.layout_groups import LayoutGroups
from resihp.elastic.reshard.buffers import PendingShard, ShardAllocator, Spill
from resihp.elastic.step.shard import Shard, build_shard, initial_shard, rows
from resihp.layout import Param, Range, moves
from tests.test_layout import layouts

KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {"foreach": True}),
    "rmsprop": (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "adadelta": (torch.optim.Adadelta, {}),
    "adamax": (torch.optim.Adamax, {}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "rprop": (torch.optim.Rprop, {}),
    "asgd": (torch.optim.ASGD, {"t0": 2.0}),
}
OPTIMIZERS = {
    name: Optimizer(kind, options=no_decay_on_vectors, **keywords)
    for name, (kind, keywords) in KINDS.items()
}
REFUSED = {
    torch.optim.Adafactor: "row_var",
    torch.optim.LBFGS: "closure",
    torch.optim.Muon: "along dimension 0 depend on each other",
    torch.optim.SparseAdam: "dense",
}
SHAPE = ModelShape(layers=4, hidden=8, heads=4, kv_heads=4, ffn=6, vocab=13)
PLAIN = dataclasses.replace(SHAPE, gated=False, tied_embeddings=True)
MODELS: dict[str, Model] = {
    "llama": Llama(SHAPE),
    "gpt2": Gpt2(PLAIN, context=5),
    "mixture": Mixture(SHAPE, experts=3, top_k=1),
}
ALONE = Layout.grid(dp=1, pp=1, tp=1, layers=4)


@pytest.mark.timeout(300)
@settings(deadline=None, max_examples=100, phases=(Phase.reuse, Phase.generate))
@given(
    st.sampled_from(sorted(MODELS)),
    st.sampled_from(sorted(OPTIMIZERS)),
    st.lists(layouts(), min_size=2, max_size=3),
    st.integers(0, 2),
)
def test_a_chain_of_resizes_and_updates_is_that_of_one_rank(
    model_name: str, optimizer_name: str, chain: list[Layout], at_first: int
) -> None:
    model, optimizer = MODELS[model_name], OPTIMIZERS[optimizer_name]
    alone = {0: initial_shard(model, optimizer, _groups(ALONE, 0))}
    shards = {r: initial_shard(model, optimizer, _groups(chain[0], r)) for r in chain[0].ranks}
    step = 0
    for old, new in zip(chain, [*chain[1:], chain[0]], strict=True):
        for _ in range(at_first if step == 0 else 1):
            _update((alone, shards), model, optimizer, step)
            step += 1
        shards = _resize(shards, old, new, model, optimizer, step)
        _assert_same_bits(shards, alone[0])
    _update((alone, shards), model, optimizer, step)
    _assert_same_bits(shards, alone[0])


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_state_that_cannot_be_cut_is_refused_with_the_reason(kind: type) -> None:
    with pytest.raises(ContractError, match=f"{kind.__name__} cannot be cut.*{REFUSED[kind]}"):
        Optimizer(kind)


class Unfinished(torch.optim.SGD):
    """Fails without a word."""

    def step(self, closure: Any = None) -> Any:
        raise AssertionError


def test_an_optimizer_that_fails_by_an_assertion_is_refused() -> None:
    with pytest.raises(ContractError, match="AdamW cannot be cut by range: If capturable=True"):
        Optimizer(torch.optim.AdamW, capturable=True)
    with pytest.raises(ContractError, match="Unfinished cannot be cut by range: AssertionError"):
        Optimizer(Unfinished)


def test_an_optimizer_that_writes_gradients_is_told() -> None:
    """What it leaves behind is not what a copy of its parameters has to be updated with."""

    class Scaling(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for tensor in group["params"]:
                    tensor.grad.mul_(2.0)
            return super().step(closure)

    assert Optimizer(Scaling, lr=0.1).form.writes_gradients
    for kind in (torch.optim.SGD, torch.optim.AdamW, torch.optim.NAdam):
        assert not Optimizer(kind, lr=0.1, maximize=True).form.writes_gradients


@pytest.mark.parametrize("is_on_vectors", [True, False])
def test_options_may_decide_whether_gradients_are_written(is_on_vectors: bool) -> None:
    """They change nothing in what is kept."""

    class Decaying(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for tensor in group["params"]:
                    if group["weight_decay"]:
                        tensor.grad.add_(tensor.detach(), alpha=group["weight_decay"])
            return super().step(closure)

    def options(param: Param) -> dict[str, float]:
        return {"weight_decay": 0.1} if is_on_vectors == (len(param.shape) == 1) else {}

    optimizer = Optimizer(Decaying, lr=0.1, options=options)
    assert not optimizer.form.writes_gradients
    initial_shard(MODELS["llama"], optimizer, _groups(ALONE, 0))
    assert optimizer.form.writes_gradients


def test_an_optimizer_that_writes_gradients_of_vectors_alone_is_told() -> None:
    class Scaling(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for tensor in group["params"]:
                    tensor.grad.mul_(2.0 if tensor.dim() == 1 else 1.0)
            return super().step(closure)

    assert Optimizer(Scaling, lr=0.1).form.writes_gradients


class Renewing(torch.optim.Optimizer):
    """Makes new tensors instead of writing into those that it has."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for tensor in group["params"]:
                before = self.state[tensor].get("mean", torch.zeros_like(tensor))
                self.state[tensor]["mean"] = 0.9 * before + tensor.grad
                tensor.data = tensor - group["lr"] * self.state[tensor]["mean"]


@pytest.mark.parametrize("name", [*OPTIMIZERS, "renewing"])
def test_what_was_received_is_updated_like_what_trains(name: str, tmp_path: Path) -> None:
    """To the last bit, of which the state of some parameters is in files."""
    optimizer = OPTIMIZERS.get(name) or Optimizer(Renewing, rate=warmup(9))
    model, chosen = MODELS["llama"], torch.Generator().manual_seed(0)
    parameters = model.parameters
    old = initial_shard(model, optimizer, _groups(ALONE, 0))
    some = {held for held in old.slices if "layers.2" not in held[0].key}
    allocator = ShardAllocator(Spill(parameters.all[:5]), tmp_path)
    new = build_shard(model, optimizer, _groups(ALONE, 0), allot=allocator.allot)
    gradients = {held: torch.zeros_like(tensor) for held, tensor in new.slices.items()}
    pending = PendingShard(new, allocator, gradients)
    for step in range(6):
        if step == 3:
            for held in old.slices:
                for source, target in zip(old.state(held), pending.state(held), strict=True):
                    target.copy_(source)
        for held, tensor in old.slices.items():
            gradients[held].copy_(torch.randn(tensor.shape, generator=chosen))
            tensor.grad = gradients[held].clone()
        scalars = old.scalars()
        optimizer.set_rate(old.optimizer, step)
        old.optimizer.step()
        if step >= 3:
            new.set_scalars(scalars, step)
            pending.update(parameters, {param for param, _ in some}, step)
    for held in old.slices:
        is_same = all(map(torch.equal, old.state(held), new.state(held)))
        assert is_same == (held in some), held


def test_a_kernel_whose_result_depends_on_the_cut_is_refused() -> None:
    everywhere = Optimizer(torch.optim.AdamW, fused=True)
    some = {"layers.1.wq": {"fused": True}}
    by_options = Optimizer(torch.optim.AdamW, options=lambda param: some.get(param.key, {}))
    for optimizer in (everywhere, by_options):
        with pytest.raises(ContractError, match="fused"):
            initial_shard(MODELS["llama"], optimizer, _groups(ALONE, 0))


def test_options_by_parameter_make_groups_that_all_ranks_agree_on() -> None:
    def options(param: Param) -> dict[str, float]:
        return {"lr": 0.5} if param.key == "first.table" else no_decay_on_vectors(param)

    optimizer = Optimizer(torch.optim.AdamW, lr=0.1, rate=warmup(1), options=options)
    layout = Layout.grid(dp=1, pp=2, tp=1, layers=4)
    for rank, sizes in ((0, [1, 4, 14]), (1, [0, 5, 15])):
        shard = initial_shard(MODELS["llama"], optimizer, _groups(layout, rank))
        optimizer.set_rate(shard.optimizer, 0)
        groups = shard.optimizer.param_groups
        assert [len(group["params"]) for group in groups] == sizes
        assert [group["lr"] for group in groups] == [0.25, 0.05, 0.05]
        assert [group["weight_decay"] for group in groups] == [0.01, 0.0, 0.01]


def test_options_that_change_what_is_kept_are_refused() -> None:
    """What only some parameters have would not move with them."""
    some = {"layers.1.wq": {"momentum": 0.9}}
    optimizer = Optimizer(torch.optim.SGD, options=lambda param: some.get(param.key, {}))
    with pytest.raises(ContractError, match="change what SGD keeps"):
        initial_shard(MODELS["llama"], optimizer, _groups(ALONE, 0))


def test_rates_are_functions_of_the_step_alone() -> None:
    assert constant(10**9) == 1.0
    assert [warmup(4)(step) for step in (0, 3, 4, 100)] == [0.2, 0.8, 1.0, 1.0]
    rate = warmup_cosine(10, 110, floor=0.1)
    assert rate(9) == pytest.approx(10 / 11)
    assert rate(10) == 1.0
    assert rate(60) == pytest.approx(0.55)
    assert rate(110) == rate(10**6) == pytest.approx(0.1)
    with pytest.raises(ContractError, match="warm-up"):
        warmup_cosine(10, 10)
    for max_norm in (0.0, nan):
        with pytest.raises(ContractError, match="max_norm"):
            Optimizer(torch.optim.SGD, max_norm=max_norm)


def _groups(layout: Layout, rank: int) -> LayoutGroups:
    """A generation without connections: enough to hold a shard."""
    place = layout.place_of(rank)
    assert place is not None
    group = AbortableProcessGroup(
        SimpleNamespace(device=torch.device("cpu")), layout.stage_at(place).ranks, None
    )
    return LayoutGroups(layout, place, group, group, None, None)


def _update(
    jobs: tuple[dict[int, Shard], ...], model: Model, optimizer: Optimizer, step: int
) -> None:
    """An update of every rank of all jobs by its ranges of made-up gradients of the whole model."""
    gradients = _gradients(model, step)
    for shard in (shard for job in jobs for shard in job.values()):
        for param, tensor in shard.tensors.items():
            tensor.grad = rows(gradients[param], param, shard.ranges[param]).clone()
        optimizer.set_rate(shard.optimizer, step)
        shard.optimizer.step()


@cache
def _gradients(model: Model, step: int) -> dict[Param, torch.Tensor]:
    """Noise."""
    gradients = {}
    for param in model.parameters.all:
        chosen = torch.Generator().manual_seed(random.Random(f"{step}/{param.key}").getrandbits(32))
        gradients[param] = torch.randn(param.shape, generator=chosen)
    return gradients


def _resize(
    shards: dict[int, Shard],
    old: Layout,
    new: Layout,
    model: Model,
    optimizer: Optimizer,
    completed: int,
) -> dict[int, Shard]:
    """The shards of `new`, filled from those of `old` as the runtime does it, without the wire."""
    made = {
        rank: build_shard(model, optimizer, _groups(new, rank), current=shards.get(rank))
        for rank in new.ranks
    }
    table = torch.stack([shard.scalars() for shard in shards.values()]).amax(0)
    for rank, shard in made.items():
        shard.set_scalars(table, completed)
        for param, span in shard.ranges.items():
            own = shards[rank].ranges.get(param) if rank in shards else None
            if own is not None:
                shared = (max(own[0], span[0]), min(own[1], span[1]))
                _transfer(shards[rank], shard, param, shared)
    for move in moves(old, new, model.parameters):
        _transfer(shards[move.source], made[move.target], move.param, (move.start, move.stop))
    return made


def _transfer(source: Shard, target: Shard, param: Param, span: Range) -> None:
    """Copy the rows `span` of all that is kept for a parameter; none if they are none."""
    if span[0] < span[1] and source.tensors[param] is not target.tensors[param]:
        both = (shard.state((param, shard.ranges[param])) for shard in (source, target))
        for from_, to in zip(*both, strict=True):
            part = rows(from_, param, span, source.ranges[param][0])
            rows(to, param, span, target.ranges[param][0]).copy_(part)


def _assert_same_bits(shards: dict[int, Shard], alone: Shard) -> None:
    """Every rank holds its ranges of what the single rank holds."""
    for shard in shards.values():
        for param, span in shard.ranges.items():
            both = (one.state((param, one.ranges[param])) for one in (shard, alone))
            for held, whole in zip(*both, strict=True):
                assert torch.equal(held, rows(whole, param, span)), param.key
