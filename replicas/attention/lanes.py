"""Sixteen fp32 lanes as one numba value: SIMD that does not depend on an optimiser's mood.

LLVM lowers them to one AVX-512 register, two of AVX2 or four of NEON. Every operation is exactly rounded per
lane (`fma` rounds once), so results are the same bits on all of them, and nothing is ever re-ordered.
"""

from collections.abc import Callable
from typing import Any, Final

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, register_model

WIDTH: Final = 16

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, WIDTH)
_INTS = ir.VectorType(_INT, WIDTH)


class LanesType(types.Type):  # type: ignore[misc]  # numba is untyped
    """numba's type of a value of sixteen fp32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Lanes")


lanes_type: Final = LanesType()


@register_model(LanesType)
class _LanesModel(models.PrimitiveModel):  # type: ignore[misc]  # numba is untyped
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, _FLOATS)


def _address(context: Any, builder: Any, array_type: Any, array: Any, offset: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [offset]), _FLOATS.as_pointer())


def _splat(builder: Any, scalar: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scalar, ir.Constant(_INT, 0))
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * WIDTH))


def _call(builder: Any, name: str, returns: Any, args: list[Any]) -> Any:
    function_type = ir.FunctionType(returns, [arg.type for arg in args])
    return builder.call(builder.module.declare_intrinsic(name, fnty=function_type), args)


@intrinsic
def load(typingctx: Any, array: Any, offset: Any) -> Any:  # noqa: ARG001 - numba's calling convention
    """Lanes of array[offset : offset + 16]; `array` is contiguous fp32, nothing is checked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], args[0], args[1])
        return builder.load(address, align=4)

    return lanes_type(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, offset: Any, lanes: Any) -> Any:  # noqa: ARG001
    """array[offset : offset + 16] = lanes; `array` is contiguous fp32, nothing is checked."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        address = _address(context, builder, signature.args[0], args[0], args[1])
        builder.store(args[2], address, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type), codegen


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:  # noqa: ARG001
    """The same scalar in every lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return _splat(builder, args[0])

    return lanes_type(types.float32), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:  # noqa: ARG001
    """a * b + c, rounded once."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return _call(builder, "llvm.fma.v16f32", _FLOATS, list(args))

    return lanes_type(lanes_type, lanes_type, lanes_type), codegen


def _binary(emit: Callable[[Any, Any, Any], Any], doc: str) -> Any:
    def operation(typingctx: Any, a: Any, b: Any) -> Any:  # noqa: ARG001
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
            return emit(builder, args[0], args[1])

        return lanes_type(lanes_type, lanes_type), codegen

    operation.__doc__ = doc
    return intrinsic(operation)


add = _binary(lambda builder, a, b: builder.fadd(a, b), "a + b per lane.")
sub = _binary(lambda builder, a, b: builder.fsub(a, b), "a - b per lane.")
mul = _binary(lambda builder, a, b: builder.fmul(a, b), "a * b per lane.")
div = _binary(lambda builder, a, b: builder.fdiv(a, b), "a / b per lane.")
clamp_above = _binary(
    lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), b, a),
    "min(a, b) per lane; NaN stays.",
)
clamp_below = _binary(
    lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), b, a),
    "max(a, b) per lane; NaN stays.",
)


@intrinsic
def floor(typingctx: Any, lanes: Any) -> Any:  # noqa: ARG001
    """The largest whole number not above each lane."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return _call(builder, "llvm.floor.v16f32", _FLOATS, list(args))

    return lanes_type(lanes_type), codegen


@intrinsic
def round_even(typingctx: Any, lanes: Any) -> Any:  # noqa: ARG001
    """The nearest whole number to each lane, the even one of two."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return _call(builder, "llvm.roundeven.v16f32", _FLOATS, list(args))

    return lanes_type(lanes_type), codegen


@intrinsic
def store_bytes(typingctx: Any, array: Any, offset: Any, lanes: Any) -> Any:  # noqa: ARG001
    """array[offset : offset + 16] = lanes, whole numbers held to 0 .. 255, NaN as 0; contiguous uint8."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        held = _call(builder, "llvm.maxnum.v16f32", _FLOATS, [args[2], ir.Constant(_FLOATS, [0.0] * WIDTH)])
        held = _call(builder, "llvm.minnum.v16f32", _FLOATS, [held, ir.Constant(_FLOATS, [255.0] * WIDTH)])
        whole = builder.fptosi(held, _INTS)
        narrow = ir.VectorType(ir.IntType(8), WIDTH)
        address = builder.bitcast(builder.gep(data, [args[1]]), narrow.as_pointer())
        builder.store(builder.trunc(whole, narrow), address, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, lanes_type), codegen


@intrinsic
def power_of_two(typingctx: Any, lanes: Any) -> Any:  # noqa: ARG001
    """2 ** n for whole n in [-126, 127], by writing the exponent."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        exponent = builder.add(builder.fptosi(args[0], _INTS), ir.Constant(_INTS, [127] * WIDTH))
        return builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * WIDTH)), _FLOATS)

    return lanes_type(lanes_type), codegen


@intrinsic
def keep(typingctx: Any, lanes: Any, first: Any, last: Any, other: Any) -> Any:  # noqa: ARG001
    """Lanes first .. last - 1; `other` in the rest."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        kept = ir.Constant(_FLOATS, ir.Undefined)
        index = ir.Constant(_INTS, list(range(WIDTH)))
        bounds = []
        for bound in (args[1], args[2]):
            one = builder.insert_element(
                ir.Constant(_INTS, ir.Undefined), builder.trunc(bound, _INT), ir.Constant(_INT, 0)
            )
            bounds.append(
                builder.shuffle_vector(one, ir.Constant(_INTS, ir.Undefined), ir.Constant(_INTS, [0] * WIDTH))
            )
        inside = builder.and_(
            builder.icmp_signed(">=", index, bounds[0]), builder.icmp_signed("<", index, bounds[1])
        )
        kept = builder.select(inside, args[0], _splat(builder, args[3]))
        return kept

    return lanes_type(lanes_type, types.intp, types.intp, types.float32), codegen


@intrinsic
def largest(typingctx: Any, lanes: Any) -> Any:  # noqa: ARG001
    """The maximum over the lanes."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return _call(builder, "llvm.vector.reduce.fmax.v16f32", _FLOAT, list(args))

    return types.float32(lanes_type), codegen


@intrinsic
def total(typingctx: Any, lanes: Any) -> Any:  # noqa: ARG001
    """The sum over the lanes, added one after the other from lane 0."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return _call(builder, "llvm.vector.reduce.fadd.v16f32", _FLOAT, [ir.Constant(_FLOAT, 0.0), args[0]])

    return types.float32(lanes_type), codegen
