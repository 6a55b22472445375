"""Which device, which number format, how many threads; the part of start-up that must ask torch."""

import torch

from replicas.config import EngineConfig
from replicas.errors import ConfigError


def choose_device(config: EngineConfig) -> torch.device:
    """Return the device to run on; `auto` prefers CUDA. Raises ConfigError when it is not there."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigError("device cuda: torch finds no CUDA device on this machine")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def choose_dtype(config: EngineConfig, device: torch.device) -> torch.dtype | None:
    """Return the format of weights and KV; None = the checkpoint's own."""
    if config.dtype == "auto":
        return torch.float32 if device.type == "cpu" else None
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def set_num_threads(num_threads: int) -> None:
    """Bound torch's CPU threads, for all threads of this process that call it from now on."""
    torch.set_num_threads(num_threads)
