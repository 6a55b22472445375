"""CPU kernels for paged attention, fp32, compiled by numba.

Every sum has one order, fixed by the source: scores add up over head_dim, outputs over positions, one after
the other; normalisers over every sixteenth position, then over the sixteen. So neither the vector width, nor
the way rows are grouped into work items, nor the number of threads changes a bit.

Online softmax after Milakov & Gimelshein, "Online normalizer calculation for softmax" (2018); the tiling is
FlashAttention's (Dao et al., 2022) with spans of SPAN positions that begin at multiples of SPAN.

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

from replicas.attention import blocks, lanes

TILE: Final = blocks.TILE
"""Positions per tile of K."""
SPAN: Final = blocks.SPAN
"""Positions that are folded into the softmax at a time; spans begin at multiples of it."""
PART: Final = 16 * SPAN
"""Positions whose softmax is computed apart and merged, so that threads can share a long sequence."""

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


@njit(nogil=True, cache=True, error_model="numpy")
def _score_span(
    scores: Any,  # address of [rows, SPAN], out
    queries: Any,  # of [rows, width], scaled
    tiles: Any,  # [TILES] addresses of tiles of K
    num_rows: Any,
    width: Any,
) -> None:
    """scores[r, j] = queries[r] . key j."""
    num_blocks = (num_rows + blocks.ROWS - 1) // blocks.ROWS
    for block in range(num_blocks):
        first = num_rows * block // num_blocks
        count = num_rows * (block + 1) // num_blocks - first
        s, q = scores + 4 * first * SPAN, queries + 4 * first * width
        if count == 1:
            blocks.scores_1(s, q, tiles[0], tiles[1], tiles[2], tiles[3], width)
        elif count == 2:
            blocks.scores_2(s, q, tiles[0], tiles[1], tiles[2], tiles[3], width)
        elif count == 3:
            blocks.scores_3(s, q, tiles[0], tiles[1], tiles[2], tiles[3], width)
        elif count == 4:
            blocks.scores_4(s, q, tiles[0], tiles[1], tiles[2], tiles[3], width)
        elif count == 5:
            blocks.scores_5(s, q, tiles[0], tiles[1], tiles[2], tiles[3], width)
        else:
            blocks.scores_6(s, q, tiles[0], tiles[1], tiles[2], tiles[3], width)


@njit(nogil=True, cache=True, error_model="numpy")
def _add_values(
    outputs: Any,  # address of [rows, width]
    weights: Any,  # of [rows, SPAN], the first of these positions
    values: Any,  # of [count, width]
    num_rows: Any,
    width: Any,
    count: Any,
) -> None:
    """outputs[r] += sum over positions of weight * value."""
    num_blocks = (num_rows + blocks.ROWS - 1) // blocks.ROWS
    for block in range(num_blocks):
        first = num_rows * block // num_blocks
        size = num_rows * (block + 1) // num_blocks - first
        w, column = weights + 4 * first * SPAN, 0
        while column + blocks.TILES * TILE <= width:
            o, v = outputs + 4 * (first * width + column), values + 4 * column
            if size == 1:
                blocks.values_1(o, w, v, width, count)
            elif size == 2:
                blocks.values_2(o, w, v, width, count)
            elif size == 3:
                blocks.values_3(o, w, v, width, count)
            elif size == 4:
                blocks.values_4(o, w, v, width, count)
            elif size == 5:
                blocks.values_5(o, w, v, width, count)
            else:
                blocks.values_6(o, w, v, width, count)
            column += blocks.TILES * TILE
        while column < width:
            o, v = outputs + 4 * (first * width + column), values + 4 * column
            for row in range(size):
                blocks.column_1(o + 4 * row * width, w + 4 * row * SPAN, v, width, count)
            column += TILE


@njit(inline="always")
def _cap(scores: Any, softcap: Any) -> Any:
    """softcap * tanh(scores / softcap)."""
    e = exp(lanes.mul(scores, lanes.splat(_TWO / softcap)))
    ratio = lanes.div(lanes.splat(_TWO), lanes.add(e, lanes.splat(_ONE)))
    return lanes.mul(lanes.splat(softcap), lanes.sub(lanes.splat(_ONE), ratio))


@njit(inline="always")
def _fold_span(
    outputs: Any,  # flat [rows, width]; shrunk to the new peak
    sums: Any,  # flat [rows, TILE]; normalisers, one per lane
    peaks: Any,  # [rows]
    scores: Any,  # flat [rows, SPAN]; becomes the weights
    row: Any,
    first: Any,
    last: Any,
    softcap: Any,
    width: Any,
) -> None:
    """Fold the scores of positions first .. last - 1 of a span into a row's running softmax.

    The other positions may hold anything, NaN included: their weight is zero.
    """
    base = row * SPAN
    if first >= last:
        for i in range(0, SPAN, TILE):
            lanes.store(scores, base + i, lanes.splat(_ZERO))
        return
    most = lanes.splat(_MASKED)
    for i in range(0, SPAN, TILE):
        score = lanes.load(scores, base + i)
        if softcap > _ZERO:
            score = _cap(score, softcap)
        score = lanes.keep(score, first - i, last - i, _MASKED)
        lanes.store(scores, base + i, score)
        most = lanes.clamp_below(score, most)
    peak = max(peaks[row], lanes.largest(most))
    total = lanes.splat(_ZERO)
    for i in range(0, SPAN, TILE):
        weight = exp(lanes.sub(lanes.load(scores, base + i), lanes.splat(peak)))
        weight = lanes.keep(weight, first - i, last - i, _ZERO)
        lanes.store(scores, base + i, weight)
        total = lanes.add(total, weight)
    if peak != peaks[row]:
        shrink = exp(lanes.splat(np.float32(peaks[row] - peak)))
        for i in range(0, width, TILE):
            at = row * width + i
            lanes.store(outputs, at, lanes.mul(lanes.load(outputs, at), shrink))
        lanes.store(sums, row * TILE, lanes.mul(lanes.load(sums, row * TILE), shrink))
    peaks[row] = peak
    lanes.store(sums, row * TILE, lanes.add(lanes.load(sums, row * TILE), total))


@njit(nogil=True, cache=True, error_model="numpy")
def state_size(num_lanes: Any, width: Any) -> Any:
    """Floats of a running softmax: per lane outputs [width], sums [TILE], then the peaks."""
    return num_lanes * (width + TILE + 1)


@njit(nogil=True, cache=True, error_model="numpy")
def begin(state: Any, num_lanes: Any, width: Any) -> None:
    """Nothing has been seen."""
    peaks = num_lanes * (width + TILE)
    state[:peaks] = _ZERO
    state[peaks : peaks + num_lanes] = _MASKED


@njit(nogil=True, cache=True, error_model="numpy")
def _find_tiles(
    slots: Any,  # [TILES], out: where each tile of the span begins
    start: Any,  # first position of the span
    first: Any,  # positions first .. last are read
    last: Any,
    block_table: Any,  # [max_blocks]
    block_size: Any,
    num_kv_heads: Any,
    head: Any,
) -> None:
    """Tiles that hold no position to read are replaced by one that does, and their scores not used."""
    tiles_per_block = block_size // TILE
    for i in range(blocks.TILES):
        tile = min(max(start // TILE + i, first // TILE), last // TILE)
        block = np.int64(block_table[tile // tiles_per_block])
        slots[i] = (block * num_kv_heads + head) * block_size + tile % tiles_per_block * TILE


@njit(nogil=True, cache=True, error_model="numpy")
def attend_part(
    state: Any,  # [state_size], out
    group: Any,  # query heads per KV head
    query: Any,  # [rows, at least group * num_kv_heads, head_dim]
    keys: Any,
    values: Any,
    block_table: Any,
    block_size: Any,
    num_kv_heads: Any,
    head: Any,  # the KV head
    first_row: Any,  # rows first_row .. first_row + num_rows - 1 belong to one sequence
    num_rows: Any,
    first_position: Any,  # of first_row in its sequence
    part: Any,  # positions part * PART .. (part + 1) * PART - 1
    scaling: Any,
    window: Any,  # 0 = none
    softcap: Any,  # 0 = none
) -> None:
    """Attend for the query heads of one KV head to one part, over a few adjacent rows of one sequence."""
    head_dim = query.shape[2]
    width = (head_dim + TILE - 1) // TILE * TILE
    num_lanes = num_rows * group  # a lane is one (row, query head)
    begin(state, num_lanes, width)
    outputs, sums = state[: num_lanes * width], state[num_lanes * width : num_lanes * (width + TILE)]
    peaks = state[num_lanes * (width + TILE) :]
    queries = np.zeros(num_lanes * width, np.float32)
    scores = np.empty(num_lanes * SPAN, np.float32)
    tiles, slots = np.empty(blocks.TILES, np.int64), np.empty(blocks.TILES, np.int64)
    for lane in range(num_lanes):
        for i in range(head_dim):
            at = query[first_row + lane // group, head * group + lane % group, i]
            queries[lane * width + i] = at * scaling
    behind = first_position + num_rows
    seen = max(0, first_position + 1 - window) if window > 0 else 0
    first_start, end = max(seen // SPAN * SPAN, part * PART), min(behind, (part + 1) * PART)
    for start in range(first_start, end, SPAN):
        _find_tiles(slots, start, seen, behind - 1, block_table, block_size, num_kv_heads, head)
        tiles[:] = keys.ctypes.data + 4 * slots * width
        _score_span(scores.ctypes.data, queries.ctypes.data, tiles, num_lanes, width)
        for lane in range(num_lanes):
            position = first_position + lane // group
            last = min(SPAN, position + 1 - start)
            first = max(0, position + 1 - window - start) if window > 0 else 0
            _fold_span(outputs, sums, peaks, scores, lane, first, last, softcap, width)
        for i in range(blocks.TILES):
            first = max(0, seen - start - i * TILE)
            count = min(TILE, behind - start - i * TILE) - first
            if first < TILE and count > 0:
                weights = scores.ctypes.data + 4 * (i * TILE + first)
                value = values.ctypes.data + 4 * (slots[i] + first) * width
                _add_values(outputs.ctypes.data, weights, value, num_lanes, width, count)


@njit(nogil=True, cache=True, error_model="numpy")
def merge(total: Any, state: Any, num_lanes: Any, width: Any) -> None:
    """Add what was seen in one more part to `total`. A part of which a lane saw nothing changes no bit."""
    sums, peaks = num_lanes * width, num_lanes * (width + TILE)
    for lane in range(num_lanes):
        old, new = total[peaks + lane], state[peaks + lane]
        if new == _MASKED:
            continue
        peak = new if old == _MASKED else max(old, new)
        keep = exp(lanes.splat(np.float32(old - peak)))
        gain = exp(lanes.splat(np.float32(new - peak)))
        total[peaks + lane] = peak
        for i in range(lane * width, (lane + 1) * width, TILE):
            kept = lanes.mul(lanes.load(total, i), keep)
            lanes.store(total, i, lanes.fma(lanes.load(state, i), gain, kept))
        i = sums + lane * TILE
        kept = lanes.mul(lanes.load(total, i), keep)
        lanes.store(total, i, lanes.fma(lanes.load(state, i), gain, kept))


@njit(nogil=True, cache=True, error_model="numpy")
def finish(
    out: Any,  # [rows, num_heads, head_dim]
    total: Any,
    group: Any,
    head: Any,
    first_row: Any,
    num_rows: Any,
) -> None:
    """Divide what was summed by the weights."""
    head_dim = out.shape[2]
    width = (head_dim + TILE - 1) // TILE * TILE
    for lane in range(num_rows * group):
        weight = lanes.total(lanes.load(total, num_rows * group * width + lane * TILE))
        for i in range(head_dim):
            out[first_row + lane // group, head * group + lane % group, i] = total[lane * width + i] / weight


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
    """Run order[first:last], each over all of its parts; arguments as in `attend_part`."""
    group, head_dim = out.shape[1] // num_kv_heads, out.shape[2]
    width = (head_dim + TILE - 1) // TILE * TILE
    for i in range(first, last):
        item, head = order[i] // num_kv_heads, order[i] % num_kv_heads
        sequence, row, rows, position = work[item, 0], work[item, 1], work[item, 2], work[item, 3]
        num_lanes = rows * group
        total = np.empty(state_size(num_lanes, width), np.float32)
        state = np.empty(state_size(num_lanes, width), np.float32)
        begin(total, num_lanes, width)
        for part in range((position + rows - 1) // PART + 1):
            attend_part(
                state,
                group,
                query,
                keys,
                values,
                block_tables[sequence],
                block_size,
                num_kv_heads,
                head,
                row,
                rows,
                position,
                part,
                scaling,
                window,
                softcap,
            )
            merge(total, state, num_lanes, width)
        finish(out, total, group, head, row, rows)


@njit(nogil=True, cache=True, error_model="numpy")
def store(
    keys: Any,
    values: Any,
    key: Any,  # [rows, heads, head_dim]
    first_key: Any,  # of its heads, the first that is K
    value: Any,  # as key
    first_value: Any,
    num_kv_heads: Any,
    slot_mapping: Any,  # [rows]: block * block_size + offset
    block_size: Any,
    first: Any,
    last: Any,
) -> None:
    """Scatter K (a column of a tile) and V of rows first .. last - 1 to their slots."""
    head_dim = key.shape[2]
    width = (head_dim + TILE - 1) // TILE * TILE
    for i in range(first, last):
        block, offset = np.int64(slot_mapping[i] // block_size), slot_mapping[i] % block_size
        for head in range(num_kv_heads):
            slot = (block * num_kv_heads + head) * block_size + offset
            tile_start, column = slot // TILE * TILE * width, slot % TILE
            for d in range(head_dim):
                keys[tile_start + d * TILE + column] = key[i, first_key + head, d]
                values[slot * width + d] = value[i, first_value + head, d]
