"""Decodes as CUDA graphs: what the model launches is recorded once per batch size and replayed in one call.

A step of decodes is padded to the next recorded size. Everything it reads lies in buffers that stay where
they are; sampling, whose work differs from step to step, comes after the graph.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from replicas.attention.base import GraphableAttention
from replicas.model import LayerAttention, LoadedModel
from replicas.packing import AttentionBatch

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records what `run` launches; the result launches it again on the same addresses."""

    def __call__(self, run: Callable[[], None]) -> Replay: ...


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Return the batch sizes to record: dense where a padding row costs most, `max_num_seqs` the last."""
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 16), max_num_seqs}
    return sorted(size for size in sizes if size <= max_num_seqs)


class DecodeGraphs:
    """Forward passes of decodes, one graph per size. Not thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        backend: GraphableAttention,
        attention: LayerAttention,  # stores to and attends by `backend`
        *,
        max_num_seqs: int,
        max_blocks: int,  # of a sequence of the greatest length
    ) -> None:
        self._model = model
        self._backend = backend
        self._attention = attention
        self._max_blocks = max_blocks
        self._sizes = graph_sizes(max_num_seqs)
        self._replays: dict[int, Replay] = {}
        with torch.inference_mode():
            self._token_ids = torch.zeros(max_num_seqs, dtype=torch.int64, device=model.device)
            self._positions = torch.zeros_like(self._token_ids)
            self._rows = torch.arange(max_num_seqs, device=model.device)
            # One buffer for all sizes: outputs kept per graph would add up to gigabytes.
            self._logits = torch.zeros(max_num_seqs, model.vocab_size, device=model.device)
            backend.reserve_fixed(max_num_seqs, max_blocks)

    def record(self, recorder: Recorder) -> None:
        """Record all sizes, largest first, so that the smaller ones find memory in its pool."""
        with torch.inference_mode():
            for size in reversed(self._sizes):
                self._backend.begin_fixed(_no_decodes(), size, self._max_blocks)
                self._replays[size] = recorder(lambda size=size: self._forward(size))  # type: ignore[misc]

    def run(
        self,
        batch: AttentionBatch,  # one row per sequence, at most max_num_seqs
        token_ids: Tensor,  # [num_seqs] int64
        positions: Tensor,  # [num_seqs] int64
    ) -> Tensor:  # [num_seqs, vocab_size] float32; overwritten by the next call
        """Compute the logits of a step that holds nothing but decodes."""
        count = batch.num_rows
        size = next(size for size in self._sizes if size >= count)
        with torch.inference_mode():
            self._token_ids[:count].copy_(token_ids)
            self._positions[:count].copy_(positions)
            self._backend.begin_fixed(batch, size, self._max_blocks)
            self._replays[size]()
            return self._logits[:count]

    def _forward(self, size: int) -> None:
        logits = self._model.logits(
            self._token_ids[:size], self._positions[:size], self._rows[:size], self._attention
        )
        self._logits[:size].copy_(logits)


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at the same time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        # What happens at a first call only (workspaces, tables, lazy loading) must not be recorded.
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            run()
        replay: Replay = graph.replay
        return replay


def _no_decodes() -> AttentionBatch:
    empty = np.zeros(0, dtype=np.int32)
    return AttentionBatch(
        query_start_loc=np.zeros(1, dtype=np.int32),
        seq_lens=empty,
        block_tables=np.zeros((0, 1), dtype=np.int32),
        slot_mapping=empty,
    )
