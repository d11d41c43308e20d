"""Shapes of models that many people train, from their published configurations."""

from __future__ import annotations

from resihp.contracts import ContractError, ModelShape


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab
    )


PRESETS: dict[str, ModelShape] = {
    "llama-2-7b": _shape(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _shape(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _shape(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _shape(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _shape(80, 8192, 64, 8, 28672, 128256),
    "llama-3-405b": _shape(126, 16384, 128, 8, 53248, 128256),
    "qwen2.5-7b": _shape(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-72b": _shape(80, 8192, 64, 8, 29568, 152064),
}


def preset(name: str) -> ModelShape:
    """The shape of that name. Raises `ContractError` that lists the names."""
    try:
        return PRESETS[name.lower()]
    except KeyError:
        known = ", ".join(PRESETS)
        raise ContractError("model", f"must be one of {known}, not {name!r}") from None
