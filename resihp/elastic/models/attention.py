"""Causal attention inside each of the documents that are packed into a microbatch."""

from __future__ import annotations

import torch
from torch.nn import functional


def attend(
    q_TNH: torch.Tensor, k_TKH: torch.Tensor, v_TKH: torch.Tensor, seq_lens: tuple[int, ...]
) -> torch.Tensor:
    """Attention of N query heads over K key/value heads, [T, N, H]; N is a multiple of K."""
    per_document = [
        functional.scaled_dot_product_attention(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            is_causal=True,
            enable_gqa=q_TNH.shape[1] != k_TKH.shape[1],
        ).transpose(0, 1)
        for q, k, v in zip(
            q_TNH.split(seq_lens), k_TKH.split(seq_lens), v_TKH.split(seq_lens), strict=True
        )
    ]
    return per_document[0] if len(per_document) == 1 else torch.cat(per_document)
