"""CPU kernels for paged attention, fp32, compiled by numba.

Every sum has one order, fixed by the source: scores add up over head_dim, outputs over positions, one after
the other; normalisers over every sixteenth position, then over the sixteen. So neither the vector width, nor
the way rows are grouped into work items, nor the number of threads changes a bit.

Online softmax after Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018); the tiling is
FlashAttention's (Dao et al., 2022) with tiles of TILE positions that begin at multiples of TILE.

The pool of one layer is two flat arrays. K is transposed inside a tile, so that scores of sixteen positions
come from one load per head_dim element; width is head_dim rounded up to whole lanes, the rest stays zero:

    keys    [num_blocks, num_kv_heads, block_size / TILE, width, TILE]
    values  [num_blocks, num_kv_heads, block_size,        width]

With slot = (block * num_kv_heads + head) * block_size + offset, a tile of K begins at slot * width and
position `slot` of V too, where offset is a multiple of TILE.
"""

from typing import Any, Final

import numpy as np
from numba import njit

from replicas.attention import lanes

TILE: Final = lanes.WIDTH
"""Positions per tile."""

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_TWO = np.float32(2.0)
_MASKED = np.float32(-np.inf)
# exp(x) = 2**n * exp(r), r = x - n ln 2 in two parts; polynomial and constants of Cephes expf (2 ulp).
_LOG2E = np.float32(1.44269504088896341)
_MINUS_LN2_HIGH = np.float32(-0.693359375)
_MINUS_LN2_LOW = np.float32(2.12194440e-4)
_P0 = np.float32(1.9875691500e-4)
_P1 = np.float32(1.3981999507e-3)
_P2 = np.float32(8.3334519073e-3)
_P3 = np.float32(4.1665795894e-2)
_P4 = np.float32(1.6666665459e-1)
_P5 = np.float32(5.0000001201e-1)
_HALF = np.float32(0.5)
_EXP_MIN = np.float32(-87.0)
_EXP_MAX = np.float32(88.0)


@njit(inline="always")
def exp(x: Any) -> Any:
    """exp(x) per lane, clamped to finite, normal results; NaN stays NaN."""
    x = lanes.clamp_above(lanes.clamp_below(x, lanes.splat(_EXP_MIN)), lanes.splat(_EXP_MAX))
    n = lanes.floor(lanes.fma(x, lanes.splat(_LOG2E), lanes.splat(_HALF)))
    r = lanes.fma(n, lanes.splat(_MINUS_LN2_HIGH), x)
    r = lanes.fma(n, lanes.splat(_MINUS_LN2_LOW), r)
    p = lanes.fma(lanes.splat(_P0), r, lanes.splat(_P1))
    p = lanes.fma(p, r, lanes.splat(_P2))
    p = lanes.fma(p, r, lanes.splat(_P3))
    p = lanes.fma(p, r, lanes.splat(_P4))
    p = lanes.fma(p, r, lanes.splat(_P5))
    y = lanes.add(lanes.fma(lanes.mul(p, r), r, r), lanes.splat(_ONE))
    return lanes.mul(y, lanes.power_of_two(n))


@njit(inline="always")
def _score_tile(
    scores: Any,  # flat [rows, TILE], out
    queries: Any,  # flat [rows, width], scaled
    keys: Any,
    tile_start: Any,  # offset of the tile in `keys`
    num_rows: Any,
    width: Any,
) -> None:
    """scores[r, j] = queries[r] . key j. Four rows at a time hide the latency of their chains of fma."""
    row = 0
    while row + 4 <= num_rows:
        a = b = c = d = lanes.splat(_ZERO)
        base = row * width
        for i in range(width):
            key = lanes.load(keys, tile_start + i * TILE)
            a = lanes.fma(lanes.splat(queries[base + i]), key, a)
            b = lanes.fma(lanes.splat(queries[base + width + i]), key, b)
            c = lanes.fma(lanes.splat(queries[base + 2 * width + i]), key, c)
            d = lanes.fma(lanes.splat(queries[base + 3 * width + i]), key, d)
        lanes.store(scores, row * TILE, a)
        lanes.store(scores, (row + 1) * TILE, b)
        lanes.store(scores, (row + 2) * TILE, c)
        lanes.store(scores, (row + 3) * TILE, d)
        row += 4
    while row < num_rows:
        a = lanes.splat(_ZERO)
        for i in range(width):
            a = lanes.fma(lanes.splat(queries[row * width + i]), lanes.load(keys, tile_start + i * TILE), a)
        lanes.store(scores, row * TILE, a)
        row += 1


