"""Matrix products by tiles of packed weights, compiled by numba: the tasks of a product, int8 and fp32.

A product is cut into tasks of one tile for some of the rows; see model_blocks.py for the layout. int8 sums
are whole numbers and fp32 sums have one order, so neither the cut nor the thread changes a bit.
"""

from typing import Any, Final

import numpy as np
from numba import carray, njit
from numpy.typing import NDArray

from replicas import model_blocks as blocks
from replicas.large_memory import large_zeros
from replicas.model_blocks import GROUP, ROWS, TILE
from replicas.model_cells import at

# Cells of a product, all int64.
OUT: Final = 0
"""Address of [rows, outputs] float32."""
X: Final = 1
"""Of [rows, inputs]: uint8, or float32."""
SCALES: Final = 2
"""Of [rows] float32; int8 only, as the next."""
ZEROS: Final = 3
"""Of [rows] int32."""
WEIGHT: Final = 4
"""Of a packed weight."""
COLUMN_SCALES: Final = 5
"""Of [outputs] float32; 0 = the product is in fp32."""
COLUMN_SUMS: Final = 6
"""Of [outputs] int32: sums over the weights; int8 only."""
BIAS: Final = 7
"""Of [outputs] float32."""
NUM_ROWS: Final = 8
NUM_INPUTS: Final = 9
NUM_OUTPUTS: Final = 10
CHUNKS: Final = 11
"""Tasks per tile, each with a share of the rows."""
NUM_PRODUCT_CELLS: Final = 12

_SHARED_ROWS: Final = 2 * ROWS
"""Rows from which two threads may share a tile."""
_FEW_TILES: Final = 16
"""Below so many tiles threads would finish at different times."""


