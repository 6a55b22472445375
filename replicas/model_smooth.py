"""SmoothQuant (Xiao et al., 2023): moves outliers of a linear layer's inputs into its weights.

Before rounding to 8 bits each input channel of the layer is divided by a factor, which the norm or the linear
layer in front of it takes over, and the layer's weights are multiplied by it: the results stay what they
were, and both ranges get more even.
"""

from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from replicas.model import LoadedModel
from replicas.model_layer import FusedLayer

_CALIBRATION: Final = Path(__file__).with_name("calibration.txt")

_ALPHA: Final = 0.5
"""How much of the difficulty goes to the weights (section 4.3)."""
_LEAST: Final = 1e-5


class InputPeaks:
    """Within `with`, notes the largest magnitude of each input channel of the fused layers in `module`."""

    def __init__(self, module: nn.Module) -> None:
        self.layers = [layer for layer in module.modules() if isinstance(layer, FusedLayer)]
        self._peaks: dict[nn.Module, Tensor] = {}
        self._handles: list[Any] = []

    def __enter__(self) -> "InputPeaks":
        for layer in self.layers:
            for linear in (layer.qkv, layer.gate_up, layer.down):
                self._handles.append(linear.register_forward_pre_hook(self._note))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self, linear: nn.Module, args: tuple[Any, ...]) -> None:
        peaks = args[0].abs().flatten(0, -2).amax(dim=0)
        self._peaks[linear] = torch.maximum(self._peaks.get(linear, peaks), peaks)

    def smooth(self) -> None:
        """Fold the factors that follow from the peaks into the weights."""
        for layer in self.layers:
            for norm, linear in zip(layer.norms, (layer.qkv, layer.gate_up), strict=True):
                _weight(norm).div_(self._multiply(linear))
            factor = self._multiply(layer.down)
            layer.gate_up.weight[len(factor) :].div_(factor[:, None])
            if layer.gate_up.bias is not None:
                layer.gate_up.bias[len(factor) :].div_(factor)

    def _multiply(self, linear: nn.Linear) -> Tensor:  # [in_features]
        """Multiply a layer's input channels by their factors; return those."""
        activations = self._peaks[linear].clamp_min(_LEAST)
        weights = linear.weight.abs().amax(dim=0).clamp_min(_LEAST)
        factor = activations**_ALPHA / weights ** (1 - _ALPHA)
        linear.weight.mul_(factor)
        return factor


def _weight(norm: nn.Module) -> Tensor:
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return weight


def smooth(model: LoadedModel, folder: Path) -> bool:
    """Smooth the fused layers of `model` by what they see on a fixed text.

    Returns False, leaving the model as it is, where the tokenizer in `folder` cannot be read (tokenizer.json)
    or no layer is fused.
    """
    peaks = InputPeaks(model.module)
    token_ids = _calibration_ids(folder)
    if token_ids is None or not peaks.layers:
        return False
    rows = torch.arange(len(token_ids))
    with torch.inference_mode(), peaks:
        model.logits(token_ids, rows, rows[-1:], _attend_causally)
    peaks.smooth()
    return True


def _calibration_ids(folder: Path) -> Tensor | None:
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # the only class it raises
        return None
    return torch.tensor(tokenizer.encode(_CALIBRATION.read_text(encoding="utf-8")).ids)


def _attend_causally(
    layer: int,  # noqa: ARG001 - LayerAttention
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float,
    window: int | None,  # noqa: ARG001 - the text is short
    softcap: float | None,  # noqa: ARG001 - fused layers have none
) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
    return out[0].transpose(0, 1).contiguous()
