"""Published models: the figures of their configuration files."""

from __future__ import annotations

from typing import Any

from resihp.contracts import ContractError

from ..gpt2 import Gpt2
from ..llama import Llama
from .configuration import model_of

Figures = tuple[int, int, int, int, int, int]
"""Layers, hidden, heads, KV heads, intermediate, vocabulary."""


def _config(kind: str, figures: Figures, **others: Any) -> dict[str, Any]:
    layers, hidden, heads, kv_heads, ffn, vocab = figures
    return {
        "model_type": kind,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        **others,
    }


def _llama3(figures: Figures, **others: Any) -> dict[str, Any]:
    return _config(
        "llama", figures, **{"rope_theta": 500000.0, "max_position_embeddings": 8192, **others}
    )


def _llama31(figures: Figures, factor: float = 8.0, **others: Any) -> dict[str, Any]:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return _llama3(figures, rope_scaling=scaling, max_position_embeddings=131072, **others)


def _qwen(kind: str, figures: Figures, context: int, **others: Any) -> dict[str, Any]:
    usual = {
        "rope_theta": 1000000.0,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": context,
        "use_sliding_window": False,
    }
    return _config(kind, figures, **usual | others)


def _mistral(kind: str, figures: Figures, **others: Any) -> dict[str, Any]:
    usual = {"max_position_embeddings": 32768, "sliding_window": None, "rope_theta": 1000000.0}
    return _config(kind, figures, **usual | others)


def _gpt2(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": 1024,
        "vocab_size": 50257,
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.1),
    }


_TIED = {"tie_word_embeddings": True}
_QWEN3 = {"head_dim": 128}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "llama-2-7b": _config("llama", (32, 4096, 32, 32, 11008, 32000)),
    "llama-2-13b": _config("llama", (40, 5120, 40, 40, 13824, 32000)),
    "llama-2-70b": _config("llama", (80, 8192, 64, 8, 28672, 32000)),
    "llama-3-8b": _llama3((32, 4096, 32, 8, 14336, 128256)),
    "llama-3-70b": _llama3((80, 8192, 64, 8, 28672, 128256)),
    "llama-3.1-8b": _llama31((32, 4096, 32, 8, 14336, 128256)),
    "llama-3.1-70b": _llama31((80, 8192, 64, 8, 28672, 128256)),
    "llama-3.1-405b": _llama31((126, 16384, 128, 8, 53248, 128256)),
    "llama-3.2-1b": _llama31((16, 2048, 32, 8, 8192, 128256), 32.0, head_dim=64, **_TIED),
    "llama-3.2-3b": _llama31((28, 3072, 24, 8, 8192, 128256), 32.0, head_dim=128, **_TIED),
    "mistral-7b-v0.1": _mistral(
        "mistral", (32, 4096, 32, 8, 14336, 32000), sliding_window=4096, rope_theta=10000.0
    ),
    "mistral-7b-v0.3": _mistral("mistral", (32, 4096, 32, 8, 14336, 32768)),
    "mixtral-8x7b": _mistral("mixtral", (32, 4096, 32, 8, 14336, 32000)),
    "mixtral-8x22b": _mistral(
        "mixtral", (56, 6144, 48, 8, 16384, 32000), max_position_embeddings=65536
    ),
    "qwen2-0.5b": _qwen("qwen2", (24, 896, 14, 2, 4864, 151936), 131072, **_TIED),
    "qwen2-7b": _qwen("qwen2", (28, 3584, 28, 4, 18944, 152064), 131072),
    "qwen2.5-0.5b": _qwen("qwen2", (24, 896, 14, 2, 4864, 151936), 32768, **_TIED),
    "qwen2.5-1.5b": _qwen("qwen2", (28, 1536, 12, 2, 8960, 151936), 131072, **_TIED),
    "qwen2.5-3b": _qwen("qwen2", (36, 2048, 16, 2, 11008, 151936), 32768, **_TIED),
    "qwen2.5-7b": _qwen("qwen2", (28, 3584, 28, 4, 18944, 152064), 131072),
    "qwen2.5-14b": _qwen("qwen2", (48, 5120, 40, 8, 13824, 152064), 131072, rms_norm_eps=1e-5),
    "qwen2.5-32b": _qwen("qwen2", (64, 5120, 40, 8, 27648, 152064), 131072, rms_norm_eps=1e-5),
    "qwen2.5-72b": _qwen("qwen2", (80, 8192, 64, 8, 29568, 152064), 131072, rms_norm_eps=1e-5),
    "qwen3-0.6b": _qwen("qwen3", (28, 1024, 16, 8, 3072, 151936), 40960, **_QWEN3, **_TIED),
    "qwen3-1.7b": _qwen("qwen3", (28, 2048, 16, 8, 6144, 151936), 40960, **_QWEN3, **_TIED),
    "qwen3-4b": _qwen("qwen3", (36, 2560, 32, 8, 9728, 151936), 40960, **_QWEN3, **_TIED),
    "qwen3-8b": _qwen("qwen3", (36, 4096, 32, 8, 12288, 151936), 40960, **_QWEN3),
    "qwen3-14b": _qwen("qwen3", (40, 5120, 40, 8, 17408, 151936), 40960, **_QWEN3),
    "qwen3-32b": _qwen("qwen3", (64, 5120, 64, 8, 25600, 151936), 40960, **_QWEN3),
}
"""Configurations by name, as far as they decide on the function of the model."""


def preset(name: str, *, seed: int = 0) -> Llama | Gpt2:
    """Return a published model with random values, to train it anew or to plan for it.

    seed  of the initial values and of dropout

    Raises `ContractError` that lists the names.
    """
    if name.lower() not in CONFIGURATIONS:
        raise ContractError("name", f"must be one of {', '.join(CONFIGURATIONS)}, not {name!r}")
    return model_of(CONFIGURATIONS[name.lower()], seed=seed)
