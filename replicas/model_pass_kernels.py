"""A whole pass through a model of Llama layers as one call, compiled by numba, without the GIL."""

from typing import Any, Final

import numpy as np
from numba import carray, njit

from replicas import model_layer_kernels as cells
from replicas import model_products as products
from replicas.model_cells import BUSY, at, write_cell
from replicas.model_products import NUM_PRODUCT_CELLS
from replicas.model_team_kernels import new_scratch, run_attention, run_product, run_stage

QKV: Final = 0
OUTPUT: Final = 1
GATE_UP: Final = 2
DOWN: Final = 3
"""Places of a layer's products; the head's is that of QKV."""
NUM_LAYER_CELLS: Final = cells.PRODUCTS + 4 * NUM_PRODUCT_CELLS


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply(
    state: Any, frame: Any, record: Any, place: Any, x: Any, out: Any, rows: Any, scratch: Any
) -> None:
    """Compute one product of a layer from x, or from the bytes that the stage before made of it."""
    first = cells.PRODUCTS + place * NUM_PRODUCT_CELLS
    product = record[first : first + NUM_PRODUCT_CELLS]
    product[products.OUT] = out
    product[products.X] = frame[cells.BYTES] if frame[cells.QUANTISED] != 0 else x
    product[products.SCALES], product[products.ZEROS] = frame[cells.SCALES], frame[cells.ZEROS]
    product[products.NUM_ROWS] = rows
    run_product(state, product, scratch)


@njit(nogil=True, cache=True, error_model="numpy")
def run_pass(state: Any, frame: Any) -> None:
    """Compute the logits of the rows kept. `state`: a team's; `frame`: [NUM_FRAME_CELLS] int64."""
    write_cell(state, BUSY, 1)
    _run(state, frame)
    write_cell(state, BUSY, 0)


@njit(nogil=True, cache=True, error_model="numpy")
def _run(state: Any, frame: Any) -> None:
    scratch = new_scratch()
    rows, kept, address = frame[cells.ROWS], frame[cells.KEPT], frame.ctypes.data
    for i in range(frame[cells.NUM_LAYERS]):
        layer = frame[cells.LAYERS] + 8 * i * NUM_LAYER_CELLS
        record = carray(at(layer), (NUM_LAYER_CELLS,), np.int64)
        run_stage(state, cells.STAGE_INPUT, address, layer, rows, scratch)
        _multiply(state, frame, record, QKV, frame[cells.NORMED], frame[cells.QKV], rows, scratch)
        run_stage(state, cells.STAGE_HEADS, address, layer, rows, scratch)
        pairs = frame[cells.ITEMS] * frame[cells.KV_HEADS]
        if frame[cells.PIECES] == 0:
            run_attention(state, address, layer, 0, pairs, scratch)
        else:
            run_attention(state, address, layer, 1, frame[cells.PIECES], scratch)
            run_stage(state, cells.STAGE_MERGE, address, layer, pairs, scratch)
        if frame[cells.QUANTISED] != 0:
            run_stage(state, cells.STAGE_ATTENDED, address, layer, rows, scratch)
        _multiply(state, frame, record, OUTPUT, frame[cells.ATTENDED], frame[cells.UPDATE], rows, scratch)
        run_stage(state, cells.STAGE_MIDDLE, address, layer, rows, scratch)
        _multiply(state, frame, record, GATE_UP, frame[cells.NORMED], frame[cells.GATE_UP], rows, scratch)
        run_stage(state, cells.STAGE_MLP, address, layer, rows, scratch)
        _multiply(state, frame, record, DOWN, frame[cells.MLP_PRODUCT], frame[cells.UPDATE], rows, scratch)
    if kept == 0:
        return
    last = frame[cells.LAYERS] + 8 * frame[cells.NUM_LAYERS] * NUM_LAYER_CELLS
    run_stage(state, cells.STAGE_FINAL, address, last, kept, scratch)
    record = carray(at(last), (NUM_LAYER_CELLS,), np.int64)
    _multiply(state, frame, record, QKV, frame[cells.NORMED], frame[cells.LOGITS], kept, scratch)
    if frame[cells.QUANTISED] != 0:
        run_stage(state, cells.STAGE_RESCORE, address, last, kept, scratch)
