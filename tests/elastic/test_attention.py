"""Attention in documents: memory linear in the length, and kernels that repeat where asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.backends import cuda
from torch.nn.functional import scaled_dot_product_attention

from resihp.elastic.models import decoder
from resihp.elastic.models.decoder import attend
from tests.elastic.engine_job import small_setup

HEADS, GROUPS, WIDTH = 4, 2, 8


def inputs(tokens: int) -> list[torch.Tensor]:
    chosen = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(tokens, heads, WIDTH, generator=chosen, requires_grad=True)
        for heads in (HEADS, GROUPS, GROUPS)
    ]


@pytest.mark.parametrize("window", [None, 20])
def test_what_is_kept_grows_with_the_length(window: int | None) -> None:
    kept = []
    for tokens in (200, 400):
        sizes: dict[int, int] = {}

        def keep(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            storage = tensor.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
            return tensor

        with saved_tensors_hooks(keep, lambda tensor: tensor):
            attend(*inputs(tokens), (tokens,), window=window)
        kept.append(sum(sizes.values()))
    assert kept[1] < 2.2 * kept[0]


@pytest.mark.parametrize("seq_lens", [(50,), (1, 7, 42), (25, 25)])
@pytest.mark.parametrize("window", [None, 1, 7, 49, 50])
@pytest.mark.parametrize("grouped", [True, False])
def test_a_token_sees_its_document_and_window(
    seq_lens: tuple[int, ...], window: int | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "_takes_grouped_heads", lambda *_, **__: grouped)
    position = torch.arange(50)
    document = torch.repeat_interleave(torch.arange(len(seq_lens)), torch.tensor(seq_lens))
    behind = position[:, None] - position
    seen = (document[:, None] == document) & (behind >= 0) & (behind < (window or 50))
    q, k, v = inputs(50)
    expected = scaled_dot_product_attention(
        q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=seen, enable_gqa=True
    ).transpose(0, 1)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(0))
    torch.autograd.backward(expected, weights)
    gradients = [one.grad for one in (q, k, v)]
    q, k, v = inputs(50)
    found = attend(q, k, v, seq_lens, window=window)
    torch.testing.assert_close(found, expected)
    torch.autograd.backward(found, weights)
    for one, gradient in zip((q, k, v), gradients, strict=True):
        torch.testing.assert_close(one.grad, gradient)


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """As `torch.nn.attention.varlen.varlen_attn` documents itself, by a mask."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    lengths = cu_seq_q.diff()
    assert max_q == max_k == int(lengths.max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    position = torch.arange(len(query))
    behind, (left, right) = position[:, None] - position, window_size
    seen = (document[:, None] == document) & (behind >= -right)
    seen &= (behind <= left) | (left == -1)
    out = scaled_dot_product_attention(
        *(x.transpose(0, 1) for x in (query, key, value)), attn_mask=seen, enable_gqa=enable_gqa
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("seq_lens", [(1, 7, 42), (25, 25)])
@pytest.mark.parametrize("window", [None, 1, 7, 25, 50])
def test_all_documents_at_once_where_torch_has_a_kernel_for_them(
    seq_lens: tuple[int, ...], window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = attend(*inputs(50), seq_lens, window=window)
    monkeypatch.setattr(decoder, "_takes_packed", lambda _: True)
    monkeypatch.setattr(decoder, "_packed_attention", lambda: packed_attention)
    torch.testing.assert_close(attend(*inputs(50), seq_lens, window=window), expected)


@pytest.mark.parametrize("window", [None, 7])
def test_torchs_own_kernel_is_called_as_it_wants(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a device: what checks its arguments, and computes nothing."""
    if decoder._packed_attention() is None:
        pytest.skip("this torch has none with windows and grouped heads")
    monkeypatch.setattr(decoder, "_takes_packed", lambda _: True)
    meta = (x.detach().to("meta", torch.bfloat16) for x in inputs(50))
    assert attend(*meta, (20, 30), window=window).shape == (50, HEADS, WIDTH)


@pytest.mark.parametrize(
    ("dtype", "window", "grouped"),
    [
        (torch.bfloat16, None, True),
        (torch.bfloat16, 100, True),
        (torch.bfloat16, 20, False),
        (torch.float32, None, False),
    ],
)
def test_accelerators_get_what_a_fused_kernel_of_theirs_takes(
    dtype: torch.dtype, window: int | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There flash attention alone takes grouped heads: without a mask, in 16 bits."""
    asked = []

    def spy(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
        asked.append((options["enable_gqa"], key.shape[1], value.shape[1]))
        return torch.empty_like(query)

    monkeypatch.setattr(decoder.functional, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: False)
    attend(*(x.detach().to("meta", dtype) for x in inputs(50)), (50,), window=window)
    assert set(asked) == {(True, GROUPS, GROUPS) if grouped else (False, HEADS, HEADS)}


@pytest.mark.parametrize(
    ("device", "deterministic", "fused"),
    [("cpu", True, True), ("cuda:0", False, True), ("cuda:0", True, False)],
)
def test_deterministic_training_uses_no_kernel_that_sums_in_any_order(
    device: str, deterministic: bool, fused: bool
) -> None:
    setup = replace(small_setup(), device=torch.device(device), deterministic=deterministic)
    with setup.attention_kernels():
        assert cuda.flash_sdp_enabled() is fused
        assert cuda.mem_efficient_sdp_enabled() is fused
        assert cuda.math_sdp_enabled()
    assert cuda.flash_sdp_enabled()
