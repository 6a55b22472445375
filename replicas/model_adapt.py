"""Fits a loaded model to this machine: fast layers, 8-bit weights, exact numerics, in the order they need."""

from pathlib import Path

import torch

from replicas.config import Numerics, Quantization
from replicas.errors import ConfigError
from replicas.model import LoadedModel
from replicas.model_exact import make_exact
from replicas.model_int8 import quantise_linears
from replicas.model_layer import fuse_layers
from replicas.model_rotary import tabulate_rotary
from replicas.model_smooth import smooth
from replicas.progress import Progress


def adapt(
    model: LoadedModel,
    quantization: Quantization,
    numerics: Numerics,
    folder: Path,  # the model's, for its tokenizer
    max_positions: int,  # the rotary table's length
    progress: Progress,
) -> int:
    """Change `model` in place; return the rows to pad every pass to (1 = none, model_exact.py)."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    if quantization != "none" and not on_cpu:
        raise ConfigError(f"quantization {quantization}: only on CPU and in float32")
    if on_cpu:
        progress("fusing layers", None)
        fuse_layers(model.module)
    if quantization == "int8":
        progress("quantising to int8", None)
        smooth(model, folder)
        head = model.module.get_output_embeddings()  # type: ignore[operator]
        quantise_linears(model.module, head)
    tabulate_rotary(model.module, max_positions)
    return make_exact(model.module) if numerics == "exact" else 1
