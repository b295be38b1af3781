"""The Numba type of sixteen floats in a register, and the ground that `simd` and `simd_memory` stand on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from qwenc.kernels.level import LEVEL
from qwenc.kernels.wide import F32X16, I8, I32, I32X16, LANES, SMALL, SMALL_BITS, Value


class VectorType(types.Type):
    """A Numba type held in vector registers. `name` tells the lanes, `llvm_type` what LLVM holds."""

    def __init__(self, name: str, llvm_type: ir.VectorType):
        self.llvm_type = llvm_type
        super().__init__(name=name)


@register_model(VectorType)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, dmm: Any, fe_type: VectorType):
        super().__init__(dmm, fe_type, fe_type.llvm_type)


f32x16 = VectorType("f32x16", F32X16)


def pointer_to(context: Any, builder: Any, array_type: Any, array: Value, index: Value) -> Value:
    """i8* to element `index` of a C-contiguous array (index counts in memory order, whatever the dimensions)."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [index]), I8.as_pointer())


def operation(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Value]], Any]:
    """Make an intrinsic out of `emit(builder, *values) -> value` on fixed types."""

    def wrap(emit: Callable[..., Value]) -> Any:
        signature = result(*arguments)

        def codegen(context: Any, builder: Any, sig: Any, values: Any) -> Value:
            return emit(builder, *values)

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        namespace: dict[str, Any] = {"signature": signature, "codegen": codegen}
        exec(f"def {emit.__name__}(typingctx, {names}):\n    return signature, codegen", namespace)
        function = namespace[emit.__name__]
        function.__doc__ = emit.__doc__
        return intrinsic(function)

    return wrap


def splat_vector(b: ir.IRBuilder, scalar: Value, kind: ir.VectorType = F32X16) -> Value:
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(I32X16, [0] * LANES))


def constant(value: float, kind: ir.VectorType = F32X16) -> Value:
    return ir.Constant(kind, [value] * LANES)


def call(b: ir.IRBuilder, name: str, *values: Value) -> Value:
    kind = values[0].type
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [v.type for v in values]), f"{name}.v{LANES}f32")
    return b.call(function, values)


def rounded(b: ir.IRBuilder, x: Value) -> Value:
    """Nearest integers (ties to even) as i32 lanes, for floats within ±2^22; what a NaN becomes is not defined."""
    if LEVEL.name == "neon":  # which rounds and converts slowly: adding SMALL leaves the integer in the last bits
        bits = b.bitcast(b.fadd(x, constant(SMALL)), I32X16)
        return b.sub(bits, constant(SMALL_BITS, I32X16))
    return b.fptosi(call(b, "llvm.rint", x), I32X16)
