"""What lies between the matrix products of a layer, as tasks that threads share, compiled by numba.

A frame describes one pass, a layer record one layer: both are int64 cells, mostly addresses, because that is
what compiled code can hand from thread to thread. The stages of a layer, each row by row, and the products
and the attention between them:

    INPUT  (QKV)  HEADS  (attention)  ATTENDED  (output)  MIDDLE  (gate and up)  MLP  (down)

After the last layer FINAL, (head) and RESCORE are run for the rows whose logits are wanted.
"""

from typing import Any, Final

import numpy as np
from numba import carray, njit

from replicas.attention.numba_kernels import (
    TILE,
    attend,
    attend_part,
    begin,
    finish,
    merge,
    state_size,
    store,
)
from replicas.model_cells import at
from replicas.model_kernels import add_rms_norm, norm_heads, quantise, rescore, rms_norm, rotate, silu_mul

# Cells of a frame. Sizes.
ROWS: Final = 0
KEPT: Final = 1
"""Rows whose logits are wanted."""
HIDDEN: Final = 2
HEADS: Final = 3
KV_HEADS: Final = 4
HEAD_DIM: Final = 5
MLP_WIDTH: Final = 6
VOCAB_SIZE: Final = 7
NUM_LAYERS: Final = 8
BLOCK_SIZE: Final = 9
MAX_BLOCKS: Final = 10
"""Columns of the block tables."""
ITEMS: Final = 11
"""Items of attention; each is done for every KV head."""
SEQUENCES: Final = 12
QUANTISED: Final = 13
"""1 = products are in int8."""
# Addresses of what a pass is given and gives: float32 unless a comment says otherwise.
X: Final = 14
"""[rows, hidden]; changed."""
COS: Final = 15
"""[rows, head_dim]"""
SIN: Final = 16
KEEP: Final = 17
"""[kept] int64"""
SLOTS: Final = 18
"""[rows] int32"""
TABLES: Final = 19
"""[sequences, max_blocks] int32"""
WORK: Final = 20
"""[items, 4] int32"""
ORDER: Final = 21
"""[items * kv_heads] int32"""
LOGITS: Final = 22
"""[kept, vocab_size]"""
FULL_HEAD: Final = 23
"""[vocab_size, hidden]: the head's weight in full precision; read in int8 only."""
LAYERS: Final = 24
"""[num_layers + 1, NUM_LAYER_CELLS] int64; the last record is that of norm and head."""
# Addresses of scratch, for max(rows, kept) rows.
NORMED: Final = 25
QKV: Final = 26
ATTENDED: Final = 27
UPDATE: Final = 28
GATE_UP: Final = 29
MLP_PRODUCT: Final = 30
SCALES: Final = 31
ZEROS: Final = 32
BYTES: Final = 33
"""As wide as the widest input of a product."""
PIECES: Final = 34
"""Pieces of attention; 0 = its items are not cut."""
PAIRS_AND_PARTS: Final = 35
"""Address of [pieces, 2] int32: place in ORDER, part."""
PIECE_STARTS: Final = 36
"""Address of [items * kv_heads + 1] int32: first piece of each."""
PARTIAL: Final = 37
"""Address of [pieces, partial_size]: what each piece saw."""
PARTIAL_SIZE: Final = 38
NUM_FRAME_CELLS: Final = 39

# Cells of a layer record, then its four products.
FIRST: Final = 0
"""1 = there is no layer before whose update is to be added."""
NORM_INPUT: Final = 1
"""Address of [hidden] float32, as the next."""
NORM_MIDDLE: Final = 2
NORM_QUERY: Final = 3
"""Of [head_dim]; 0 = none. As the next."""
NORM_KEY: Final = 4
NUMBERS: Final = 5
"""Of [5] float32: the four norms' eps, then the attention's scaling."""
KEYS: Final = 6
"""Of the layer's pool, as the next."""
VALUES: Final = 7
POOL_SIZE: Final = 8
"""Floats in each."""
WINDOW: Final = 9
PRODUCTS: Final = 10

# Stages.
STAGE_INPUT: Final = 0
STAGE_HEADS: Final = 1
STAGE_ATTENDED: Final = 2
STAGE_MIDDLE: Final = 3
STAGE_MLP: Final = 4
STAGE_FINAL: Final = 5
STAGE_RESCORE: Final = 6
STAGE_MERGE: Final = 7
"""For pairs of item and KV head in place of rows: after the attention, if it was cut."""


