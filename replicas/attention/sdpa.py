"""Reference attention: softmax(q k / scale) v in plain torch, one row at a time. Slow, runs everywhere."""

from typing import ClassVar

import torch
from torch import Tensor

from replicas.attention.base import AttentionBackend, KVPoolSpec
from replicas.packing import AttentionBatch


class SdpaAttention(AttentionBackend):
    """The oracle of all other backends; K and V of a sequence are gathered anew for every layer.

    Rows are computed one by one, so that no row can see another: with whole chunks the shape of the
    matrix products, and with it their rounding, would depend on the chunk.
    """

    name: ClassVar = "sdpa"
    preferred_block_size: ClassVar = 16
    block_size_multiple: ClassVar = 1
    supports_softcap: ClassVar = True
    batch_invariant: ClassVar = True

    @classmethod
    def unavailable(cls, device: torch.device, dtype: torch.dtype) -> str | None:  # noqa: ARG003
        return None

    def __init__(self, spec: KVPoolSpec) -> None:
        needs = spec.needs
        shape = (needs.num_layers, spec.num_blocks, spec.block_size, needs.num_kv_heads, needs.head_dim)
        self._device = spec.device
        self._keys = torch.zeros(shape, dtype=spec.dtype, device=spec.device)
        self._values = torch.zeros_like(self._keys)

    @property
    def pools(self) -> list[Tensor]:
        return [*self._keys, *self._values]

    def begin_step(self, batch: AttentionBatch) -> None:
        self._num_rows = batch.num_rows
        self._slots = torch.from_numpy(batch.slot_mapping[: batch.num_rows]).long().to(self._device)
        block_size = self._keys.shape[2]
        self._spans: list[tuple[int, int, int]] = []
        self._blocks: list[Tensor] = []
        starts = batch.query_start_loc.tolist()
        for i, length in enumerate(batch.seq_lens.tolist()):
            self._spans.append((starts[i], starts[i + 1], length))
            used = torch.from_numpy(batch.block_tables[i, : -(-length // block_size)]).long()
            self._blocks.append(used.to(self._device))

    def store(self, layer: int, key: Tensor, value: Tensor) -> None:
        self._keys[layer].flatten(0, 1)[self._slots] = key[: self._num_rows]
        self._values[layer].flatten(0, 1)[self._slots] = value[: self._num_rows]

    def attend(
        self, layer: int, query: Tensor, scaling: float, window: int | None, softcap: float | None
    ) -> Tensor:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for (first, end, length), blocks in zip(self._spans, self._blocks, strict=True):
            keys = self._keys[layer][blocks].flatten(0, 1)
            values = self._values[layer][blocks].flatten(0, 1)
            for row in range(first, end):
                last = length - (end - row)
                seen = slice(0 if window is None else max(0, last + 1 - window), last + 1)
                out[row] = _attend_row(query[row], keys[seen], values[seen], scaling, softcap)
        return out


def _attend_row(
    query: Tensor,  # [num_heads, head_dim]
    keys: Tensor,  # [positions, num_kv_heads, head_dim]
    values: Tensor,  # as keys
    scaling: float,
    softcap: float | None,
) -> Tensor:  # [num_heads, head_dim]
    num_kv_heads, head_dim = keys.shape[1:]
    grouped = query.view(num_kv_heads, -1, head_dim)
    scores = (grouped @ keys.permute(1, 2, 0)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.softmax(scores, dim=-1).to(values.dtype)
    return (weights @ values.transpose(0, 1)).reshape(-1, head_dim)
