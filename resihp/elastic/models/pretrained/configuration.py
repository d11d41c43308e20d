"""Configurations in Hugging Face's format (config.json), to models and back.

Every key is interpreted, known to change no value, or refused by name: a configuration that asks
for something else than what is computed here must not train silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, cast

from resihp.contracts import ContractError, ModelShape

from ..decoder import Decoder
from ..gpt2 import Gpt2
from ..llama import Llama
from ..mixture import Mixture
from ..rope import DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope

Config = Mapping[str, Any]

_INERT = {
    *("_attn_implementation_autoset", "_name_or_path", "architectures", "attn_implementation"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id"),
    *("dtype", "torch_dtype", "transformers_version", "model_type", "use_cache", "is_decoder"),
    *("initializer_range", "pretraining_tp", "gradient_checkpointing", "n_ctx", "n_special"),
    *("predict_special_tokens", "output_past"),
    *("output_attentions", "output_hidden_states", "return_dict", "chunk_size_feed_forward"),
    *("id2label", "label2id", "problem_type", "task_specific_params", "tokenizer_class", "prefix"),
    *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
    *("summary_first_dropout", "router_aux_loss_coef", "max_position_embeddings"),
}
"""Keys that change neither the function of the model nor how it is trained here."""

_ROPES: dict[str, type[Rope]] = {
    "default": Rope,
    "linear": LinearRope,
    "dynamic": DynamicRope,
    "llama3": Llama3Rope,
    "yarn": YarnRope,
}


class _Keys:
    """Keys of a configuration that are still to be interpreted."""

    def __init__(self, config: Config) -> None:
        self._left = {key: value for key, value in config.items() if key not in _INERT}

    def has(self, key: str) -> bool:
        """Return whether the configuration has a key, be it without a value."""
        return key in self._left

    def take(self, key: str, default: Any = MISSING) -> Any:
        """Return the value of a key. Raises `ContractError` if it is missing without a default."""
        value = self._left.pop(key, None)
        if value is not None:
            return value
        if default is MISSING:
            raise ContractError(key, "is missing in the configuration")
        return default

    def number(self, key: str, default: Any = MISSING) -> Any:
        """Return a value that must be a number."""
        value = self.take(key, default)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise ContractError(key, f"must be a number, not {value!r}")
        return value

    def only(self, key: str, *supported: Any) -> None:
        """Refuse other values than those supported; the first of them is the default."""
        value = self.take(key, supported[0])
        if value not in supported:
            known = " or ".join(map(repr, supported))
            raise ContractError(key, f"{value!r} is not supported, only {known}")

    def finish(self) -> None:
        """Refuse the keys that nothing has asked for, unless they switch something off."""
        for key, value in self._left.items():
            if value not in (None, False, {}, []):
                raise ContractError(
                    key, f"{value!r} is not supported or not known; None in `changes` ignores it"
                )


def model_of(config: Config, *, seed: int = 0) -> Llama | Gpt2:
    """Return the model of a configuration, with random values.

    seed  of the initial values and of dropout

    Raises `ContractError` with the key and the value that are not supported.
    """
    kind = config.get("model_type")
    if kind not in _READERS:
        known = ", ".join(_READERS)
        raise ContractError("model_type", f"{kind!r} is not supported, only {known}")
    keys = _Keys(config)
    model = _READERS[kind](keys, config.get("max_position_embeddings"), seed)
    keys.finish()
    return model


def _shape(keys: _Keys, *, kv_heads: int | None = None, tied: bool = False) -> ModelShape:
    heads = keys.number("num_attention_heads")
    return ModelShape(
        layers=keys.number("num_hidden_layers"),
        hidden=keys.number("hidden_size"),
        heads=heads,
        kv_heads=keys.number("num_key_value_heads", kv_heads or heads),
        ffn=keys.number("intermediate_size"),
        vocab=keys.number("vocab_size"),
        tied_embeddings=keys.take("tie_word_embeddings", tied),
        head_dim=keys.number("head_dim", 0),
    )


def _common(keys: _Keys, context: int | None, *, eps: float, theta: float) -> dict[str, Any]:
    """Interpret what the descendants of Llama have in common."""
    keys.only("hidden_act", "silu", "swish")
    keys.only("attention_dropout", 0.0)
    return {
        "norm_eps": keys.number("rms_norm_eps", eps),
        "rope": _rope(keys, context, theta),
    }


def _llama(keys: _Keys, context: int | None, seed: int) -> Llama:
    shape, options = _shape(keys), _common(keys, context, eps=1e-6, theta=10000.0)
    keys.only("mlp_bias", False)
    bias = keys.take("attention_bias", False)
    return Llama(shape, qkv_bias=bias, output_bias=bias, seed=seed, **options)


def _mistral(keys: _Keys, context: int | None, seed: int) -> Llama:
    default = None if keys.has("sliding_window") else 4096
    shape, options = _shape(keys, kv_heads=8), _common(keys, context, eps=1e-6, theta=10000.0)
    window = keys.number("sliding_window", default)
    return Llama(shape, windows=(window,) * shape.layers, seed=seed, **options)


def _qwen(keys: _Keys, shape: ModelShape, context: int | None) -> dict[str, Any]:
    """Interpret what Qwen2 and Qwen3 have in common: windows in some layers."""
    options = _common(keys, context, eps=1e-6, theta=10000.0)
    window = keys.number("sliding_window", None if keys.has("sliding_window") else 4096)
    is_used = keys.take("use_sliding_window", False) and window is not None
    first = keys.number("max_window_layers", 28)
    full, sliding = "full_attention", "sliding_attention"
    usual = [sliding if is_used and i >= first else full for i in range(shape.layers)]
    kinds = keys.take("layer_types", usual)
    for kind in kinds:
        if kind not in {full, sliding} or (kind == sliding and not is_used):
            raise ContractError("layer_types", f"{kind!r} is not supported with these windows")
    options["windows"] = [window if kind == sliding else None for kind in kinds]
    return options


def _qwen2(keys: _Keys, context: int | None, seed: int) -> Llama:
    shape = _shape(keys)
    return Llama(shape, qkv_bias=True, seed=seed, **_qwen(keys, shape, context))


def _qwen3(keys: _Keys, context: int | None, seed: int) -> Llama:
    shape = _shape(keys)
    bias = keys.take("attention_bias", False)
    options = _qwen(keys, shape, context)
    return Llama(shape, qkv_bias=bias, output_bias=bias, qk_norm=True, seed=seed, **options)


def _mixtral(keys: _Keys, context: int | None, seed: int) -> Mixture:
    shape, options = _shape(keys, kv_heads=8), _common(keys, context, eps=1e-5, theta=1e6)
    keys.only("output_router_logits", False)
    keys.only("router_jitter_noise", 0.0)
    window = keys.number("sliding_window", None)
    return Mixture(
        shape,
        experts=keys.number("num_local_experts", 8),
        top_k=keys.number("num_experts_per_tok", 2),
        windows=(window,) * shape.layers,
        seed=seed,
        **options,
    )


def _gpt2(keys: _Keys, context: int | None, seed: int) -> Gpt2:
    keys.only("tie_word_embeddings", True)
    hidden, heads = keys.number("n_embd"), keys.number("n_head")
    shape = ModelShape(
        layers=keys.number("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=keys.number("n_inner", 4 * hidden),
        vocab=keys.number("vocab_size"),
        tied_embeddings=True,
        gated=False,
    )
    keys.only("activation_function", "gelu_new", "gelu_pytorch_tanh")
    keys.only("scale_attn_weights", True)
    dropout = keys.number("resid_pdrop", 0.1)
    for key in ("embd_pdrop", "attn_pdrop"):
        if (other := keys.number(key, 0.1)) != dropout:
            raise ContractError(key, f"{other} is not supported beside resid_pdrop {dropout}")
    eps = keys.number("layer_norm_epsilon", 1e-5)
    return Gpt2(shape, context=keys.number("n_positions"), dropout=dropout, norm_eps=eps, seed=seed)


_READERS: dict[str, Callable[[_Keys, int | None, int], Llama | Gpt2]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "gpt2": _gpt2,
}


def _rope(keys: _Keys, context: int | None, theta: float) -> Rope:
    """Interpret `rope_theta` with `rope_scaling`, or `rope_parameters`, which hold both.

    They may stand beside each other where they say the same.
    """
    base = keys.number("rope_theta", None)
    usual = {"rope_theta": theta if base is None else base}
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        held = dict(keys.take(name, None) or {})
        given = usual | {key: value for key, value in held.items() if value is not None}
        if base not in (None, given["rope_theta"]):
            other = given["rope_theta"]
            raise ContractError("rope_theta", f"is {base} and, in {name}, {other}: set one of them")
        if held:
            found.append(_rope_of(given, context))
    if len(found) == 2 and found[0] != found[1]:
        raise ContractError(
            "rope_scaling", f"says {found[0]}, and rope_parameters {found[1]}: set one of them"
        )
    return found[0] if found else _rope_of(usual, context)


def _rope_of(given: dict[str, Any], context: int | None) -> Rope:
    kind = given.pop("rope_type", given.pop("type", "default"))
    given.pop("type", None)
    if kind not in _ROPES:
        raise ContractError("rope_type", f"{kind!r} is not supported, only {', '.join(_ROPES)}")
    if (share := given.pop("partial_rotary_factor", 1.0)) != 1.0:
        raise ContractError("partial_rotary_factor", f"{share} is not supported, only 1.0")
    known = {field.name: field for field in fields(_ROPES[kind])}
    values = {"theta": given.pop("rope_theta")}
    for key in ("original_max_position_embeddings", "max_position_embeddings"):
        if key in known:
            given.setdefault(key, context)
    for key, value in given.items():
        if key in known and value is not None:
            values[key] = value
        elif value is not None and key not in {"original_max_position_embeddings"}:
            raise ContractError(key, f"{value!r} is not supported with rope_type {kind!r}")
    for key, field in known.items():
        if key not in values and field.default is MISSING:
            raise ContractError(key, f"is missing for rope_type {kind!r}")
    return _ROPES[kind](**values)


# From a model.


def config_of(model: Decoder) -> dict[str, Any]:
    """Return the configuration of a model that was not read from one.

    Raises `ContractError` for a model that no architecture of this format describes.
    """
    if isinstance(model, Gpt2):
        return _gpt2_config(model)
    llama = cast(Llama, model)
    kind = _kind_of(llama)
    config = {"model_type": kind, "architectures": [_CLASSES[kind]], **_llama_config(llama)}
    windows = set(llama.windows)
    if kind in {"mistral", "mixtral"}:
        config["sliding_window"] = llama.windows[0]
    elif kind in {"qwen2", "qwen3"}:
        config |= _qwen_windows(llama)
    if isinstance(llama, Mixture):
        config |= {"num_local_experts": llama.experts, "num_experts_per_tok": llama.top_k}
    if len(windows) > 1 and kind not in {"qwen2", "qwen3"}:
        raise ContractError("windows", f"{llama.windows} differ, which {kind} does not describe")
    return config


_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
}


def _kind_of(model: Llama) -> str:
    """Return the architecture that has the model's options."""
    if isinstance(model, Mixture):
        return "mixtral"
    has_windows = any(model.windows)
    if model.qkv_bias != model.output_bias and not (model.qkv_bias and not model.qk_norm):
        raise ContractError("output_bias", "no architecture has these biases with these norms")
    if model.qk_norm:
        return "qwen3"
    if model.qkv_bias and not model.output_bias:
        return "qwen2"
    if has_windows and model.qkv_bias:
        raise ContractError("windows", "no architecture has windows with these biases")
    return "mistral" if has_windows else "llama"


