"""int8 matrix products on CPUs with AVX-512 VNNI, compiled by numba: no copy of a weight, no barrier.

torch._int_mm and oneDNN share their work over OpenMP, whose every product ends in a barrier: where another
process takes a core, each of a step's hundred barriers waits for a thread that does not run. Here the
columns of a product are dealt out in tiles. Whoever is free takes the next one, the caller too, and it can do
them all alone: only a tile that was begun elsewhere is waited for.

Weights lie in tiles of TILE outputs; in a tile the GROUP inputs that one instruction adds up are adjacent:

    packed  [outputs / TILE, inputs / GROUP, TILE, GROUP] int8, missing outputs are zero

Sums are whole numbers, so neither the order of the tiles nor the thread that takes them changes a bit.
"""

import os
from typing import Any, Final

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import carray, njit, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from replicas.model_kernels import quantise

TILE: Final = 64
"""Outputs per tile."""
GROUP: Final = 4
"""Inputs per instruction and output."""
_ROWS: Final = 6
"""Rows that share a read of a tile's weights: their sums fill 24 of the 32 registers."""
_VECTORS: Final = 4
"""Registers of 16 sums that hold a row's TILE."""

# Cells of a team's state that are written by several threads, each in a cache line of its own, then the job.
LEFT: Final = 0
"""Tiles of the job that nobody has taken; below zero after late attempts."""
DONE: Final = 8
"""Tiles of the job that are computed."""
JOB: Final = 16
NUM_CELLS: Final = 32

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_SUMS, _BYTES = ir.VectorType(_I32, 16), ir.VectorType(ir.IntType(8), 64)


def available() -> bool:
    """Return whether this CPU has the instruction, and this LLVM its present form."""
    redirected = any(name in os.environ for name in ("NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES"))
    features = llvmlite.binding.get_host_cpu_features()
    return bool(features.get("avx512vnni")) and llvmlite.binding.llvm_version_info[0] >= 22 and not redirected


