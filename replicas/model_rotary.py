"""Rotary embeddings from a table: a position's cosines are computed once, not in every step.

Besides being cheaper this fixes their bits: computed per step they depend on the row's place in the batch,
because vector and scalar cosines differ in the last bit.
"""

from typing import Any

import torch
from torch import Tensor, nn


class RotaryTable(nn.Module):
    """Stands in for a model's rotary embedding, for positions below `max_positions`."""

    def __init__(self, inner: nn.Module, max_positions: int) -> None:
        super().__init__()
        self.inner = inner
        self._max_positions = max_positions
        self._tables: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}

    def forward(self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return cosines and sines, [1, rows, dim] each; further arguments choose among layer types."""
        key = (x.dtype, x.device, *args, *kwargs.items())
        if key not in self._tables:
            every_position = torch.arange(self._max_positions, device=x.device)[None]
            cos, sin = self.inner(x, every_position, *args, **kwargs)
            self._tables[key] = (cos[0], sin[0])
        cos, sin = self._tables[key]
        return cos[position_ids], sin[position_ids]


def tabulate_rotary(module: nn.Module, max_positions: int) -> None:
    """Replace every rotary embedding inside `module`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding") and not isinstance(parent, RotaryTable):
                setattr(parent, name, RotaryTable(child, max_positions))
