"""flash-attention's kernels in plain torch, for CPU tests, with the checks of the real ones.

Those of flash_api.cpp (2.8): types, shapes, strides, page sizes. What the real kernels may do
with their freedom, these do: keys behind `max_k` are dropped, log-sum-exp of empty rows is +inf.
"""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from replicas.attention import torch_varlen
from tests.replicas.tape import opaque

PAGE = 256


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fakes where the backends look for the kernels."""
    package = SimpleNamespace(
        flash_attn_varlen_func=opaque(varlen_func), flash_attn_with_kvcache=opaque(with_kvcache)
    )
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setattr(torch_varlen.varlen, "varlen_attn_out", opaque(varlen_attn_out))
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", opaque(aten_forward))


def varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    block_table: Tensor,
) -> Tensor:
    lengths = cu_seqlens_k.diff()
    rows = _paged(k, v, block_table, lengths)
    return _attend(
        q, rows, cu_seqlens_q, max_seqlen_q, max_seqlen_k, softmax_scale, causal, window_size, softcap
    )[0]


def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
) -> Tensor:
    assert q.dim() == 4
    assert len(q) == len(cache_seqlens)
    count, length = q.shape[:2]
    cu_q = torch.arange(count + 1, dtype=torch.int32) * length
    rows = _paged(k_cache, v_cache, block_table, cache_seqlens)
    max_k = block_table.shape[1] * k_cache.shape[1]
    out, _ = _attend(q.flatten(0, 1), rows, cu_q, length, max_k, softmax_scale, causal, window_size, softcap)
    return out.view(q.shape)


def varlen_attn_out(
    out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
    num_splits: int | None,
) -> None:
    _check_starts(cu_seq_k, len(seqused_k))
    assert isinstance(window_size, tuple)
    assert enable_gqa == (query.shape[1] > key.shape[2])
    is_packed = max_q == 1 and enable_gqa and window_size == (-1, -1)
    if torch_varlen.torch_version() < (2, 13):
        assert num_splits is None, "num_splits requires FA3"
    else:
        assert num_splits == (None if is_packed else 1), "pytorch#194167: rows stay unwritten"
    rows = _paged(key, value, block_table, seqused_k)
    causal = window_size == (-1, 0)
    result, _ = _attend(query, rows, cu_seq_q, max_q, max_k, scale, causal, window_size, 0.0)
    assert out.shape == result.shape
    out.copy_(result)


def aten_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
    window_size_left: int,
    window_size_right: int,
    seqused_k: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    assert dropout_p == 0.0
    assert not return_debug_mask
    assert key.dim() == value.dim() == 3
    _check_starts(cum_seq_k, len(cum_seq_q) - 1)
    if seqused_k is None:
        starts, lengths = cum_seq_k[:-1].tolist(), cum_seq_k.diff().tolist()
        assert cum_seq_k[-1] == len(key)
    else:
        assert seqused_k.dtype == torch.int32
        starts, lengths = cum_seq_k[:-1].tolist(), seqused_k.tolist()
    rows = []
    for start, length in zip(starts, lengths, strict=True):
        assert start >= 0
        assert start + length <= len(key)
        rows.append((key[start : start + length], value[start : start + length]))
    window = (window_size_left, window_size_right)
    # No caller may depend on how the kernel lays log-sum-exp out when it packs heads itself.
    assert not (max_q == 1 and query.shape[1] > key.shape[1] and window == (-1, -1))
    return _attend(query, rows, cum_seq_q, max_q, max_k, scale, is_causal, window, 0.0)


def _check_starts(starts: Tensor, count: int) -> None:
    assert starts.dtype == torch.int32
    assert starts.shape == (count + 1,)
    assert starts.is_contiguous()


def _paged(key: Tensor, value: Tensor, block_table: Tensor, lengths: Tensor) -> list[tuple[Tensor, Tensor]]:
    assert key.dim() == value.dim() == 4
    assert key.shape == value.shape
    assert key.shape[1] % PAGE == 0, "paged KV cache block size must be divisible by 256"
    assert block_table.dtype == lengths.dtype == torch.int32
    assert block_table.shape[0] == len(lengths)
    assert block_table.stride(-1) == 1
    rows = []
    for table, length in zip(block_table.tolist(), lengths.tolist(), strict=True):
        blocks = table[: -(-length // key.shape[1])]
        rows.append((key[blocks].flatten(0, 1)[:length], value[blocks].flatten(0, 1)[:length]))
    return rows


def _attend(
    query: Tensor,
    rows: list[tuple[Tensor, Tensor]],
    cu_q: Tensor,
    max_q: int,
    max_k: int,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Tensor, Tensor]:
    _check_starts(cu_q, len(rows))
    starts = cu_q.tolist()
    assert starts[0] == 0
    assert starts[-1] == len(query), "one query row per scheduled token, no padding"
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.stride(-1) == 1
    out = torch.full_like(query, float("nan"))
    lse = torch.full((query.shape[1], len(query)), float("nan"))
    for first, end, (key, value) in zip(starts, starts[1:], rows, strict=False):
        assert end - first <= max_q
        assert key.dtype == query.dtype
        key, value = key[:max_k], value[:max_k]
        out[first:end], lse[:, first:end] = _one(query[first:end], key, value, scale, causal, window, softcap)
    return out, lse


def _one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    causal: bool,
    window: tuple[int, int],
    softcap: float,
) -> tuple[Any, Any]:
    if not len(key):
        return 0.0, float("inf")
    group = query.shape[1] // key.shape[1]
    k = key.float().repeat_interleave(group, dim=1)
    v = value.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", query.float(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    left, right = window[0], 0 if causal else window[1]
    # The last query is aligned with the last key.
    at = torch.arange(len(query))[:, None] + len(key) - len(query)
    j = torch.arange(len(key))[None]
    hidden = (j > at + right if right >= 0 else j < 0) | (j < at - left if left >= 0 else j < 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    out = torch.einsum("hij,jhd->ihd", torch.softmax(scores, dim=-1), v)
    return out.to(query.dtype), torch.logsumexp(scores, dim=-1)
