"""Attention backends and the registry that finds one without importing the others."""

import importlib
from typing import TYPE_CHECKING, Final

from replicas.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from replicas.attention.base import AttentionBackend

BACKENDS: Final = {
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


def choose_backend(name: str, device: "torch.device", dtype: "torch.dtype") -> "type[AttentionBackend]":
    """Return the backend called `name`, or for `auto` the first that runs here.

    Raises ConfigError when the named one does not run here, with its reason.
    """
    for candidate in BACKENDS if name == "auto" else (name,):
        backend = load_backend(candidate)
        reason = backend.unavailable(device, dtype)
        if reason is None:
            return backend
    raise ConfigError(f"attention backend {name!r} cannot run here: {reason}")