def pack_int8(weight: NDArray[np.int8]) -> NDArray[np.int8]:  # [outputs, inputs]; inputs a multiple of GROUP
    """Lay out a weight in tiles; missing outputs are zero."""
    outputs, inputs = weight.shape
    padded = np.zeros((-(-outputs // TILE) * TILE, inputs), dtype=np.int8)
    padded[:outputs] = weight
    tiles = padded.reshape(-1, TILE, inputs // GROUP, GROUP)
    packed = large_zeros((len(tiles), inputs // GROUP, TILE, GROUP), np.int8)
    packed[:] = tiles.transpose(0, 2, 1, 3)
    return packed


def pack_fp32(weight: NDArray[np.float32]) -> NDArray[np.float32]:  # [outputs, inputs]
    """Lay out a weight in tiles; missing outputs are zero."""
    outputs, inputs = weight.shape
    packed = large_zeros((-(-outputs // TILE), inputs, TILE), np.float32)
    for tile, rows in enumerate(np.split(weight, range(TILE, outputs, TILE))):
        packed[tile, :, : len(rows)] = rows.T
    return packed


@njit(nogil=True, cache=True, error_model="numpy")
def num_tasks(product: Any) -> Any:
    """Cut a product into tasks; returns their number."""
    tiles = (product[NUM_OUTPUTS] + TILE - 1) // TILE
    product[CHUNKS] = 2 if tiles < _FEW_TILES and product[NUM_ROWS] >= _SHARED_ROWS else 1
    return tiles * product[CHUNKS]


@njit(nogil=True, cache=True, error_model="numpy")
def multiply(product: Any, task: Any, sums: Any) -> None:
    """Compute one task of a product. `sums`: scratch, [ROWS * TILE] int32."""
    tile, chunk = task // product[CHUNKS], task % product[CHUNKS]
    first = product[NUM_ROWS] * chunk // product[CHUNKS]
    last = product[NUM_ROWS] * (chunk + 1) // product[CHUNKS]
    if product[COLUMN_SCALES] != 0:
        _multiply_int8(product, tile, first, last, sums)
    else:
        _multiply_fp32(product, tile, first, last, sums.view(np.float32))


@njit(nogil=True, cache=True, error_model="numpy")
def _end_of_block(begin: Any, last_row: Any) -> Any:
    """Cut off the next block of rows so that it and those that follow are about equally large."""
    count = last_row - begin
    num_blocks = (count + ROWS - 1) // ROWS
    return begin + count // num_blocks


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_int8(product: Any, tile: Any, first_row: Any, last_row: Any, sums: Any) -> None:
    rows, inputs, outputs = product[NUM_ROWS], product[NUM_INPUTS], product[NUM_OUTPUTS]
    first = tile * TILE
    width = min(TILE, outputs - first)
    out = carray(at(product[OUT]), (rows * outputs,), np.float32)
    scales = carray(at(product[SCALES]), (rows,), np.float32)
    zeros = carray(at(product[ZEROS]), (rows,), np.int32)
    column_scales = carray(at(product[COLUMN_SCALES]), (outputs,), np.float32)[first : first + width]
    column_sums = carray(at(product[COLUMN_SUMS]), (outputs,), np.int32)[first : first + width]
    bias = carray(at(product[BIAS]), (outputs,), np.float32)[first : first + width]
    weight = product[WEIGHT] + first * inputs
    address, steps = sums.ctypes.data, inputs // GROUP
    begin = first_row
    while begin < last_row:
        end = _end_of_block(begin, last_row)
        x, size = product[X] + begin * inputs, end - begin
        if size == 1:
            blocks.int8_1(address, x, weight, inputs, steps)
        elif size == 2:
            blocks.int8_2(address, x, weight, inputs, steps)
        elif size == 3:
            blocks.int8_3(address, x, weight, inputs, steps)
        elif size == 4:
            blocks.int8_4(address, x, weight, inputs, steps)
        elif size == 5:
            blocks.int8_5(address, x, weight, inputs, steps)
        else:
            blocks.int8_6(address, x, weight, inputs, steps)
        for row in range(begin, end):
            scale, zero = scales[row], zeros[row]
            row_sums = sums[(row - begin) * TILE : (row - begin) * TILE + width]
            result = out[row * outputs + first : row * outputs + first + width]
            for i in range(width):
                whole = np.int32(row_sums[i] - zero * column_sums[i])
                result[i] = np.float32(whole) * scale * column_scales[i] + bias[i]
        begin = end


@njit(nogil=True, cache=True, error_model="numpy")
def _multiply_fp32(product: Any, tile: Any, first_row: Any, last_row: Any, sums: Any) -> None:
    rows, inputs, outputs = product[NUM_ROWS], product[NUM_INPUTS], product[NUM_OUTPUTS]
    first = tile * TILE
    width = min(TILE, outputs - first)
    out = carray(at(product[OUT]), (rows * outputs,), np.float32)
    bias = carray(at(product[BIAS]), (outputs,), np.float32)[first : first + width]
    weight = product[WEIGHT] + 4 * first * inputs
    address, stride = sums.ctypes.data, 4 * inputs
    begin = first_row
    while begin < last_row:
        end = _end_of_block(begin, last_row)
        x, size = product[X] + begin * stride, end - begin
        if size == 1:
            blocks.fp32_1(address, x, weight, stride, inputs)
        elif size == 2:
            blocks.fp32_2(address, x, weight, stride, inputs)
        elif size == 3:
            blocks.fp32_3(address, x, weight, stride, inputs)
        elif size == 4:
            blocks.fp32_4(address, x, weight, stride, inputs)
        elif size == 5:
            blocks.fp32_5(address, x, weight, stride, inputs)
        else:
            blocks.fp32_6(address, x, weight, stride, inputs)
        for row in range(begin, end):
            row_sums = sums[(row - begin) * TILE : (row - begin) * TILE + width]
            result = out[row * outputs + first : row * outputs + first + width]
            for i in range(width):
                result[i] = row_sums[i] + bias[i]
        begin = end
