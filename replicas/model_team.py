"""Threads that help with products and layers (model_team_kernels.py), and the weights that they multiply.

Products follow each other within microseconds, so a helper looks for the next one for a while before it goes
to sleep. Nothing waits for it to wake: what it does not take in time, the caller does.
"""

import threading
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from replicas import model_team_kernels as kernels
from replicas.model_blocks import available
from replicas.model_cells import NUM_CELLS
from replicas.model_tasks import write_addresses

_PATIENCE: Final = 40_000
"""Looks before a helper sleeps, about a millisecond: it bridges what lies between two steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A linear layer's weight as model_products.py reads it."""

    packed: Tensor
    """Tiles of int8 or float32."""
    bias: Tensor  # [outputs] float32
    scales: Tensor | None = None  # [outputs] float32; int8 only, as the next
    sums: Tensor | None = None  # [outputs] int32
    num_inputs: int

    @property
    def cells(self) -> tuple[int, ...]:
        """What stands in the cells of a product from WEIGHT to BIAS."""
        columns = (self.scales, self.sums)
        addresses = [0 if column is None else column.data_ptr() for column in columns]
        return (self.packed.data_ptr(), *addresses, self.bias.data_ptr())

    @property
    def nbytes(self) -> int:
        """What a product reads of it."""
        columns = (self.scales, self.sums, self.bias)
        return self.packed.nbytes + sum(column.nbytes for column in columns if column is not None)


class Team:
    """`num_threads` includes the caller, of which there is one at a time."""

    def __init__(self, num_threads: int) -> None:
        self.state = np.zeros(NUM_CELLS, dtype=np.int64)
        write_addresses(self.state)
        self._bell = threading.Condition()
        self._num_asleep = 0
        self._num_calls = 0
        for i in range(num_threads - 1):
            threading.Thread(target=self._help, name=f"product-{i}", daemon=True).start()

    def wake(self) -> None:
        """Call before a job: helpers that sleep may then still be in time for it."""
        self._num_calls += 1
        if self._num_asleep:
            with self._bell:
                self._bell.notify_all()

    def multiply(
        self,
        x: Tensor,  # [rows, inputs] float32, contiguous
        weight: PackedWeight,
    ) -> Tensor:  # [rows, outputs]
        num_rows, num_inputs = x.shape
        num_outputs = weight.bias.shape[0]
        out = torch.empty(num_rows, num_outputs)
        inputs, scales, zeros = x, 0, 0
        if weight.scales is not None:
            inputs = torch.empty(x.shape, dtype=torch.uint8)
            scales_and_zeros = torch.empty(2, num_rows)
            scales, zeros = (part.data_ptr() for part in scales_and_zeros)
        addresses = (out.data_ptr(), inputs.data_ptr(), scales, zeros, *weight.cells)
        product = np.array([*addresses, num_rows, num_inputs, num_outputs, 0])
        self.wake()
        kernels.linear(self.state, product, x.data_ptr())
        return out

    def _help(self) -> None:
        while True:
            num_calls = self._num_calls
            kernels.follow(self.state, _PATIENCE)
            with self._bell:
                self._num_asleep += 1
                # A call that came while this thread waited for the GIL found nobody asleep and did not ring.
                if self._num_calls == num_calls:
                    self._bell.wait()
                self._num_asleep -= 1


def open_team(num_threads: int) -> Team | None:
    """Return a team; None where the CPU lacks what its kernels need."""
    return Team(num_threads) if available() else None
