"""Attention backends and the registry that finds one without importing the others."""

import importlib
from typing import TYPE_CHECKING, Final

from replicas.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from replicas.attention.base import AttentionBackend, AttentionNeeds

BACKENDS: Final = {
    "flash": "replicas.attention.flash:FlashAttention",
    "torch_varlen": "replicas.attention.torch_varlen:TorchVarlenAttention",
    "aten_varlen": "replicas.attention.aten_varlen:AtenVarlenAttention",
    "numba_cpu": "replicas.attention.numba_cpu:NumbaAttention",
    "sdpa": "replicas.attention.sdpa:SdpaAttention",
}
"""Name -> module:class, in the order in which `auto` tries them."""


def load_backend(name: str) -> "type[AttentionBackend]":
    """Import the backend called `name`. Raises ConfigError for an unknown name."""
    if name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; known are auto, {', '.join(BACKENDS)}")
    module, _, attribute = BACKENDS[name].partition(":")
    backend: type[AttentionBackend] = getattr(importlib.import_module(module), attribute)
    return backend


def choose_backend(
    name: str, device: "torch.device", dtype: "torch.dtype", needs: "AttentionNeeds"
) -> "type[AttentionBackend]":
    """Return the backend called `name`, or for `auto` the first that runs the model here.

    Raises ConfigError with the reason, or for `auto` with every backend's.
    """
    reasons = []
    for candidate in BACKENDS if name == "auto" else (name,):
        try:
            backend = load_backend(candidate)
        except ImportError as error:  # a GPU machine needs no numba, an old torch has no varlen
            reasons.append(f"attention backend {candidate!r} cannot run here: {error}")
            continue
        reason = backend.unavailable(device, dtype) or backend.unsupported(needs)
        if reason is None:
            return backend
        reasons.append(f"attention backend {candidate!r} cannot run here: {reason}")
    raise ConfigError("; ".join(reasons))