@njit(inline="always")
def _add_values(
    outputs: Any,  # flat [rows, width]
    row: Any,
    weights: Any,  # flat [rows, TILE]
    values: Any,
    tile_start: Any,  # offset of the tile's first position in `values`
    first: Any,
    last: Any,
    shrink: Any,
    width: Any,
) -> None:
    """outputs[row] = outputs[row] * shrink + sum over positions first .. last - 1 of weight * value."""
    scale = lanes.splat(shrink)
    column = 0
    while column + 4 * TILE <= width:
        base = row * width + column
        a = lanes.mul(lanes.load(outputs, base), scale)
        b = lanes.mul(lanes.load(outputs, base + TILE), scale)
        c = lanes.mul(lanes.load(outputs, base + 2 * TILE), scale)
        d = lanes.mul(lanes.load(outputs, base + 3 * TILE), scale)
        for j in range(first, last):
            weight = lanes.splat(weights[row * TILE + j])
            at = tile_start + j * width + column
            a = lanes.fma(weight, lanes.load(values, at), a)
            b = lanes.fma(weight, lanes.load(values, at + TILE), b)
            c = lanes.fma(weight, lanes.load(values, at + 2 * TILE), c)
            d = lanes.fma(weight, lanes.load(values, at + 3 * TILE), d)
        lanes.store(outputs, base, a)
        lanes.store(outputs, base + TILE, b)
        lanes.store(outputs, base + 2 * TILE, c)
        lanes.store(outputs, base + 3 * TILE, d)
        column += 4 * TILE
    while column < width:
        base = row * width + column
        a = lanes.mul(lanes.load(outputs, base), scale)
        for j in range(first, last):
            weight = lanes.splat(weights[row * TILE + j])
            a = lanes.fma(weight, lanes.load(values, tile_start + j * width + column), a)
        lanes.store(outputs, base, a)
        column += TILE


@njit(inline="always")
def _cap(scores: Any, softcap: Any) -> Any:
    """softcap * tanh(scores / softcap)."""
    e = exp(lanes.mul(scores, lanes.splat(_TWO / softcap)))
    ratio = lanes.div(lanes.splat(_TWO), lanes.add(e, lanes.splat(_ONE)))
    return lanes.mul(lanes.splat(softcap), lanes.sub(lanes.splat(_ONE), ratio))


@njit(inline="always")
def _fold_tile(
    outputs: Any,  # flat [rows, width]
    sums: Any,  # flat [rows, TILE]; normalisers, one per lane
    peaks: Any,  # [rows]
    scores: Any,  # flat [rows, TILE]; becomes the weights
    row: Any,
    values: Any,
    tile_start: Any,
    first: Any,
    last: Any,
    softcap: Any,
    width: Any,
) -> None:
    """Fold positions first .. last - 1 of one tile into a row's running softmax.

    The other positions may hold anything, NaN included: they are masked, never multiplied by zero.
    """
    score = lanes.load(scores, row * TILE)
    if softcap > _ZERO:
        score = _cap(score, softcap)
    score = lanes.keep(score, first, last, _MASKED)
    peak = max(peaks[row], lanes.largest(score))
    weight = lanes.keep(exp(lanes.sub(score, lanes.splat(peak))), first, last, _ZERO)
    shrink = np.exp(peaks[row] - peak)
    peaks[row] = peak
    lanes.store(sums, row * TILE, lanes.fma(lanes.load(sums, row * TILE), lanes.splat(shrink), weight))
    lanes.store(scores, row * TILE, weight)
    _add_values(outputs, row, scores, values, tile_start, first, last, shrink, width)


