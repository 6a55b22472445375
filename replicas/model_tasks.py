"""The functions that threads share, compiled each for itself and called by address."""

from typing import Any, Final

import numpy as np
from numba import carray, cfunc

from replicas.model_blocks import ROWS, TILE
from replicas.model_cells import ATTEND, MULTIPLY, RUN_ROWS, at
from replicas.model_layer_kernels import attend_item, attend_piece, run_rows
from replicas.model_products import NUM_PRODUCT_CELLS, multiply
from replicas.packing import LongArray

ROWS_PER_TASK: Final = 3
"""Of what is computed row by row."""
SCRATCH: Final = ROWS * TILE
"""A thread's int32 cells for a task."""
_SIGNATURE = "void(int64, int64, int64)"


def multiply_task(arguments: Any, task: Any, scratch: Any) -> None:
    """Arguments: the cells of model_products.py."""
    product = carray(at(arguments), (NUM_PRODUCT_CELLS,), np.int64)
    multiply(product, task, carray(at(scratch), (SCRATCH,), np.int32))


def attend_task(arguments: Any, task: Any, scratch: Any) -> None:  # noqa: ARG001
    """Arguments: addresses of a frame and a layer (model_layer_kernels.py), 1 if items are cut."""
    cells = carray(at(arguments), (3,), np.int64)
    if cells[2] != 0:
        attend_piece(cells[0], cells[1], task)
    else:
        attend_item(cells[0], cells[1], task)


def rows_task(arguments: Any, task: Any, scratch: Any) -> None:  # noqa: ARG001
    """Arguments: addresses of a frame and a layer, stage, number of rows."""
    cells = carray(at(arguments), (4,), np.int64)
    first = task * ROWS_PER_TASK
    run_rows(cells[2], cells[0], cells[1], first, min(first + ROWS_PER_TASK, cells[3]))


_COMPILED: Final[dict[int, Any]] = {}


def write_addresses(state: LongArray) -> None:
    """Compile the tasks, or load them from disk; put their addresses into a team's state."""
    for cell, task in ((MULTIPLY, multiply_task), (ATTEND, attend_task), (RUN_ROWS, rows_task)):
        if cell not in _COMPILED:
            _COMPILED[cell] = cfunc(_SIGNATURE, cache=True, error_model="numpy")(task)
        state[cell] = _COMPILED[cell].address
