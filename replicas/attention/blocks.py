"""The two inner loops of attention, emitted for LLVM: rows against a span of K, and weights against V.

A block holds the sums of up to ROWS rows in registers. Every sum adds one element after the other, so its
bits depend neither on the number of rows in the block nor on the machine's registers.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

ROWS: Final = 6
TILE: Final = 16
"""Positions per tile of K: one register of sixteen lanes."""
TILES: Final = 4
"""Tiles per span, and registers of a row of V that are added at a time."""
SPAN: Final = TILE * TILES

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_FLOAT = ir.FloatType()
_FLOATS = ir.VectorType(_FLOAT, TILE)


def _load(builder: Any, address: Any) -> Any:
    return builder.load(builder.inttoptr(address, _FLOATS.as_pointer()), align=4)


def _store(builder: Any, value: Any, address: Any) -> None:
    builder.store(value, builder.inttoptr(address, _FLOATS.as_pointer()), align=4)


def _splat(builder: Any, address: Any) -> Any:
    cell = builder.load(builder.inttoptr(address, _FLOAT.as_pointer()), align=4)
    undefined = ir.Constant(_FLOATS, ir.Undefined)
    one = builder.insert_element(undefined, cell, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(_I32, TILE), [0] * TILE))


def _plus(builder: Any, address: Any, offset: Any) -> Any:
    return builder.add(address, offset if isinstance(offset, ir.Value) else ir.Constant(_I64, offset))


def _accumulate(
    builder: Any,
    totals: list[list[Any]],  # [rows][columns], what is added to
    count: Any,
    left: Any,  # builder, index -> the addresses of one scalar per row
    right: Any,  # builder, index -> the addresses of one register per column
) -> list[list[Any]]:
    """Emit: totals[r][c] += left[r] * right[c] for every index below `count`, which is positive."""
    fma = builder.module.declare_intrinsic("llvm.fma.v16f32", fnty=ir.FunctionType(_FLOATS, [_FLOATS] * 3))
    before = builder.basic_block
    loop, after = builder.append_basic_block("loop"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    sums = [[builder.phi(_FLOATS) for _ in row] for row in totals]
    columns = [_load(builder, address) for address in right(builder, index)]
    scalars = [_splat(builder, address) for address in left(builder, index)]
    following = [
        [builder.call(fma, [scalar, column, total]) for column, total in zip(columns, row, strict=True)]
        for scalar, row in zip(scalars, sums, strict=True)
    ]
    next_index = builder.add(index, ir.Constant(_I64, 1))
    index.add_incoming(ir.Constant(_I64, 0), before)
    index.add_incoming(next_index, loop)
    for row, next_row, first_row in zip(sums, following, totals, strict=True):
        for total, next_total, first in zip(row, next_row, first_row, strict=True):
            total.add_incoming(first, before)
            total.add_incoming(next_total, loop)
    builder.cbranch(builder.icmp_signed("<", next_index, count), loop, after)
    builder.position_at_end(after)
    return following


def _make_scores(num_rows: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        scores, queries, *tiles, width = args
        stride = builder.mul(width, ir.Constant(_I64, 4))
        rows = [_plus(builder, queries, builder.mul(stride, ir.Constant(_I64, r))) for r in range(num_rows)]
        totals = _accumulate(
            builder,
            [[ir.Constant(_FLOATS, [0.0] * TILE)] * TILES for _ in range(num_rows)],
            width,
            lambda b, i: [_plus(b, row, b.mul(i, ir.Constant(_I64, 4))) for row in rows],
            lambda b, i: [_plus(b, tile, b.mul(i, ir.Constant(_I64, 4 * TILE))) for tile in tiles],
        )
        for r, row in enumerate(totals):
            for t, total in enumerate(row):
                _store(builder, total, _plus(builder, scores, 4 * (r * SPAN + t * TILE)))
        return context.get_dummy_value()

    @intrinsic
    def block(
        typingctx: Any,
        scores: Any,  # address of [rows, SPAN], as the next
        queries: Any,  # of [rows, width]
        tile_0: Any,  # of [width, TILE]
        tile_1: Any,
        tile_2: Any,
        tile_3: Any,
        width: Any,
    ) -> Any:
        return types.void(*[types.int64] * 7), codegen

    return block


def _make_values(num_rows: int, num_columns: int) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        outputs, weights, values, width, count = args
        stride = builder.mul(width, ir.Constant(_I64, 4))
        places = [
            [
                _plus(
                    builder, _plus(builder, outputs, builder.mul(stride, ir.Constant(_I64, r))), 4 * TILE * c
                )
                for c in range(num_columns)
            ]
            for r in range(num_rows)
        ]
        totals = _accumulate(
            builder,
            [[_load(builder, place) for place in row] for row in places],
            count,
            lambda b, i: [
                _plus(b, _plus(b, weights, 4 * SPAN * r), b.mul(i, ir.Constant(_I64, 4)))
                for r in range(num_rows)
            ],
            lambda b, i: [
                _plus(b, _plus(b, values, b.mul(i, stride)), 4 * TILE * c) for c in range(num_columns)
            ],
        )
        for row, into in zip(totals, places, strict=True):
            for total, place in zip(row, into, strict=True):
                _store(builder, total, place)
        return context.get_dummy_value()

    @intrinsic
    def block(
        typingctx: Any,
        outputs: Any,  # address of [rows, width], added to, as the next
        weights: Any,  # of [rows, SPAN]
        values: Any,  # of [count, width]
        width: Any,
        count: Any,  # positive
    ) -> Any:
        return types.void(*[types.int64] * 5), codegen

    return block


scores_1, scores_2, scores_3, scores_4, scores_5, scores_6 = (_make_scores(n) for n in range(1, ROWS + 1))
values_1, values_2, values_3, values_4, values_5, values_6 = (
    _make_values(n, TILES) for n in range(1, ROWS + 1)
)
column_1 = _make_values(1, 1)
