"""What threads share in compiled code: cells of an int64 array that they read and write, arrays by address.

A job is handed out in tasks through two cells: LEFT, from which each thread takes the next task, and DONE.
A job is a compiled function, called once per task with the address of the cells from ARGUMENTS on.
"""

from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

# The cells of a team's state; those that several threads write have a cache line of their own.
LEFT: Final = 0
"""Tasks of the job that nobody has taken; below zero after late attempts."""
DONE: Final = 8
"""Tasks of the job that are finished."""
JOB: Final = 16
"""Address of the function."""
MULTIPLY: Final = 17
"""Address of model_tasks.multiply_task, as the next two."""
ATTEND: Final = 18
RUN_ROWS: Final = 19
ARGUMENTS: Final = 24
BUSY: Final = 40
"""1 = more jobs follow, however long none is seen."""
NUM_CELLS: Final = 48


@intrinsic
def at(typingctx: Any, address: Any) -> Any:  # noqa: ARG001 - numba's calling convention
    """An address as a pointer that carray takes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


@intrinsic
def call(typingctx: Any, function: Any, arguments: Any, task: Any, scratch: Any) -> Any:  # noqa: ARG001
    """Call what lies at the address `function`.

    Compiled code that names a function is compiled with it, and so on up the chain; an address costs nothing.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        i64 = ir.IntType(64)
        function_type = ir.FunctionType(ir.VoidType(), [i64, i64, i64])
        builder.call(builder.inttoptr(args[0], function_type.as_pointer()), args[1:])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), codegen


@intrinsic
def add_to_cell(typingctx: Any, state: Any, cell: Any, amount: Any) -> Any:  # noqa: ARG001
    """state[cell] += amount for all threads at once; returns the value before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.atomic_rmw("add", builder.gep(data, [args[1]]), args[2], "seq_cst")

    return types.int64(state, types.int64, types.int64), codegen


@intrinsic
def read_cell(typingctx: Any, state: Any, cell: Any) -> Any:  # noqa: ARG001
    """state[cell] as other threads left it."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        return builder.load_atomic(builder.gep(data, [args[1]]), "seq_cst", align=8)

    return types.int64(state, types.int64), codegen


@intrinsic
def write_cell(typingctx: Any, state: Any, cell: Any, value: Any) -> Any:  # noqa: ARG001
    """state[cell] = value, after everything that this thread wrote before."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        builder.store_atomic(args[2], builder.gep(data, [args[1]]), "seq_cst", align=8)
        return context.get_dummy_value()

    return types.void(state, types.int64, types.int64), codegen


@intrinsic
def pause(typingctx: Any) -> Any:  # noqa: ARG001
    """Let some cycles go by without taking memory's or the other thread's."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.call(
            builder.module.declare_intrinsic("llvm.x86.sse2.pause", fnty=ir.FunctionType(ir.VoidType(), [])),
            [],
        )
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def give_way(typingctx: Any) -> Any:  # noqa: ARG001
    """Let another thread that waits for this core run first."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        function_type = ir.FunctionType(ir.IntType(32), [])
        builder.call(cgutils.get_or_insert_function(builder.module, function_type, "sched_yield"), [])
        return context.get_dummy_value()

    return types.void(), codegen
