"""Linear layers in fp32 by a team's kernels: a row has the same bits in any company, so nothing is padded.

BLAS chooses its order of additions by the number of rows (model_exact.py); here a sum adds its inputs one
after the other, always, and a single row costs no more than the reading of the weights.
"""

import torch
from torch import Tensor, nn

from replicas.model_products import pack_fp32
from replicas.model_team import PackedWeight, Team


class PackedLinear(nn.Module):
    """Stands in for `inner`."""

    def __init__(self, inner: nn.Linear, team: Team) -> None:
        super().__init__()
        self.in_features: int = inner.in_features
        self.team = team
        self.weight = PackedWeight(
            packed=torch.from_numpy(pack_fp32(inner.weight.numpy())),
            bias=torch.zeros(inner.out_features) if inner.bias is None else inner.bias.clone(),
            num_inputs=inner.in_features,
        )

    def forward(self, x: Tensor) -> Tensor:
        out = self.team.multiply(x.reshape(-1, x.shape[-1]).contiguous(), self.weight)
        return out.view(*x.shape[:-1], out.shape[-1])


def pack_linears(module: nn.Module, team: Team) -> None:
    """Replace every linear layer inside `module`."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, PackedLinear(child, team))
