"""Models of `transformers`: the same logits in every layout, and folders that go both ways."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from resihp.contracts import Layout, Plan, even_quotas
from resihp.elastic.models import (
    Gpt2,
    Llama,
    Mixture,
    Packed,
    from_pretrained,
    save_pretrained,
)
from resihp.elastic.models.rope import DynamicRope, Llama3Rope
from resihp.elastic.models.vocabulary import VocabularyHead
from resihp.elastic.process_groups.abortable import ProcessGroupFactory
from resihp.elastic.process_groups.layout_groups import build_layout_groups
from resihp.elastic.step import Engine, Setup
from resihp.elastic.step.shard import Shard, initial_shard
from tests.elastic.test_models import (
    ALONE,
    LAYOUTS,
    MICROBATCHES,
    OPTIMIZER,
    PLAIN,
    SHAPE,
    TIED,
    TOKENS,
    batch,
)
from tests.elastic.threads import on_ranks

pytestmark = pytest.mark.integrations
transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": SHAPE.vocab,
    "hidden_size": 32,
    "intermediate_size": 22,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
WITHOUT_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
CONFIGURATIONS: dict[str, Callable[[], Any]] = {
    "llama 2": lambda: transformers.LlamaConfig(**COMMON, rms_norm_eps=1e-5),
    "llama 3": lambda: transformers.LlamaConfig(
        **COMMON,
        rope_theta=500000.0,
        rope_scaling={**LLAMA3, "original_max_position_embeddings": 32},
        tie_word_embeddings=True,
    ),
    "llama with biases": lambda: transformers.LlamaConfig(
        **COMMON, attention_bias=True, rope_scaling={"rope_type": "linear", "factor": 2.5}
    ),
    "mistral": lambda: transformers.MistralConfig(**COMMON, sliding_window=5, head_dim=10),
    "qwen2": lambda: transformers.Qwen2Config(
        **COMMON,
        use_sliding_window=True,
        sliding_window=6,
        max_window_layers=2,
        rope_theta=1e6,
        rope_scaling=YARN,
        tie_word_embeddings=True,
    ),
    "qwen3": lambda: transformers.Qwen3Config(**COMMON, head_dim=12, rope_theta=1e6),
    "mixtral": lambda: transformers.MixtralConfig(
        **{**COMMON, "intermediate_size": 24}, num_local_experts=5, num_experts_per_tok=2
    ),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=SHAPE.vocab,
        n_embd=32,
        n_layer=4,
        n_head=4,
        n_positions=24,
        bos_token_id=None,
        eos_token_id=None,
        **WITHOUT_DROPOUT,
    ),
}
ROPES = {
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {**YARN, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": False},
    "yarn with its own magnitude": {**YARN, "attention_factor": 1.5},
    "yarn with magnitudes": {**YARN, "mscale": 0.7, "mscale_all_dim": 1.2},
    "llama3": {**LLAMA3, "original_max_position_embeddings": 8},
}


@dataclass
class Reference:
    """A small random model of `transformers` in a folder, and what it computes."""

    folder: Path
    model: Any
    logits: dict[int, torch.Tensor]
    loss: float
    norm: float


def random_model(config: Any) -> Any:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in model.named_parameters():
        is_norm = parameter.dim() == 1 and name.endswith("weight")
        torch.nn.init.normal_(parameter, mean=float(is_norm), std=0.2)
    return model.eval()


def reference(config: Any, folder: Path) -> Reference:
    """Compute each document by itself, shorter ones first: dynamic positions keep the longest."""
    model, loss = random_model(config), torch.zeros(())
    model.save_pretrained(folder, max_shard_size="30KB")
    logits = {index: torch.zeros(TOKENS, SHAPE.vocab) for index in range(MICROBATCHES)}
    documents = []
    for index in logits:
        packed, start = batch(0, index), 0
        for length in packed.seq_lens:
            documents.append((length, index, slice(start, start + length), packed))
            start += length
    for _, index, span, packed in sorted(documents, key=lambda one: one[0]):
        found = model(packed.tokens[span].unsqueeze(0)).logits[0].float()
        logits[index][span] = found.detach()
        loss = loss + torch.nn.functional.cross_entropy(
            found, packed.targets[span], reduction="sum"
        )
    loss = loss / (TOKENS * MICROBATCHES)
    loss.backward()
    squares = sum(float(p.grad.double().square().sum()) for p in model.parameters())
    return Reference(folder, model, logits, loss.item(), squares**0.5)


@pytest.fixture(scope="module", params=CONFIGURATIONS)
def pretrained(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Reference:
    folder = tmp_path_factory.mktemp("pretrained")
    return reference(CONFIGURATIONS[request.param](), folder)


@dataclass
class Found:
    """Logits by microbatch, loss and gradient norm of one step, and the unchanged shards."""

    logits: dict[int, torch.Tensor]
    loss: float
    norm: float
    shards: dict[int, Shard]


def compute(model: Llama | Gpt2, layout: Layout, patch: pytest.MonkeyPatch) -> Found:
    """Run all passes of one step in a layout, and collect the logits of its heads."""
    logits = {index: torch.full((TOKENS, SHAPE.vocab), torch.nan) for index in range(MICROBATCHES)}
    adding, loss = threading.Lock(), VocabularyHead.loss

    def collecting(head: VocabularyHead, hidden: torch.Tensor, packed: Packed) -> torch.Tensor:
        with adding, torch.no_grad():
            logits[packed.index][:, slice(*head.rows)] = head.logits(hidden)
        return loss(head, hidden, packed)

    patch.setattr(VocabularyHead, "loss", collecting)
    plan = Plan(version=0, layout=layout, quotas=even_quotas(MICROBATCHES, layout.dp))
    setup = Setup(model, OPTIMIZER, batch)

    def run_rank(factory: ProcessGroupFactory) -> tuple[Shard, float, float]:
        groups = build_layout_groups(factory, layout, model.parameters, name="generation")
        shard = initial_shard(model, setup.optimizer, groups)
        engine = Engine(setup, groups, shard, plan, factory.waited)
        engine.accumulate(0)
        reduced = engine.reduce(0, 0)
        return shard, reduced.loss, reduced.norm

    found = on_ranks(layout.ranks, run_rank)
    _, first_loss, first_norm = next(iter(found.values()))
    shards = {rank: shard for rank, (shard, *_) in found.items()}
    return Found(logits, first_loss, first_norm, shards)


def assert_equal(found: Found, expected: Reference) -> None:
    for index, logits in found.logits.items():
        torch.testing.assert_close(logits, expected.logits[index], rtol=0.0, atol=1e-5)
    assert found.loss == pytest.approx(expected.loss, abs=1e-5)
    assert found.norm == pytest.approx(expected.norm, rel=1e-4)


def load(folder: Path) -> Any:
    model, told = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True, dtype="auto"
    )
    assert not any(told[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return model


@pytest.mark.parametrize("layout", {"alone": ALONE, **LAYOUTS}.values(), ids=["alone", *LAYOUTS])
def test_every_layout_computes_the_same_and_gives_the_folder_back(
    pretrained: Reference, layout: Layout, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = from_pretrained(pretrained.folder)
    found = compute(model, layout, monkeypatch)
    assert_equal(found, pretrained)
    done = [
        save_pretrained(
            model, shard.tensors, tmp_path, layout=layout, rank=rank, max_file_bytes=40_000
        )
        for rank, shard in found.shards.items()
    ]
    assert done == [False] * (len(done) - 1) + [True]
    again = load(tmp_path).state_dict()
    assert again.keys() == pretrained.model.state_dict().keys()
    for name, tensor in pretrained.model.state_dict().items():
        assert torch.equal(again[name], tensor), name


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES)
def test_scaled_positions(
    rope: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = transformers.LlamaConfig(
        **COMMON, max_position_embeddings=10, rope_theta=10.0, rope_scaling=rope
    )
    expected = reference(config, tmp_path)
    assert_equal(compute(from_pretrained(tmp_path), LAYOUTS["uneven"], monkeypatch), expected)


OWN = {
    "llama": Llama(SHAPE, norm_eps=1e-4),
    "llama 3": Llama(
        TIED,
        rope=Llama3Rope(
            theta=5e5,
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "biases": Llama(SHAPE, qkv_bias=True, output_bias=True),
    "mistral": Llama(SHAPE, windows=(4,) * 4),
    "qwen2": Llama(
        SHAPE,
        qkv_bias=True,
        windows=(None, None, None, 5),
        rope=DynamicRope(factor=2.0, max_position_embeddings=64),
    ),
    "qwen3": Llama(SHAPE, qk_norm=True),
    "mixtral": Mixture(replace(SHAPE, ffn=24), experts=3, top_k=2),
    "gpt2": Gpt2(PLAIN, context=24, dropout=0.0),
}


@pytest.mark.parametrize("model", OWN.values(), ids=OWN)
def test_a_model_that_was_made_here_is_one_of_transformers(
    model: Llama | Gpt2, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its configuration follows from its options."""
    found = compute(model, ALONE, monkeypatch)
    assert save_pretrained(model, found.shards[0].tensors, tmp_path)
    theirs = load(tmp_path)
    packed, start = batch(0, 0), 0
    for length in packed.seq_lens:
        span = slice(start, start + length)
        logits = theirs(packed.tokens[span].unsqueeze(0)).logits[0]
        torch.testing.assert_close(logits, found.logits[0][span], rtol=0.0, atol=1e-5)
        start += length


def test_bfloat16_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as float32 and written as they were, no bit changes."""
    model = random_model(transformers.LlamaConfig(**COMMON)).bfloat16()
    model.save_pretrained(tmp_path / "theirs")
    ours = from_pretrained(tmp_path / "theirs")
    shards = compute(ours, ALONE, monkeypatch).shards
    save_pretrained(ours, shards[0].tensors, tmp_path / "ours", dtype=torch.bfloat16)
    again = load(tmp_path / "ours")
    assert again.dtype == torch.bfloat16
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
