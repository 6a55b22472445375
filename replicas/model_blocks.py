"""The inner loop of a matrix product, emitted for LLVM: some rows times one tile of a packed weight.

Weights lie in tiles of TILE outputs; in a tile the inputs that one instruction takes of an output are
adjacent: GROUP inputs in int8, one in fp32, 32 bits either way:

    int8  [outputs / TILE, inputs / GROUP, TILE, GROUP]
    fp32  [outputs / TILE, inputs, TILE]

All sums of a block stay in registers, and a sum adds its inputs one after the other. So its bits depend
neither on the number of rows nor on who computes the tile.
"""

import os
from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

TILE: Final = 64
"""Outputs per tile."""
GROUP: Final = 4
"""int8 inputs per instruction and output."""
ROWS: Final = 6
"""Rows that share a read of a tile's weights: their sums fill 24 of the 32 registers."""
_VECTORS: Final = 4
"""Registers of 16 sums that hold a row's TILE."""

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_BYTES, _INTS = ir.VectorType(_I8, 64), ir.VectorType(_I32, 16)
_FLOATS = ir.VectorType(ir.FloatType(), 16)

Multiply = Callable[[Any, Any, Any, Any], Any]
"""builder, sums, inputs, weights (both _INTS) -> sums."""


def available() -> bool:
    """Return whether this CPU has the instructions, and this LLVM their present form."""
    redirected = any(name in os.environ for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"))
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("avx512vnni")) and llvmlite.binding.llvm_version_info[0] >= 22 and not redirected


def _multiply_int8(builder: Any, sums: Any, inputs: Any, weights: Any) -> Any:
    function_type = ir.FunctionType(_INTS, [_INTS, _BYTES, _BYTES])
    dot = builder.module.declare_intrinsic("llvm.x86.avx512.vpdpbusd.512", fnty=function_type)
    return builder.call(dot, [sums, builder.bitcast(inputs, _BYTES), builder.bitcast(weights, _BYTES)])


def _multiply_fp32(builder: Any, sums: Any, inputs: Any, weights: Any) -> Any:
    function_type = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    fma = builder.module.declare_intrinsic("llvm.fma.v16f32", fnty=function_type)
    return builder.call(fma, [builder.bitcast(inputs, _FLOATS), builder.bitcast(weights, _FLOATS), sums])


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _load_weights(builder: Any, tile: Any, index: Any) -> list[Any]:
    """One instruction's inputs of a tile."""
    first = builder.add(tile, builder.mul(index, ir.Constant(_I64, 4 * TILE)))
    addresses = [builder.add(first, ir.Constant(_I64, 64 * i)) for i in range(_VECTORS)]
    return [builder.load(_pointer(builder, address, _INTS), align=1) for address in addresses]


def _load_inputs(builder: Any, x: Any, stride: Any, row: int, index: Any) -> Any:
    """The same inputs of a row, 32 bits of them, in every place of a register."""
    row_start = builder.add(x, builder.mul(stride, ir.Constant(_I64, row)))
    address = builder.add(row_start, builder.mul(index, ir.Constant(_I64, 4)))
    cell = builder.load(_pointer(builder, address, _I32), align=1)
    undefined = ir.Constant(_INTS, ir.Undefined)
    one = builder.insert_element(undefined, cell, ir.Constant(_I32, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(_INTS, [0] * 16))


def _emit(builder: Any, num_rows: int, sum_type: Any, multiply: Multiply, args: Any) -> None:
    """Emit a loop over the inputs, then store the sums."""
    sums, x, weight, stride, steps = args
    before = builder.basic_block
    loop, after = builder.append_basic_block("inputs"), builder.append_basic_block("done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    totals = [builder.phi(sum_type) for _ in range(num_rows * _VECTORS)]
    weights = _load_weights(builder, weight, index)
    inputs = [_load_inputs(builder, x, stride, row, index) for row in range(num_rows)]
    next_totals = [
        multiply(builder, total, inputs[i // _VECTORS], weights[i % _VECTORS])
        for i, total in enumerate(totals)
    ]
    following = builder.add(index, ir.Constant(_I64, 1))
    index.add_incoming(ir.Constant(_I64, 0), before)
    index.add_incoming(following, loop)
    for total, next_total in zip(totals, next_totals, strict=True):
        total.add_incoming(ir.Constant(sum_type, [0] * 16), before)
        total.add_incoming(next_total, loop)
    builder.cbranch(builder.icmp_signed("<", following, steps), loop, after)
    builder.position_at_end(after)
    for i, next_total in enumerate(next_totals):
        address = builder.add(sums, ir.Constant(_I64, 64 * i))
        builder.store(next_total, _pointer(builder, address, sum_type), align=1)


def _make_block(num_rows: int, sum_type: Any, multiply: Multiply) -> Any:
    """Return an intrinsic of five addresses and counts: where the sums [num_rows, TILE] go, the first row,
    the tile, bytes from row to row, instructions per sum."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        _emit(builder, num_rows, sum_type, multiply, args)
        return context.get_dummy_value()

    @intrinsic
    def block(typingctx: Any, sums: Any, x: Any, weight: Any, stride: Any, steps: Any) -> Any:  # noqa: ARG001
        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), codegen

    return block


int8_1, int8_2, int8_3, int8_4, int8_5, int8_6 = (
    _make_block(n, _INTS, _multiply_int8) for n in range(1, ROWS + 1)
)
fp32_1, fp32_2, fp32_3, fp32_4, fp32_5, fp32_6 = (
    _make_block(n, _FLOATS, _multiply_fp32) for n in range(1, ROWS + 1)
)