@njit(nogil=True, cache=True, error_model="numpy")
def _attend_rows(
    out: Any,  # [rows, num_heads, head_dim]
    query: Any,  # [rows, num_heads, head_dim]
    keys: Any,
    values: Any,
    block_table: Any,  # [max_blocks]
    block_size: Any,
    num_kv_heads: Any,
    head: Any,  # the KV head
    first_row: Any,  # rows first_row .. first_row + num_rows - 1 belong to one sequence
    num_rows: Any,
    first_position: Any,  # of first_row in its sequence
    scaling: Any,
    window: Any,  # 0 = none
    softcap: Any,  # 0 = none
) -> None:
    """Attend for the query heads of one KV head over a few adjacent rows of one sequence."""
    head_dim = query.shape[2]
    width = (head_dim + TILE - 1) // TILE * TILE
    group = query.shape[1] // num_kv_heads
    num_lanes = num_rows * group  # a lane is one (row, query head)
    queries = np.zeros(num_lanes * width, np.float32)
    outputs = np.zeros(num_lanes * width, np.float32)
    scores = np.empty(num_lanes * TILE, np.float32)
    sums = np.zeros(num_lanes * TILE, np.float32)
    peaks = np.full(num_lanes, _MASKED, np.float32)
    for lane in range(num_lanes):
        for i in range(head_dim):
            queries[lane * width + i] = (
                query[first_row + lane // group, head * group + lane % group, i] * scaling
            )
    first_tile = max(0, first_position + 1 - window) // TILE if window > 0 else 0
    tiles_per_block = block_size // TILE
    for tile in range(first_tile, (first_position + num_rows - 1) // TILE + 1):
        block = np.int64(block_table[tile // tiles_per_block])
        slot = (block * num_kv_heads + head) * block_size + tile % tiles_per_block * TILE
        _score_tile(scores, queries, keys, slot * width, num_lanes, width)
        for lane in range(num_lanes):
            position = first_position + lane // group
            last = min(TILE, position + 1 - tile * TILE)
            first = max(0, position + 1 - window - tile * TILE) if window > 0 else 0
            if first < last:
                _fold_tile(
                    outputs, sums, peaks, scores, lane, values, slot * width, first, last, softcap, width
                )
    for lane in range(num_lanes):
        total = lanes.total(lanes.load(sums, lane * TILE))
        for i in range(head_dim):
            out[first_row + lane // group, head * group + lane % group, i] = outputs[lane * width + i] / total


@njit(nogil=True, cache=True, error_model="numpy")
def attend(
    out: Any,
    query: Any,
    keys: Any,
    values: Any,
    block_tables: Any,  # [num_seqs, max_blocks]
    block_size: Any,
    num_kv_heads: Any,
    work: Any,  # [items, 4]: sequence, first row, rows, position of the first row
    order: Any,  # [items * num_kv_heads]: item * num_kv_heads + head, balanced over threads
    scaling: Any,
    window: Any,
    softcap: Any,
    first: Any,
    last: Any,
) -> None:
    """Run order[first:last]; arguments as in `_attend_rows`."""
    for i in range(first, last):
        item, head = order[i] // num_kv_heads, order[i] % num_kv_heads
        _attend_rows(
            out,
            query,
            keys,
            values,
            block_tables[work[item, 0]],
            block_size,
            num_kv_heads,
            head,
            work[item, 1],
            work[item, 2],
            work[item, 3],
            scaling,
            window,
            softcap,
        )


@njit(nogil=True, cache=True)
def store(
    keys: Any,
    values: Any,
    key: Any,  # [rows, num_kv_heads, head_dim]
    value: Any,
    slot_mapping: Any,  # [rows]: block * block_size + offset
    block_size: Any,
) -> None:
    """Scatter each row's K (a column of a tile) and V to their slots."""
    num_kv_heads, head_dim = key.shape[1], key.shape[2]
    width = (head_dim + TILE - 1) // TILE * TILE
    for i in range(slot_mapping.shape[0]):
        block, offset = np.int64(slot_mapping[i] // block_size), slot_mapping[i] % block_size
        for head in range(num_kv_heads):
            slot = (block * num_kv_heads + head) * block_size + offset
            tile_start, column = slot // TILE * TILE * width, slot % TILE
            for d in range(head_dim):
                keys[tile_start + d * TILE + column] = key[i, head, d]
                values[slot * width + d] = value[i, head, d]
