"""A transformer layer with few operations: merged projections, and one kernel call between two products.

transformers' layers spend most of a small step in the overhead of some hundred tensor operations. Layers of
the Llama kind (Llama, Mistral, Qwen2, Qwen3 and many that copy them) are replaced; which those are is not
read off a list of names but tried: a layer is replaced if the new one gives the same results.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

from replicas.model_kernels import LANES, add_rms_norm, norm_heads, rms_norm, rotate, silu_mul

_TRIAL_ROWS: Final = 12
_TOLERANCE: Final = 1e-4

Attention = Callable[..., Tensor]


class FusedLayer(nn.Module):
    """Computes what `layer` does. Raises AttributeError where it is built otherwise than a Llama layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        attention: Any = layer.self_attn
        mlp: Any = layer.mlp
        projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self._index: int = attention.layer_idx
        self.scaling: float = attention.scaling
        self._head_dim: int = attention.head_dim
        self._heads = [p.out_features // self._head_dim for p in projections]
        self.qkv = _merge(projections)
        self.output = attention.o_proj
        self.gate_up = _merge([mlp.gate_proj, mlp.up_proj])
        self.down = mlp.down_proj
        self.norms = nn.ModuleList([layer.input_layernorm, layer.post_attention_layernorm])  # type: ignore[list-item]
        self.head_norms = nn.ModuleList(
            [norm for norm in (getattr(attention, n, None) for n in ("q_norm", "k_norm")) if norm is not None]
        )

    def forward(
        self,
        hidden_states: Tensor,  # [1, rows, hidden]; changed
        *,
        position_embeddings: tuple[Tensor, Tensor],  # cosines, sines: [1, rows, head_dim]
        paged_attention: Attention,
        **_: Any,
    ) -> Tensor:  # [1, rows, hidden]
        x = hidden_states[0]
        num_rows = x.shape[0]  # len() of a tensor is ten times as slow, and counts in a small step
        normed = torch.empty_like(x)
        weight, eps = _weight_and_eps(self.norms[0])
        rms_norm(normed.numpy(), x.numpy(), weight, eps, 0, num_rows)
        attended = self._attend(normed, position_embeddings, paged_attention)
        weight, eps = _weight_and_eps(self.norms[1])
        add_rms_norm(normed.numpy(), x.numpy(), self.output(attended).numpy(), weight, eps, 0, num_rows)
        gate_up = self.gate_up(normed)
        product = torch.empty(num_rows, gate_up.shape[1] // 2)
        silu_mul(product.numpy(), gate_up.numpy(), 0, num_rows)
        x += self.down(product)
        return hidden_states

    def _attend(
        self, normed: Tensor, position_embeddings: tuple[Tensor, Tensor], paged_attention: Attention
    ) -> Tensor:  # [rows, num_heads * head_dim]
        num_rows = normed.shape[0]
        num_heads, num_kv_heads, _ = self._heads
        qkv = self.qkv(normed).view(num_rows, -1, self._head_dim)
        bounds = ((0, num_heads), (num_heads, num_heads + num_kv_heads))
        for norm, (first, last) in zip(self.head_norms, bounds, strict=False):
            norm_heads(qkv.numpy(), first, last, *_weight_and_eps(norm), 0, num_rows)
        cos, sin = position_embeddings
        rotate(qkv.numpy(), num_heads + num_kv_heads, cos[0].numpy(), sin[0].numpy(), 0, num_rows)
        query, key, value = qkv.split(self._heads, dim=1)
        out = paged_attention(self._index, query, key, value, self.scaling, None, None)
        return out.view(num_rows, -1)


class RowNorm(nn.Module):
    """Computes what `norm`, of the Llama kind, does, with the sums of the fused layers' norms."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self._norm = norm

    def forward(self, x: Tensor) -> Tensor:  # [1, rows, hidden]
        out = torch.empty_like(x)
        rms_norm(out[0].numpy(), x[0].contiguous().numpy(), *_weight_and_eps(self._norm), 0, x.shape[1])
        return out


def fuse_layers(module: nn.Module) -> int:
    """Replace inside `module` each layer that a FusedLayer computes equally; return how many."""
    count = 0
    for parent in list(module.modules()):
        if not isinstance(parent, nn.ModuleList):
            continue
        for i, layer in enumerate(parent):
            fused = _fused(layer)
            if fused is not None:
                parent[i] = fused
                count += 1
    return count


def _fused(layer: nn.Module) -> FusedLayer | None:
    """Return the layer's replacement, or None where it is of another kind."""
    try:
        fused = FusedLayer(layer)
        widths = {fused._head_dim, fused.down.in_features, fused.down.out_features}
        if any(width % LANES for width in widths):
            return None
        return fused if _agree(layer, fused) else None
    except (AttributeError, TypeError, RuntimeError):  # of foreign modules: not what was expected
        return None


def _agree(layer: nn.Module, fused: FusedLayer) -> bool:
    """Compare both on random rows, with an attention in which Q, K and V all matter."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, _TRIAL_ROWS, fused.down.out_features, generator=generator)
    angles = torch.randn(1, _TRIAL_ROWS, fused._head_dim // 2, generator=generator).repeat(1, 1, 2)
    seen: list[Tensor] = []

    def attention(_layer: int, query: Tensor, key: Tensor, value: Tensor, scaling: float, *_: Any) -> Tensor:
        seen.extend((query * scaling, key, value))
        group = query.shape[1] // key.shape[1]
        return query * scaling + torch.repeat_interleave(key * value, group, dim=1)

    with torch.inference_mode():
        rest = {"position_embeddings": (angles.cos(), angles.sin()), "paged_attention": attention}
        seen.append(layer(x.clone(), attention_mask=None, **rest))
        seen.append(fused(x.clone(), **rest))
    theirs, ours = seen[:4], seen[4:]
    return all(
        bool((a - b).abs().max() <= _TOLERANCE * a.abs().max()) for a, b in zip(theirs, ours, strict=True)
    )


def _merge(layers: Sequence[nn.Linear]) -> nn.Linear:
    """Return one linear layer with the outputs of all of `layers`, one after the other."""
    weight = torch.cat([layer.weight.detach() for layer in layers])
    biased = any(layer.bias is not None for layer in layers)
    merged = nn.Linear(weight.shape[1], len(weight), bias=biased, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if biased:
        biases = [torch.zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
        merged.bias = nn.Parameter(torch.cat([bias.detach() for bias in biases]), requires_grad=False)
    return merged


def _weight_and_eps(norm: nn.Module) -> tuple[Any, np.float32]:
    return norm.weight.numpy(), np.float32(norm.variance_epsilon)  # type: ignore[operator, arg-type]