def _llama_config(model: Llama) -> dict[str, Any]:
    s = model.shape
    config = {
        "vocab_size": s.vocab,
        "hidden_size": s.hidden,
        "intermediate_size": s.ffn,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": s.tied_embeddings,
        "attention_bias": model.output_bias,
        "rope_theta": model.rope.theta,
    }
    kind = next((kind for kind, held in _ROPES.items() if type(model.rope) is held), None)
    if kind is None:
        raise ContractError("rope", f"no architecture has {type(model.rope).__name__}")
    if kind == "default":
        return config
    scaling = {
        field.name: value
        for field in fields(model.rope)
        if field.name != "theta" and (value := getattr(model.rope, field.name)) is not None
    }
    if "max_position_embeddings" in scaling:
        config["max_position_embeddings"] = scaling.pop("max_position_embeddings")
    return config | {"rope_scaling": {"rope_type": kind, **scaling}}


def _qwen_windows(model: Llama) -> dict[str, Any]:
    """Return the keys of windows in some layers, all of one width."""
    widths = {window for window in model.windows if window is not None}
    if len(widths) > 1:
        raise ContractError("windows", f"{model.windows} differ, which Qwen does not describe")
    if not widths:
        return {"use_sliding_window": False}
    kinds = ["full_attention" if w is None else "sliding_attention" for w in model.windows]
    return {
        "use_sliding_window": True,
        "sliding_window": widths.pop(),
        "max_window_layers": kinds.index("sliding_attention"),
        "layer_types": kinds,
    }


def _gpt2_config(model: Gpt2) -> dict[str, Any]:
    s = model.shape
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": s.vocab,
        "n_positions": model.context,
        "n_embd": s.hidden,
        "n_layer": s.layers,
        "n_head": s.heads,
        "n_inner": s.ffn,
        "activation_function": "gelu_new",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        "layer_norm_epsilon": model.norm_eps,
        "tie_word_embeddings": True,
    }
