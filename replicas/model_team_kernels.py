"""Jobs that threads share, compiled by numba: products, and what lies between the products of a layer.

torch and oneDNN share work over OpenMP, where each of a step's hundred products ends in a barrier: if another
process takes a core, every barrier waits for a thread that does not run. Here whoever is free takes the next
task, the caller too, and it can do them all alone: only a task that was begun elsewhere is waited for.
"""

from typing import Any, Final

import numpy as np
from numba import carray, njit

from replicas.model_cells import (
    ARGUMENTS,
    ATTEND,
    BUSY,
    DONE,
    JOB,
    LEFT,
    MULTIPLY,
    RUN_ROWS,
    add_to_cell,
    at,
    call,
    give_way,
    pause,
    read_cell,
    write_cell,
)
from replicas.model_kernels import quantise
from replicas.model_products import (
    COLUMN_SCALES,
    NUM_INPUTS,
    NUM_PRODUCT_CELLS,
    NUM_ROWS,
    SCALES,
    ZEROS,
    X,
    num_tasks,
)
from replicas.model_tasks import ROWS_PER_TASK, SCRATCH

_LOOKS: Final = 2_000
"""Looks, some 50 us, after which a waiting thread lets others have its core."""


@njit(nogil=True, cache=True, error_model="numpy")
def _work(state: Any, scratch: Any) -> None:
    """Run tasks of the present job until none is left to take."""
    arguments = state[ARGUMENTS:].ctypes.data
    while True:
        left = add_to_cell(state, LEFT, -1)
        if left <= 0:
            return
        # The job cannot end, or change, before this task is counted.
        call(state[JOB], arguments, left - 1, scratch.ctypes.data)
        add_to_cell(state, DONE, 1)


@njit(nogil=True, cache=True, error_model="numpy")
def _share(state: Any, count: Any, scratch: Any) -> None:
    """Run the job in `state`, of `count` tasks; return when all are finished."""
    write_cell(state, DONE, 0)
    write_cell(state, LEFT, count)
    _work(state, scratch)
    looks = 0
    while read_cell(state, DONE) < count:
        pause()
        looks += 1
        if looks % _LOOKS == 0:  # whoever has the task may be waiting for this core
            give_way()


@njit(nogil=True, cache=True, error_model="numpy")
def new_scratch() -> Any:
    """Scratch of one thread."""
    return np.empty(SCRATCH, np.int32)


@njit(nogil=True, cache=True, error_model="numpy")
def run_product(state: Any, product: Any, scratch: Any) -> None:
    """Compute a product whose inputs are there."""
    state[JOB] = state[MULTIPLY]
    count = num_tasks(product)
    for i in range(NUM_PRODUCT_CELLS):
        state[ARGUMENTS + i] = product[i]
    _share(state, count, scratch)


@njit(nogil=True, cache=True, error_model="numpy")
def run_products(state: Any, products: Any) -> None:
    """Compute products one after the other: [n, NUM_PRODUCT_CELLS] int64."""
    scratch = new_scratch()
    for i in range(len(products)):
        run_product(state, products[i], scratch)


@njit(nogil=True, cache=True, error_model="numpy")
def run_attention(state: Any, frame: Any, layer: Any, is_cut: Any, count: Any, scratch: Any) -> None:
    """Attend for one layer; `count` items of work, or pieces of such."""
    state[JOB], state[ARGUMENTS], state[ARGUMENTS + 1] = state[ATTEND], frame, layer
    state[ARGUMENTS + 2] = is_cut
    _share(state, count, scratch)


@njit(nogil=True, cache=True, error_model="numpy")
def run_stage(state: Any, stage: Any, frame: Any, layer: Any, rows: Any, scratch: Any) -> None:
    """Run one stage of a layer for all rows."""
    state[JOB], state[ARGUMENTS], state[ARGUMENTS + 1] = state[RUN_ROWS], frame, layer
    state[ARGUMENTS + 2], state[ARGUMENTS + 3] = stage, rows
    count = (rows + ROWS_PER_TASK - 1) // ROWS_PER_TASK
    if count == 1:  # sooner done than shared
        call(state[JOB], state[ARGUMENTS:].ctypes.data, 0, scratch.ctypes.data)
    else:
        _share(state, count, scratch)


@njit(nogil=True, cache=True, error_model="numpy")
def linear(
    state: Any,  # [NUM_CELLS] int64; one caller at a time
    product: Any,  # cells as in model_products.py
    x: Any,  # address of [rows, inputs] float32
) -> None:
    """Compute a product of x; in int8, x being quantised row by row, if there are column scales.

    All memory is the caller's: compiled code frees its own after the last use that it can see.
    """
    rows, inputs = product[NUM_ROWS], product[NUM_INPUTS]
    if product[COLUMN_SCALES] != 0:
        quantised = carray(at(product[X]), (rows, inputs), np.uint8)
        scales = carray(at(product[SCALES]), (rows,), np.float32)
        zeros = carray(at(product[ZEROS]), (rows,), np.int32)
        quantise(quantised, scales, zeros, carray(at(x), (rows, inputs), np.float32), 0, rows)
    run_product(state, product, new_scratch())


@njit(nogil=True, cache=True, error_model="numpy")
def follow(state: Any, patience: Any) -> None:
    """Help with every job; return after looking for one `patience` times in vain, the team not being busy."""
    scratch = new_scratch()
    idle = looks = 0
    while idle < patience:
        if read_cell(state, LEFT) > 0:
            _work(state, scratch)
            idle = looks = 0
            continue
        pause()
        looks += 1
        if read_cell(state, BUSY) == 0:
            idle += 1
        if looks % _LOOKS == 0:  # the caller may be waiting for this core
            give_way()
