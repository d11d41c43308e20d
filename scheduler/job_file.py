"""Job files: TOML descriptions of a job, and presets of published model shapes.

    name = "pretraining"
    model = "llama-3-8b"            # a preset, or a table with layers, hidden, heads, ...
    microbatches = 64
    tokens_per_microbatch = 8192
    device = "H100"

    [layout]                        # a regular grid, or `replicas` written out
    dp = 4
    pp = 4
    tp = 2

    [memory]
    budget_bytes = 80_000_000_000

Every other field of `resihp.contracts.Job` has its own name.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from resihp.contracts import ContractError, Job, Layout, ModelShape, Schedule, from_json, to_json

_GRID = ("dp", "pp", "tp", "layers", "units")


def _shape(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelShape:
    return ModelShape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab
    )


MODEL_PRESETS: dict[str, ModelShape] = {
    "llama-2-7b": _shape(32, 4096, 32, 32, 11008, 32000),
    "llama-2-13b": _shape(40, 5120, 40, 40, 13824, 32000),
    "llama-2-70b": _shape(80, 8192, 64, 8, 28672, 32000),
    "llama-3-8b": _shape(32, 4096, 32, 8, 14336, 128256),
    "llama-3-70b": _shape(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-8b": _shape(32, 4096, 32, 8, 14336, 128256),
    "llama-3.1-70b": _shape(80, 8192, 64, 8, 28672, 128256),
    "llama-3.1-405b": _shape(126, 16384, 128, 8, 53248, 128256),
    "qwen2.5-7b": _shape(28, 3584, 28, 4, 18944, 152064),
    "qwen2.5-14b": _shape(48, 5120, 40, 8, 13824, 152064),
    "qwen2.5-32b": _shape(64, 5120, 40, 8, 27648, 152064),
    "qwen2.5-72b": _shape(80, 8192, 64, 8, 29568, 152064),
}


def model_preset(name: str) -> ModelShape:
    """Shape of the preset of that name. Raises `ContractError` that lists the names."""
    try:
        return MODEL_PRESETS[name.lower()]
    except KeyError:
        known = ", ".join(MODEL_PRESETS)
        raise ContractError("model", f"must be one of {known}, not {name!r}") from None


def parse_job(text: str) -> Job:
    """Job described by a TOML text. Raises `ContractError` with the dotted field."""
    return job_of(read_toml(text))


def read_toml(text: str) -> dict[str, Any]:
    """Content of a TOML text. Raises `ContractError`."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ContractError("", f"not valid TOML: {error}") from None


def job_of(document: Mapping[str, Any]) -> Job:
    """Job of a parsed document; presets and grids are expanded first."""
    fields = dict(document)
    if isinstance(fields.get("model"), str):
        fields["model"] = to_json(model_preset(fields["model"]))
    layout = fields.get("layout")
    if isinstance(layout, Mapping) and "replicas" not in layout:
        fields["layout"] = to_json(_grid(layout, fields.get("model"), _chunks(fields)))
    return from_json(Job, fields)


def _chunks(fields: Mapping[str, Any]) -> int:
    """Model chunks of each stage of the grid; `Job` reports a value that is not a number."""
    chunks = fields.get("chunks", 1)
    interleaved = fields.get("schedule") == Schedule.INTERLEAVED and type(chunks) is int
    return max(chunks, 1) if interleaved else 1


def _grid(given: Mapping[str, Any], model: Any, chunks: int) -> Layout:
    sizes = dict(given)
    if model is not None:
        shape = from_json(ModelShape, model, "model")
        sizes = {"layers": shape.layers, "units": shape.kv_heads, **sizes}
    for name, value in sizes.items():
        if name not in _GRID:
            known = ", ".join(_GRID)
            raise ContractError(f"layout.{name}", f"unknown field; known are {known}, or replicas")
        if not isinstance(value, int) or isinstance(value, bool):
            raise ContractError(f"layout.{name}", "must be a whole number")
    for name in _GRID[:4]:
        if name not in sizes:
            raise ContractError(f"layout.{name}", "is missing")
    try:
        return Layout.grid(**sizes, chunks=chunks)
    except ContractError as error:
        raise ContractError(f"layout.{error.field}", error.problem) from None
