"""Exact numerics on CPU: a row's bits depend on its own values only, never on the rows beside it.

Three things break that in torch, each in its own way:

* BLAS picks a kernel by the number of rows. From some count on every row comes out the same whatever the
  count and the row's place; `row_floor` finds that count on this machine, and the runner pads to it.
* Element-wise functions treat what does not fill a vector register, at the end of the tensor and of each
  thread's share, by scalar code with other rounding: `WholeRows` calls them so that no such rest exists.
* Rotary cosines, for the same reason: model_rotary.py.
"""

from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

MAX_ROW_FLOOR: Final = 64
"""A linear layer that needs more rows than this is cut into blocks of as many rows instead."""

_GRAIN = 32_768
"""torch runs element-wise functions over fewer elements on one thread (at::internal::GRAIN_SIZE)."""
_VECTOR = 64
"""A multiple of every element count that torch's vector loops step by."""
_COUNTS = (*range(1, 34), 48, MAX_ROW_FLOOR, 100, 257)
_COUNTS_OF_LARGE = (*range(1, 26), 40)
_LARGE_WEIGHT = 8 << 20
_SEED = 20_240_229


class WholeRows(nn.Module):
    """Applies an element-wise function to blocks of whole rows that one thread works through."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        width = x.shape[-1]
        rows = F.pad(x, (0, -width % _VECTOR)) if width % _VECTOR else x
        rows = rows.reshape(-1, rows.shape[-1])
        block = max(1, (_GRAIN - 1) // rows.shape[-1])
        out = (
            self.inner(rows)
            if len(rows) <= block
            else torch.cat([self.inner(b) for b in torch.split(rows, block)])
        )
        return out[:, :width].reshape(x.shape)


class RowBlocks(nn.Module):
    """Applies a linear layer to blocks of always the same number of rows."""

    def __init__(self, inner: nn.Module, block: int = MAX_ROW_FLOOR) -> None:
        super().__init__()
        self.inner = inner
        self._block = block

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        padded = F.pad(rows, (0, 0, 0, -len(rows) % self._block))
        out = torch.cat([self.inner(block) for block in torch.split(padded, self._block)])
        return out[: len(rows)].reshape(*x.shape[:-1], -1)


def make_exact(module: nn.Module) -> int:
    """Change `module` in place so that its rows are independent; return the rows to pad every pass to.

    Takes a fraction of a second for a small model: each distinct shape of linear layer is tried.
    """
    floor = 1
    needs_blocks: set[tuple[object, ...]] = set()
    seen: set[tuple[object, ...]] = set()
    for layer in module.modules():
        if isinstance(layer, nn.Linear | Conv1D) and _shape(layer) not in seen:
            seen.add(_shape(layer))
            rows = row_floor(layer)
            if rows is None or rows > MAX_ROW_FLOOR:
                needs_blocks.add(_shape(layer))
            else:
                floor = max(floor, rows)
    _replace(module, needs_blocks)
    return floor


def row_floor(layer: nn.Module) -> int | None:
    """Find the smallest row count from which `layer` gives equal bits whatever the count; None = none."""
    weight: Tensor = layer.weight  # type: ignore[assignment]
    features = weight.shape[0] if isinstance(layer, Conv1D) else weight.shape[1]
    counts = _COUNTS_OF_LARGE if weight.numel() >= _LARGE_WEIGHT else _COUNTS
    generator = torch.Generator().manual_seed(_SEED)
    most = counts[-1]
    x = torch.randn(most, features, generator=generator).to(weight.dtype)
    expected = layer(x)
    for place in range(len(counts) - 2, -1, -1):
        # The last rows: at other places in the batch than in `expected`.
        if not torch.equal(layer(x[most - counts[place] :].clone()), expected[most - counts[place] :]):
            return None if counts[place + 1] == most else counts[place + 1]
    return 1


def _shape(layer: nn.Module) -> tuple[object, ...]:
    return (type(layer), *layer.weight.shape, getattr(layer, "bias", None) is None)  # type: ignore[misc]


def _replace(module: nn.Module, needs_blocks: set[tuple[object, ...]]) -> None:
    for parent in list(module.modules()):
        if isinstance(parent, WholeRows | RowBlocks):
            continue
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | Conv1D):
                if _shape(child) in needs_blocks:
                    setattr(parent, name, RowBlocks(child))
            elif type(child).__module__ in ("transformers.activations", "torch.nn.modules.activation"):
                setattr(parent, name, WholeRows(child))