@njit(nogil=True, cache=True, error_model="numpy")
def _floats(address: Any, rows: Any, width: Any) -> Any:
    return carray(at(address), (rows, width), np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _numbers(layer: Any) -> Any:
    return carray(at(layer[NUMBERS]), (5,), np.float32)


@njit(nogil=True, cache=True, error_model="numpy")
def _quantise(frame: Any, x: Any, first: Any, last: Any) -> None:
    """Leave a product's inputs behind as int8, if products are in int8."""
    if frame[QUANTISED] != 0:
        rows = x.shape[0]
        out = carray(at(frame[BYTES]), x.shape, np.uint8)
        scales = carray(at(frame[SCALES]), (rows,), np.float32)
        zeros = carray(at(frame[ZEROS]), (rows,), np.int32)
        quantise(out, scales, zeros, x, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _norm(frame: Any, layer: Any, which: Any, first: Any, last: Any) -> None:
    """Add the last update to x, unless there is none; normalise."""
    rows, hidden = frame[ROWS], frame[HIDDEN]
    x, normed = _floats(frame[X], rows, hidden), _floats(frame[NORMED], rows, hidden)
    weight = carray(at(layer[which]), (hidden,), np.float32)
    eps = _numbers(layer)[which - NORM_INPUT]
    if which == NORM_INPUT and layer[FIRST] != 0:
        rms_norm(normed, x, weight, eps, first, last)
    else:
        add_rms_norm(normed, x, _floats(frame[UPDATE], rows, hidden), weight, eps, first, last)
    _quantise(frame, normed, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _heads(frame: Any, layer: Any, first: Any, last: Any) -> None:
    """Normalise and rotate heads; store K and V."""
    rows, heads, kv_heads, head_dim = frame[ROWS], frame[HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    qkv = carray(at(frame[QKV]), (rows, heads + 2 * kv_heads, head_dim), np.float32)
    numbers = _numbers(layer)
    if layer[NORM_QUERY] != 0:
        weight = carray(at(layer[NORM_QUERY]), (head_dim,), np.float32)
        norm_heads(qkv, 0, heads, weight, numbers[2], first, last)
    if layer[NORM_KEY] != 0:
        weight = carray(at(layer[NORM_KEY]), (head_dim,), np.float32)
        norm_heads(qkv, heads, heads + kv_heads, weight, numbers[3], first, last)
    cos, sin = _floats(frame[COS], rows, head_dim), _floats(frame[SIN], rows, head_dim)
    rotate(qkv, heads + kv_heads, cos, sin, first, last)
    keys = carray(at(layer[KEYS]), (layer[POOL_SIZE],), np.float32)
    values = carray(at(layer[VALUES]), (layer[POOL_SIZE],), np.float32)
    slots = carray(at(frame[SLOTS]), (rows,), np.int32)
    store(keys, values, qkv, heads, qkv, heads + kv_heads, kv_heads, slots, frame[BLOCK_SIZE], first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _mlp(frame: Any, first: Any, last: Any) -> None:
    rows, width = frame[ROWS], frame[MLP_WIDTH]
    product = _floats(frame[MLP_PRODUCT], rows, width)
    silu_mul(product, _floats(frame[GATE_UP], rows, 2 * width), first, last)
    _quantise(frame, product, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _final(frame: Any, layer: Any, first: Any, last: Any) -> None:
    """Add the last update to the rows kept, gathered; normalise."""
    rows, kept, hidden = frame[ROWS], frame[KEPT], frame[HIDDEN]
    x, update = _floats(frame[X], rows, hidden), _floats(frame[UPDATE], rows, hidden)
    normed = _floats(frame[NORMED], kept, hidden)
    keep = carray(at(frame[KEEP]), (kept,), np.int64)
    for i in range(first, last):
        for j in range(hidden):
            normed[i, j] = x[keep[i], j] + update[keep[i], j]
    weight = carray(at(layer[NORM_INPUT]), (hidden,), np.float32)
    rms_norm(normed, normed, weight, _numbers(layer)[0], first, last)
    _quantise(frame, normed, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def _merge_pieces(frame: Any, pair: Any) -> None:
    rows, heads, kv_heads, head_dim = frame[ROWS], frame[HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    width, group = (head_dim + TILE - 1) // TILE * TILE, heads // kv_heads
    order = carray(at(frame[ORDER]), (frame[ITEMS] * kv_heads,), np.int32)
    work = carray(at(frame[WORK]), (frame[ITEMS], 4), np.int32)
    starts = carray(at(frame[PIECE_STARTS]), (len(order) + 1,), np.int32)
    item, head = order[pair] // kv_heads, order[pair] % kv_heads
    num_lanes = work[item, 2] * group
    total = np.empty(state_size(num_lanes, width), np.float32)
    begin(total, num_lanes, width)
    for piece in range(starts[pair], starts[pair + 1]):
        merge(total, _floats(frame[PARTIAL], frame[PIECES], frame[PARTIAL_SIZE])[piece], num_lanes, width)
    out = carray(at(frame[ATTENDED]), (rows, heads, head_dim), np.float32)
    finish(out, total, group, head, work[item, 1], work[item, 2])


@njit(nogil=True, cache=True, error_model="numpy")
def attend_piece(frame_address: Any, layer_address: Any, piece: Any) -> None:
    """Attend for one item and one KV head to one part."""
    frame = carray(at(frame_address), (NUM_FRAME_CELLS,), np.int64)
    layer = carray(at(layer_address), (PRODUCTS,), np.int64)
    rows, heads, kv_heads, head_dim = frame[ROWS], frame[HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    pairs_and_parts = carray(at(frame[PAIRS_AND_PARTS]), (frame[PIECES], 2), np.int32)
    pair, part = pairs_and_parts[piece, 0], pairs_and_parts[piece, 1]
    order = carray(at(frame[ORDER]), (frame[ITEMS] * kv_heads,), np.int32)
    work = carray(at(frame[WORK]), (frame[ITEMS], 4), np.int32)
    item = order[pair] // kv_heads
    attend_part(
        _floats(frame[PARTIAL], frame[PIECES], frame[PARTIAL_SIZE])[piece],
        heads // kv_heads,
        carray(at(frame[QKV]), (rows, heads + 2 * kv_heads, head_dim), np.float32),
        carray(at(layer[KEYS]), (layer[POOL_SIZE],), np.float32),
        carray(at(layer[VALUES]), (layer[POOL_SIZE],), np.float32),
        carray(at(frame[TABLES]), (frame[SEQUENCES], frame[MAX_BLOCKS]), np.int32)[work[item, 0]],
        frame[BLOCK_SIZE],
        kv_heads,
        order[pair] % kv_heads,
        work[item, 1],
        work[item, 2],
        work[item, 3],
        part,
        _numbers(layer)[4],
        layer[WINDOW],
        np.float32(0.0),
    )


@njit(nogil=True, cache=True, error_model="numpy")
def run_rows(stage: Any, frame_address: Any, layer_address: Any, first: Any, last: Any) -> None:
    """Run one stage for rows first .. last - 1."""
    frame = carray(at(frame_address), (NUM_FRAME_CELLS,), np.int64)
    layer = carray(at(layer_address), (PRODUCTS,), np.int64)
    if stage == STAGE_INPUT:
        _norm(frame, layer, NORM_INPUT, first, last)
    elif stage == STAGE_HEADS:
        _heads(frame, layer, first, last)
    elif stage == STAGE_ATTENDED:
        width = frame[HEADS] * frame[HEAD_DIM]
        _quantise(frame, _floats(frame[ATTENDED], frame[ROWS], width), first, last)
    elif stage == STAGE_MIDDLE:
        _norm(frame, layer, NORM_MIDDLE, first, last)
    elif stage == STAGE_MLP:
        _mlp(frame, first, last)
    elif stage == STAGE_MERGE:
        for pair in range(first, last):
            _merge_pieces(frame, pair)
    elif stage == STAGE_FINAL:
        _final(frame, layer, first, last)
    else:
        kept, hidden, vocab_size = frame[KEPT], frame[HIDDEN], frame[VOCAB_SIZE]
        logits = _floats(frame[LOGITS], kept, vocab_size)
        weight = _floats(frame[FULL_HEAD], vocab_size, hidden)
        rescore(logits, _floats(frame[NORMED], kept, hidden), weight, first, last)


@njit(nogil=True, cache=True, error_model="numpy")
def attend_item(frame_address: Any, layer_address: Any, task: Any) -> None:
    """Attend for one item and one KV head."""
    frame = carray(at(frame_address), (NUM_FRAME_CELLS,), np.int64)
    layer = carray(at(layer_address), (PRODUCTS,), np.int64)
    rows, heads, kv_heads, head_dim = frame[ROWS], frame[HEADS], frame[KV_HEADS], frame[HEAD_DIM]
    attend(
        carray(at(frame[ATTENDED]), (rows, heads, head_dim), np.float32),
        carray(at(frame[QKV]), (rows, heads + 2 * kv_heads, head_dim), np.float32),
        carray(at(layer[KEYS]), (layer[POOL_SIZE],), np.float32),
        carray(at(layer[VALUES]), (layer[POOL_SIZE],), np.float32),
        carray(at(frame[TABLES]), (frame[SEQUENCES], frame[MAX_BLOCKS]), np.int32),
        frame[BLOCK_SIZE],
        kv_heads,
        carray(at(frame[WORK]), (frame[ITEMS], 4), np.int32),
        carray(at(frame[ORDER]), (frame[ITEMS] * kv_heads,), np.int32),
        _numbers(layer)[4],
        layer[WINDOW],
        np.float32(0.0),
        task,
        task + 1,
    )
