"""Linear layers in int8: weights scaled per output, activations scaled and shifted per row, whole sums.

Whole-number sums have no rounding, so a row's result does not depend on the rows beside it, on the order of
the sums or on the number of threads: quantised models are exact (model_exact.py) without padding.

Products come from model_team_kernels.py where the CPU allows it, else from torch. CPUs without VNNI add pairs
of products in 16 bits, which 8-bit weights can overflow. `weight_levels` finds out what this machine computes
correctly: 8 bits, or 7.
"""

from typing import Final

import torch
from torch import Tensor, nn

from replicas.errors import ConfigError
from replicas.model_kernels import LANES, dequantise, quantise, rescore
from replicas.model_products import pack_int8
from replicas.model_team import PackedWeight, Team

WEIGHT_LEVELS: Final = (127, 63)
"""Largest magnitudes of a quantised weight to try: 8 bits, 7 bits."""

_TEST_SHAPES = ((1, 64, 64), (3, 576, 160), (17, 1536, 96), (40, 4096, 48))
"""Rows, inputs, outputs: they reach BLAS kernels of several kinds."""


class Int8Linear(nn.Module):
    """Stands in for `inner`, whose inputs are a multiple of LANES; `levels` is the largest weight.

    `team` None: torch multiplies.
    """

    def __init__(self, inner: nn.Linear, levels: int, team: Team | None = None) -> None:
        super().__init__()
        weight = inner.weight
        self.in_features: int = inner.in_features
        scales = weight.abs().amax(dim=1).clamp_min(torch.finfo(torch.float32).tiny) / levels
        quantised = torch.round(weight / scales[:, None]).to(torch.int8)
        self.team = team
        self.weight = PackedWeight(
            packed=quantised.t() if team is None else torch.from_numpy(pack_int8(quantised.numpy())),
            scales=scales,
            sums=quantised.sum(dim=1, dtype=torch.int32),
            bias=torch.zeros(len(weight)) if inner.bias is None else inner.bias.clone(),
            num_inputs=inner.in_features,
        )

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).contiguous()
        out = self._by_torch(rows) if self.team is None else self.team.multiply(rows, self.weight)
        return out.view(*x.shape[:-1], out.shape[-1])

    def _by_torch(self, rows: Tensor) -> Tensor:
        num_rows = len(rows)
        quantised = torch.empty(rows.shape, dtype=torch.uint8)
        scales, zeros = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int32)
        quantise(quantised.numpy(), scales.numpy(), zeros.numpy(), rows.numpy(), 0, num_rows)
        weight = self.weight
        assert weight.scales is not None
        assert weight.sums is not None
        sums = torch._int_mm((quantised ^ 128).view(torch.int8), weight.packed)
        out = torch.empty(sums.shape)
        columns = [column.numpy() for column in (weight.scales, weight.sums, weight.bias)]
        dequantise(out.numpy(), sums.numpy(), scales.numpy(), (zeros - 128).numpy(), *columns, 0, num_rows)
        return out


class Int8Head(Int8Linear):
    """A model's head: in int8 to find the best tokens, in full precision for the logits of those."""

    def __init__(self, inner: nn.Linear, levels: int, team: Team | None = None) -> None:
        super().__init__(inner, levels, team)
        self.full_weight = inner.weight

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        rows = logits.view(-1, logits.shape[-1])
        hidden = x.reshape(len(rows), x.shape[-1]).contiguous()
        rescore(rows.numpy(), hidden.numpy(), self.full_weight.numpy(), 0, len(rows))
        return logits


def quantise_linears(module: nn.Module, head: nn.Module | None, team: Team | None) -> None:
    """Replace the linear layers inside `module` by int8 ones; `head` too, if it is one of them.

    Layers whose inputs do not fill whole vector registers stay. Raises ConfigError when this machine does not
    multiply int8 matrices correctly.
    """
    levels = weight_levels(team)
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if not isinstance(child, nn.Linear) or child.in_features % LANES:
                continue
            if child is not head:
                setattr(parent, name, Int8Linear(child, levels, team))
            elif getattr(child, "bias", None) is None:
                setattr(parent, name, Int8Head(child, levels, team))


def weight_levels(team: Team | None) -> int:
    """Return the largest of WEIGHT_LEVELS with which int8 products are correct on this machine."""
    for levels in WEIGHT_LEVELS:
        if all(_is_correct(levels, team, *shape) for shape in _TEST_SHAPES):
            return levels
    raise ConfigError("quantization int8: this machine and torch do not multiply int8 matrices exactly")


def _is_correct(levels: int, team: Team | None, rows: int, inputs: int, outputs: int) -> bool:
    """Try the sums furthest from zero beside random ones."""
    generator = torch.Generator().manual_seed(rows)
    x = torch.randint(0, 256, (rows, inputs), generator=generator).float()
    weight = torch.randint(-levels, levels + 1, (outputs, inputs), generator=generator).float()
    x[::3], x[1::3] = 255.0, 0.0
    x[:, 0], x[:, 1] = 255.0, 0.0  # each row's range is 255: it is quantised to itself
    weight[::2], weight[1::4] = levels, -levels
    weight[:, 0] = levels
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    return torch.equal(Int8Linear(layer, levels, team)(x), (x.double() @ weight.double().t()).float())
