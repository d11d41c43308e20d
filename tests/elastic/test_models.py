"""Every model of the contract trains alike in every layout, uneven ones included."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from resihp.contracts import (
    ContractError,
    Layout,
    ModelShape,
    Plan,
    Replica,
    Schedule,
    Stage,
    even_quotas,
)
from resihp.elastic.models import Gpt2, Llama, Mixture, Model, Packed
from resihp.elastic.models.rope import DynamicRope
from resihp.elastic.optim import Optimizer
from resihp.elastic.step import Setup
from tests.elastic.threads import Run, train

SHAPE = ModelShape(layers=4, hidden=32, heads=4, kv_heads=2, ffn=22, vocab=61)
TIED = dataclasses.replace(SHAPE, tied_embeddings=True)
PLAIN = dataclasses.replace(TIED, kv_heads=4, gated=False)
WIDE_HEADS = dataclasses.replace(SHAPE, head_dim=6)
MODELS: dict[str, Model] = {
    "llama": Llama(SHAPE),
    "tied": Llama(TIED),
    "llama with options": Llama(
        WIDE_HEADS,
        rope=DynamicRope(factor=4.0, max_position_embeddings=8),
        norm_eps=1e-3,
        qkv_bias=True,
        output_bias=True,
        qk_norm=True,
        windows=(None, 3, None, 7),
    ),
    "gpt2": Gpt2(PLAIN, context=24, dropout=0.1),
    "mixture": Mixture(SHAPE, experts=5, top_k=2),
}
ALONE = Layout((Replica((Stage((0,), (0, 4), (2,)),)),))
LAYOUTS = {
    "grid": Layout.grid(dp=2, pp=2, tp=2, layers=4, units=4),
    "uneven": Layout(
        (
            Replica((Stage((0, 1, 2), (0, 3), (3, 4, 5)), Stage((5, 4), (3, 4), (3, 1)))),
            Replica((Stage((3, 6), (0, 1), (1, 3)), Stage((7,), (1, 4), (4,)))),
        )
    ),
    "deep": Layout((Replica(tuple(Stage((i,), (i, i + 1), (4,)) for i in range(4))),)),
    "share of nothing": Layout((Replica((Stage((0, 1, 2), (0, 4), (1, 400, 300)),)),)),
    "ends apart": Layout(
        (Replica((Stage((0,), (0, 0)), Stage((1, 2), (0, 4), (1, 2)), Stage((3, 4), (4, 4)))),)
    ),
}
MICROBATCHES, TOKENS, STEPS = 5, 21, 2
OPTIMIZER = Optimizer(torch.optim.AdamW, lr=1e-2, eps=1e-6, weight_decay=0.1)


def batch(step: int, index: int) -> Packed:
    """Predictable text in two documents."""
    chosen = torch.Generator().manual_seed(1000 * step + index)
    ids = torch.randint(0, 8, (TOKENS + 1,), generator=chosen).cumsum(0) % SHAPE.vocab
    cut = int(torch.randint(5, TOKENS - 5, (1,), generator=chosen))
    targets = ids[1:].clone()
    targets[cut - 1] = -100
    return Packed(ids[:-1], targets, (cut, TOKENS - cut))


@cache
def run(model: Model, layout: Layout, schedule: Schedule = Schedule.ONE_F_ONE_B) -> Run:
    """What training in this layout gives; made once for all tests."""
    quotas = even_quotas(MICROBATCHES, layout.dp)
    plan = Plan(version=0, layout=layout, quotas=quotas, schedule=schedule)
    return train(Setup(model, OPTIMIZER, batch), plan, STEPS)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def alone(model: Model) -> Run:
    """The single rank that every layout must follow."""
    return run(model, ALONE)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_alike(model: Model, layout: Layout, alone: Run) -> None:
    found = run(model, layout)
    assert found.losses == pytest.approx(alone.losses, abs=2e-5)
    assert found.norms == pytest.approx(alone.norms, rel=1e-4)
    reference = alone.state
    for param, tensors in found.state.items():
        torch.testing.assert_close(tensors[0], reference[param][0], rtol=2e-2, atol=2e-4)


def test_a_split_backward_pass_changes_no_bit(model: Model) -> None:
    """Zero bubble runs each weight's gradient apart from the input's, in the same order."""
    layout = "ends apart" if isinstance(model, Gpt2) else "uneven"
    whole = run(model, LAYOUTS[layout])
    split = run(model, LAYOUTS[layout], Schedule.ZERO_BUBBLE)
    assert whole.losses == split.losses
    for param, tensors in whole.state.items():
        for one, other in zip(tensors, split.state[param], strict=True):
            assert torch.equal(one, other), param.key


@pytest.mark.parametrize("name", ["llama with options", "gpt2", "mixture"])
def test_recomputation_changes_no_bit(name: str) -> None:
    """Under autocast, with dropout, with whole and with split backward passes."""
    plan = Plan(version=0, layout=LAYOUTS["uneven"], quotas=(2, 1))
    split = dataclasses.replace(plan, schedule=Schedule.ZERO_BUBBLE)
    setup = Setup(MODELS[name], OPTIMIZER, batch, compute_dtype=torch.bfloat16)
    kept = train(setup, plan, 1)
    layers = dataclasses.replace(setup, recompute="layers")
    attention = dataclasses.replace(setup, recompute="attention")
    for again, under in ((layers, plan), (layers, split), (attention, split)):
        found = train(again, under, 1)
        assert found.losses == kept.losses
        for param, tensors in kept.state.items():
            for one, other in zip(tensors, found.state[param], strict=True):
                assert torch.equal(one, other), param.key


def test_bf16_operators_keep_float32_state_and_sums(alone: Run, model: Model) -> None:
    plan = Plan(version=0, layout=LAYOUTS["uneven"], quotas=(3, 2))
    low = train(Setup(model, OPTIMIZER, batch, compute_dtype=torch.bfloat16), plan, STEPS)
    assert low.losses != alone.losses
    assert low.losses == pytest.approx(alone.losses, rel=1e-2)
    state = low.state  # replicas whose shards differ agree to the last bit
    assert {t.dtype for tensors in state.values() for t in tensors} == {torch.float32}


def test_a_precision_that_needs_scaled_gradients_is_refused() -> None:
    with pytest.raises(ContractError, match=r"compute_dtype: must be torch\.bfloat16"):
        Setup(MODELS["tied"], OPTIMIZER, batch, compute_dtype=torch.float16)


@pytest.mark.parametrize("kind", [list, np.array])
def test_lengths_of_documents_in_other_sequences(kind: Callable[..., Any]) -> None:
    def data(step: int, index: int) -> Packed:
        packed = batch(step, index)
        return Packed(packed.tokens, packed.targets, kind(packed.seq_lens))

    plan = Plan(version=0, layout=ALONE, quotas=(2,))
    usual, found = (train(Setup(MODELS["llama"], OPTIMIZER, one), plan, 1) for one in (batch, data))
    assert found.losses == usual.losses


def test_a_document_longer_than_learned_positions_is_refused() -> None:
    short = Gpt2(PLAIN, context=4)
    plan = Plan(version=0, layout=ALONE, quotas=(1,))
    with pytest.raises(ContractError, match=r"seq_lens: a document holds .* of GPT-2 is 4"):
        train(Setup(short, OPTIMIZER, batch), plan, 1)


def test_fifty_steps_follow_the_single_rank() -> None:
    model = MODELS["tied"]
    stages = Stage((0, 1), (0, 1), (1, 3)), Stage((2,), (1, 4), (4,))
    steps, layout = 50, Layout((Replica(stages), Replica((Stage((3,), (0, 4), (4,)),))))
    setup = Setup(model, Optimizer(torch.optim.AdamW, lr=2e-3, eps=1e-6), batch)
    plan = Plan(version=0, layout=layout, quotas=(2, 1))
    undisturbed = train(setup, Plan(version=0, layout=ALONE, quotas=(3,)), steps)
    found = train(setup, plan, steps)
    assert found.losses == pytest.approx(undisturbed.losses, abs=2e-5)
    assert found.losses[-1] < 0.8 * found.losses[0]


def test_ranks_without_a_head_sum_in_a_fixed_order_too() -> None:
    """Two KV groups among three ranks leave one rank with none."""
    model, layout = MODELS["llama"], LAYOUTS["uneven"]
    plan = Plan(version=0, layout=layout, quotas=(3, 2))
    found = train(Setup(model, OPTIMIZER, batch, deterministic=True), plan, STEPS)
    assert found.losses == pytest.approx(run(model, ALONE).losses, abs=2e-5)
    assert found.state  # asserts that those who hold the same agree


def test_eager_and_plain_1f1b_are_the_same_training() -> None:
    model, layout = MODELS["llama"], LAYOUTS["deep"]
    eager = run(model, layout, Schedule.EAGER_1F1B)
    assert eager.losses == run(model, layout).losses
