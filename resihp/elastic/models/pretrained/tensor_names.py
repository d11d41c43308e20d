"""Names and places of a model's parameters among the tensors of Hugging Face's format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from resihp.layout import Param, Range

from ..gpt2 import Gpt2
from ..llama import Llama
from ..mixture import Mixture
from .tensor_files import Region


@dataclass(frozen=True)
class TensorSlot:
    """Place of a parameter, or of one of its experts, in a stored tensor.

    name        of the stored tensor
    shape       of the stored tensor
    expert      index into the parameter's first dimension; None: it is no stack of experts
    first       row of the stored tensor (its column if transposed) at which the parameter begins
    transposed  the stored matrix has inputs as rows
    """

    name: str
    shape: tuple[int, ...]
    expert: int | None = None
    first: int = 0
    transposed: bool = False

    def region(self, param: Param, rows: Range) -> Region:
        """Return the region of the stored tensor that holds `rows` of the parameter."""
        ranges = [(0, size) for size in param.shape]
        ranges[param.dim or 0] = rows
        if self.expert is not None:
            del ranges[0]
        ranges[0] = (ranges[0][0] + self.first, ranges[0][1] + self.first)
        return tuple(ranges[::-1] if self.transposed else ranges)

    def part(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of a parameter's rows that this slot stores, as it is stored."""
        view = tensor if self.expert is None else tensor[self.expert]
        return view.T if self.transposed else view


Slots = Mapping[Param, tuple[TensorSlot, ...]]


def slots_of(model: Llama | Gpt2) -> Slots:
    """Return the slots of every parameter; a tied one is stored once, as the embedding."""
    find = _gpt2_slot if isinstance(model, Gpt2) else _llama_slot
    return {
        param: _expert_slots(param) if _is_of_experts(model, param) else (find(model, param),)
        for param in model.parameters.all
    }


_ENDS = {
    "first.table": "model.embed_tokens.weight",
    "last.norm": "model.norm.weight",
    "last.table": "lm_head.weight",
}
_LLAMA = {
    "attention_norm": "input_layernorm.weight",
    "wq": "self_attn.q_proj.weight",
    "wk": "self_attn.k_proj.weight",
    "wv": "self_attn.v_proj.weight",
    "wo": "self_attn.o_proj.weight",
    "bq": "self_attn.q_proj.bias",
    "bk": "self_attn.k_proj.bias",
    "bv": "self_attn.v_proj.bias",
    "bo": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "ffn_norm": "post_attention_layernorm.weight",
    "w_gate": "mlp.gate_proj.weight",
    "w_up": "mlp.up_proj.weight",
    "w_down": "mlp.down_proj.weight",
    "router": "block_sparse_moe.gate.weight",
}
_EXPERT = {"w_gate": "w1", "w_up": "w3", "w_down": "w2"}

_GPT2_ENDS = {
    "first.table": "transformer.wte.weight",
    "first.positions": "transformer.wpe.weight",
    "last.norm": "transformer.ln_f.weight",
    "last.bias": "transformer.ln_f.bias",
}
_GPT2 = {
    "norm1": "ln_1.weight",
    "bias1": "ln_1.bias",
    "wo": "attn.c_proj.weight",
    "bo": "attn.c_proj.bias",
    "norm2": "ln_2.weight",
    "bias2": "ln_2.bias",
    "w_in": "mlp.c_fc.weight",
    "b_in": "mlp.c_fc.bias",
    "w_out": "mlp.c_proj.weight",
    "b_out": "mlp.c_proj.bias",
}
_GPT2_QKV = {"wq": 0, "wk": 1, "wv": 2, "bq": 0, "bk": 1, "bv": 2}


def _llama_slot(model: Llama | Gpt2, param: Param) -> TensorSlot:
    layer, name = _split(param)
    stored = _ENDS[param.key] if layer is None else f"model.layers.{layer}.{_LLAMA[name]}"
    return TensorSlot(stored, param.shape)


def _is_of_experts(model: Llama | Gpt2, param: Param) -> bool:
    return isinstance(model, Mixture) and len(param.shape) == 3


def _expert_slots(param: Param) -> tuple[TensorSlot, ...]:
    layer, name = _split(param)
    stored = f"model.layers.{layer}.block_sparse_moe.experts.{{}}.{_EXPERT[name]}.weight"
    return tuple(
        TensorSlot(stored.format(expert), param.shape[1:], expert=expert)
        for expert in range(param.shape[0])
    )


def _gpt2_slot(model: Llama | Gpt2, param: Param) -> TensorSlot:
    """Return a slot of GPT-2, whose matrices have inputs as rows and whose q, k and v are one."""
    layer, name = _split(param)
    if layer is None:
        return TensorSlot(_GPT2_ENDS[param.key], param.shape)
    stored = f"transformer.h.{layer}."
    is_matrix = len(param.shape) == 2
    if name in _GPT2_QKV:
        stored += "attn.c_attn." + ("weight" if is_matrix else "bias")
        shape = (*param.shape[1:], 3 * param.shape[0])
        first = _GPT2_QKV[name] * param.shape[0]
        return TensorSlot(stored, shape, first=first, transposed=is_matrix)
    shape = param.shape[::-1]
    return TensorSlot(stored + _GPT2[name], shape, transposed=is_matrix)


def _split(param: Param) -> tuple[int | None, str]:
    """Return layer and name of a parameter; no layer at the two ends."""
    if not param.key.startswith("layers."):
        return None, param.key
    _, layer, name = param.key.split(".", 2)
    return int(layer), name
