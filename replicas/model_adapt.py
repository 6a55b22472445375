"""Fits a loaded model to this machine: fast layers, 8-bit weights, exact numerics, in the order they need."""

from dataclasses import dataclass
from pathlib import Path

import torch

from replicas.config import Numerics, Quantization
from replicas.errors import ConfigError
from replicas.model import LoadedModel
from replicas.model_exact import make_exact
from replicas.model_fp32 import pack_linears
from replicas.model_int8 import WEIGHT_LEVELS, quantise_linears, weight_levels
from replicas.model_layer import fuse_layers
from replicas.model_rotary import tabulate_rotary
from replicas.model_smooth import smooth
from replicas.model_team import Team, open_team
from replicas.progress import Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """What became of a model."""

    row_floor: int
    """Rows to pad every pass to (model_exact.py); 1 = no padding."""
    quantization: Quantization


def adapt(
    model: LoadedModel,
    wanted: Quantization | None,  # None = int8 where it is as good as measured (cluster/bench/quality.py)
    numerics: Numerics,
    folder: Path,  # the model's, for its tokenizer
    max_positions: int,  # the rotary table's length
    progress: Progress,
) -> Adapted:
    """Change `model` in place. Raises ConfigError where the quantization wanted cannot be had."""
    on_cpu = model.device.type == "cpu" and model.dtype == torch.float32
    if wanted == "int8" and not on_cpu:
        raise ConfigError("quantization int8: only on CPU and in float32")
    if on_cpu:
        progress("fusing layers", None)
        fuse_layers(model.module)
    team = open_team(torch.get_num_threads()) if on_cpu else None
    quantization = _quantise(model, wanted, team, folder, progress) if on_cpu else "none"
    if team is not None:
        pack_linears(model.module, team)
    tabulate_rotary(model.module, max_positions)
    row_floor = make_exact(model.module) if numerics == "exact" else 1
    return Adapted(row_floor=row_floor, quantization=quantization)


def _quantise(
    model: LoadedModel, wanted: Quantization | None, team: Team | None, folder: Path, progress: Progress
) -> Quantization:
    if wanted == "none":
        return "none"
    if wanted is None and weight_levels(team) < WEIGHT_LEVELS[0]:
        return "none"
    progress("quantising to int8", None)
    if not smooth(model, folder) and wanted is None:
        return "none"
    head = model.module.get_output_embeddings()  # type: ignore[operator]
    quantise_linears(model.module, head, team)
    if team is not None:
        # A thread of OpenMP spins for milliseconds after each operation that torch shares with it, and so
        # takes a core from team and attention: steps of some 60 rows and more took twice as long.
        torch.set_num_threads(1)
    return "int8"