def pack(weight: NDArray[np.int8]) -> NDArray[np.int8]:  # [outputs, inputs] -> see the module's docstring
    """Lay out a weight as `multiply` reads it. inputs is a multiple of GROUP."""
    outputs, inputs = weight.shape
    padded = np.zeros((-(-outputs // TILE) * TILE, inputs), dtype=np.int8)
    padded[:outputs] = weight
    tiles = padded.reshape(-1, TILE, inputs // GROUP, GROUP)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1, 3))


def _pointer(builder: Any, address: Any, pointee: Any) -> Any:
    return builder.inttoptr(address, pointee.as_pointer())


def _load_weights(builder: Any, tile: Any, index: Any) -> list[Any]:
    """One group of inputs of a tile: _VECTORS registers of bytes."""
    first = builder.add(tile, builder.mul(index, ir.Constant(_I64, TILE * GROUP)))
    addresses = [builder.add(first, ir.Constant(_I64, 64 * i)) for i in range(_VECTORS)]
    return [builder.load(_pointer(builder, address, _BYTES), align=1) for address in addresses]


def _load_inputs(builder: Any, x: Any, stride: Any, row: int, index: Any) -> Any:
    """The same GROUP inputs of a row in every place of a register."""
    at = builder.add(x, builder.mul(stride, ir.Constant(_I64, row)))
    at = builder.add(at, builder.mul(index, ir.Constant(_I64, GROUP)))
    four = builder.load(_pointer(builder, at, _I32), align=1)
    undefined = ir.Constant(_SUMS, ir.Undefined)
    one = builder.insert_element(undefined, four, ir.Constant(_I32, 0))
    return builder.bitcast(builder.shuffle_vector(one, undefined, ir.Constant(_SUMS, [0] * 16)), _BYTES)


def _emit_block(builder: Any, num_rows: int, args: Any) -> None:
    """Emit a loop over the groups of inputs, with all sums in registers; then store them."""
    sums, x, weight, stride, groups = args
    multiply = builder.module.declare_intrinsic(
        "llvm.x86.avx512.vpdpbusd.512", fnty=ir.FunctionType(_SUMS, [_SUMS, _BYTES, _BYTES])
    )
    before = builder.basic_block
    loop, after = builder.append_basic_block("group"), builder.append_basic_block("rows_done")
    builder.branch(loop)
    builder.position_at_end(loop)
    index = builder.phi(_I64)
    totals = [builder.phi(_SUMS) for _ in range(num_rows * _VECTORS)]
    weights = _load_weights(builder, weight, index)
    inputs = [_load_inputs(builder, x, stride, row, index) for row in range(num_rows)]
    next_totals = [
        builder.call(multiply, [total, inputs[i // _VECTORS], weights[i % _VECTORS]])
        for i, total in enumerate(totals)
    ]
    following = builder.add(index, ir.Constant(_I64, 1))
    index.add_incoming(ir.Constant(_I64, 0), before)
    index.add_incoming(following, loop)
    for total, next_total in zip(totals, next_totals, strict=True):
        total.add_incoming(ir.Constant(_SUMS, [0] * 16), before)
        total.add_incoming(next_total, loop)
    builder.cbranch(builder.icmp_signed("<", following, groups), loop, after)
    builder.position_at_end(after)
    for i, next_total in enumerate(next_totals):
        at = builder.add(sums, ir.Constant(_I64, 64 * i))
        builder.store(next_total, _pointer(builder, at, _SUMS), align=1)


def _make_block(num_rows: int) -> Any:
    """Return an intrinsic: sums of `num_rows` rows with one tile, [num_rows, TILE] int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        _emit_block(builder, num_rows, args)
        return context.get_dummy_value()

    @intrinsic
    def block(typingctx: Any, sums: Any, x: Any, weight: Any, stride: Any, groups: Any) -> Any:  # noqa: ARG001
        return types.void(types.int64, types.int64, types.int64, types.int64, types.int64), codegen

    return block


_block_1, _block_2, _block_3, _block_4, _block_5, _block_6 = (_make_block(n) for n in range(1, _ROWS + 1))


@intrinsic
def _at(typingctx: Any, address: Any) -> Any:  # noqa: ARG001
    """An address as a pointer that carray takes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def _add_to_cell(typingctx: Any, state: Any, cell: Any, amount: Any) -> Any:  # noqa: ARG001
    """state[cell] += amount for all threads at once; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(state, types.int64, types.int64), codegen


@intrinsic
def _read_cell(typingctx: Any, state: Any, cell: Any) -> Any:  # noqa: ARG001
    """state[cell] as other threads left it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", align=8)

    return types.int64(state, types.int64), codegen


@intrinsic
def _write_cell(typingctx: Any, state: Any, cell: Any, value: Any) -> Any:  # noqa: ARG001
    """state[cell] = value, after everything that this thread wrote before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store_atomic(args[2], builder.gep(data, [args[1]]), "seq_cst", align=8)
        return context.get_dummy_value()

    return types.void(state, types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:  # noqa: ARG001
    """Let some cycles go by without taking memory's or the other thread's."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])),
            [],
        )
        return context.get_dummy_value()

    return types.void(), codegen


@njit(nogil=True, cache=True, error_model="numpy")
def _compute_tile(job: Any, tile: Any, sums: Any) -> None:
    """Compute one tile of the job's outputs, for all rows."""
    rows, inputs, outputs = job[8], job[9], job[10]
    first = tile * TILE
    width = min(TILE, outputs - first)
    out = carray(_at(job[0]), (rows * outputs,), np.float32)
    scales = carray(_at(job[2]), (rows,), np.float32)
    zeros = carray(_at(job[3]), (rows,), np.int32)
    weight = job[4] + tile * TILE * inputs
    column_scales = carray(_at(job[5]), (outputs,), np.float32)[first : first + width]
    column_sums = carray(_at(job[6]), (outputs,), np.int32)[first : first + width]
    bias = carray(_at(job[7]), (outputs,), np.float32)[first : first + width]
    blocks = (rows + _ROWS - 1) // _ROWS
    address, groups = sums.ctypes.data, inputs // GROUP
    for block in range(blocks):
        begin, end = rows * block // blocks, rows * (block + 1) // blocks
        x, count = job[1] + begin * inputs, end - begin
        if count == 1:
            _block_1(address, x, weight, inputs, groups)
        elif count == 2:
            _block_2(address, x, weight, inputs, groups)
        elif count == 3:
            _block_3(address, x, weight, inputs, groups)
        elif count == 4:
            _block_4(address, x, weight, inputs, groups)
        elif count == 5:
            _block_5(address, x, weight, inputs, groups)
        else:
            _block_6(address, x, weight, inputs, groups)
        for row in range(begin, end):
            scale, zero = scales[row], zeros[row]
            row_sums = sums[(row - begin) * TILE : (row - begin) * TILE + width]
            result = out[row * outputs + first : row * outputs + first + width]
            for i in range(width):
                whole = np.int32(row_sums[i] - zero * column_sums[i])
                result[i] = np.float32(whole) * scale * column_scales[i] + bias[i]


@njit(nogil=True, cache=True, error_model="numpy")
def _work(state: Any, sums: Any) -> None:
    """Compute tiles of the present job until none is left to take."""
    while True:
        left = _add_to_cell(state, LEFT, -1)
        if left <= 0:
            return
        # The job cannot end, or change, before this tile is counted.
        _compute_tile(state[JOB:], left - 1, sums)
        _add_to_cell(state, DONE, 1)


@njit(nogil=True, cache=True, error_model="numpy")
def linear(
    state: Any,  # [NUM_CELLS] int64; one caller at a time
    out: Any,  # address of [rows, outputs] float32
    x: Any,  # of [rows, inputs] float32
    weight: Any,  # of a packed weight
    column_scales: Any,  # of [outputs] float32
    column_sums: Any,  # of [outputs] int32; of the weights
    bias: Any,  # of [outputs] float32
    rows: Any,
    inputs: Any,
    outputs: Any,
) -> None:
    """out = ((q - zero) @ weight.T) * scale * column scale + bias, x being quantised to q row by row.

    Returns when all of it is there.
    """
    quantised = np.empty((rows, inputs), np.uint8)
    scales, zeros = np.empty(rows, np.float32), np.empty(rows, np.int32)
    quantise(quantised, scales, zeros, carray(_at(x), (rows, inputs), np.float32), 0, rows)
    job = state[JOB:]
    job[0], job[1], job[2], job[3] = out, quantised.ctypes.data, scales.ctypes.data, zeros.ctypes.data
    job[4], job[5], job[6], job[7] = weight, column_scales, column_sums, bias
    job[8], job[9], job[10] = rows, inputs, outputs
    tiles = (outputs + TILE - 1) // TILE
    _write_cell(state, DONE, 0)
    _write_cell(state, LEFT, tiles)
    _work(state, np.empty(_ROWS * TILE, np.int32))
    while _read_cell(state, DONE) < tiles:
        _pause()


@njit(nogil=True, cache=True, error_model="numpy")
def follow(state: Any, patience: Any) -> None:
    """Help with every job; return after looking for one `patience` times in vain."""
    sums = np.empty(_ROWS * TILE, np.int32)
    idle = 0
    while idle < patience:
        if _read_cell(state, LEFT) > 0:
            _work(state, sums)
            idle = 0
        else:
            _pause()
            idle += 1
