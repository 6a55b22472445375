"""Small arrays to the device in one copy, from pinned memory, without waiting for the device."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ALIGNMENT: Final = 16
_NUM_BUFFERS: Final = 16
"""More uploads than two steps make. A copy waits in the stream for the work before it, that of the sampler
for the whole forward pass: a buffer used again in the next step would make the host wait for it too."""
_TYPES: Final = {"int32": torch.int32, "int64": torch.int64, "float64": torch.float64}


class Staging:
    """Uploads on the current stream. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._buffers = [self._host_buffer(0) for _ in range(_NUM_BUFFERS)]
        self._copied = [_event() for _ in range(_NUM_BUFFERS)] if self._is_cuda else []
        self._turn = 0

    def upload(
        self,
        arrays: Sequence[NDArray[Any]],  # int32, int64 or float64
        into: Tensor | None = None,  # uint8 on the device, large enough; None = fresh memory
    ) -> list[Tensor]:
        """Return the arrays on the device, all of them views of one tensor.

        With equal shapes and the same `into` the views lie at the same addresses.
        """
        offsets = _offsets(arrays)
        host = self._next_host_buffer(offsets[-1])
        for array, offset in zip(arrays, offsets, strict=False):
            host[offset : offset + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if into is None:
            into = torch.empty(offsets[-1], dtype=torch.uint8, device=self._device)
        assert into.numel() >= offsets[-1], f"{offsets[-1]} bytes do not fit into {into.numel()}"
        into[: offsets[-1]].copy_(self._buffers[self._turn][: offsets[-1]], non_blocking=True)
        if self._is_cuda:
            self._copied[self._turn].record()
        return [
            into[offset : offset + array.nbytes].view(_TYPES[array.dtype.name]).view(array.shape)
            for array, offset in zip(arrays, offsets, strict=False)
        ]

    def _next_host_buffer(self, num_bytes: int) -> NDArray[np.uint8]:
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        if self._is_cuda:
            self._copied[self._turn].synchronize()
        if self._buffers[self._turn].numel() < num_bytes:
            self._buffers[self._turn] = self._host_buffer(2 * num_bytes)
        buffer: NDArray[np.uint8] = self._buffers[self._turn].numpy()
        return buffer

    def _host_buffer(self, num_bytes: int) -> Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._is_cuda)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event()  # type: ignore[no-untyped-call]


def num_bytes(arrays: Sequence[NDArray[Any]]) -> int:
    """Return what `upload` needs for arrays of these shapes."""
    return _offsets(arrays)[-1]


def _offsets(arrays: Sequence[NDArray[Any]]) -> list[int]:
    """First byte of each array, then the end of all."""
    offsets = [0]
    for array in arrays:
        offsets.append(offsets[-1] + -(-array.nbytes // _ALIGNMENT) * _ALIGNMENT)
    return offsets
