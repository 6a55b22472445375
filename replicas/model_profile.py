"""How much GPU memory is left for the KV pool once the largest step has had its share."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from replicas.api import GenerateRequest, SamplingParams
from replicas.attention.staging import Staging
from replicas.model import LoadedModel
from replicas.sampling import NO_MASKS
from replicas.sampling_batched import draw
from replicas.sequence import Sequence

_RESERVE_BYTES: Final = 768 << 20
"""What no allocator counts: kernels loaded later, workspaces, CUDA graphs, fragmentation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuMemory:
    """Bytes of one GPU, weights being loaded."""

    total: int
    free: int
    """On the device, other processes' use taken off."""
    step: int
    """What the largest step takes at its peak, the KV pool apart."""
    graphs: int
    """What recorded decodes hold on to."""


def kv_budget(memory: GpuMemory, utilization: float) -> int:
    """Return the bytes left for the KV pool when `utilization` of the GPU may be in use in all."""
    in_use = memory.total - memory.free
    return max(0, int(memory.total * utilization) - in_use - memory.step - memory.graphs - _RESERVE_BYTES)


def measure_memory(model: LoadedModel, max_num_batched_tokens: int, max_num_seqs: int) -> GpuMemory:
    """Run the largest step and the largest step of decodes on a CUDA device, attention left out."""
    step = _peak_bytes(model, max_num_batched_tokens, max_num_seqs)
    decodes = _peak_bytes(model, max_num_seqs, max_num_seqs)
    free, total = torch.cuda.mem_get_info(model.device)
    logits = max_num_seqs * model.vocab_size * 4
    return GpuMemory(total=total, free=free, step=step, graphs=decodes + logits)


def _peak_bytes(model: LoadedModel, num_rows: int, num_samples: int) -> int:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    run_largest_step(model, num_rows, num_samples)
    torch.cuda.synchronize(model.device)
    peak = torch.cuda.max_memory_allocated(model.device) - before
    torch.cuda.empty_cache()
    return peak


def run_largest_step(model: LoadedModel, num_rows: int, num_samples: int) -> Tensor:
    """Compute `num_rows` rows and draw `num_samples` tokens in the dearest way; returns the tokens."""
    num_samples = min(num_samples, num_rows)
    rows = torch.arange(num_rows, device=model.device)
    params = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, top_k=model.vocab_size // 2, logprobs=20
    )
    with torch.inference_mode():
        logits = model.logits(
            rows % model.vocab_size, rows % model.max_position_embeddings, rows[:num_samples], _no_attention
        )
        sequences = [_sequence(params)] * num_samples
        drawn = draw(logits, sequences, [1] * num_samples, NO_MASKS, Staging(model.device))
    return drawn.token_ids


def _no_attention(
    layer: int,  # noqa: ARG001 - LayerAttention
    query: Tensor,
    key: Tensor,  # noqa: ARG001
    value: Tensor,  # noqa: ARG001
    scaling: float,  # noqa: ARG001
    window: int | None,  # noqa: ARG001
    softcap: float | None,  # noqa: ARG001
) -> Tensor:
    return torch.zeros_like(query, memory_format=torch.contiguous_format)


def _sequence(params: SamplingParams) -> Sequence:
    return Sequence(
        seq_id=0,
        owner="",
        request=GenerateRequest(request_id=0, prompt_ids=(0,), sampling=params),
        index=0,
        arrival_at=0.0,
        token_ids=[0],
        num_prompt_tokens=1,
        stop_ids=frozenset(),
        max_num_tokens=2,
    )
