"""Sixteen floats in a register, as a Numba type: what kernels written in Python use between the emitted tiles.

Every operation is one IEEE operation per lane in a fixed order, so all SIMD levels give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from qwenc.kernels.emit import F32X16, I8, I16X16, I32, I32X16, I64, LANES, SMALL, SMALL_BITS, Emitter, Value
from qwenc.kernels.level import LEVEL


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


def _operation(result: types.Type, *arguments: types.Type) -> Callable[[Callable[..., Value]], Any]:
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


def _splat(b: ir.IRBuilder, scalar: Value, kind: ir.VectorType = F32X16) -> Value:
    one = b.insert_element(ir.Constant(kind, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(I32X16, [0] * LANES))


def _constant(value: float, kind: ir.VectorType = F32X16) -> Value:
    return ir.Constant(kind, [value] * LANES)


def _call(b: ir.IRBuilder, name: str, *values: Value) -> Value:
    kind = values[0].type
    function = cgutils.get_or_insert_function(b.module, ir.FunctionType(kind, [v.type for v in values]), f"{name}.v{LANES}f32")
    return b.call(function, values)


# ---- memory ---------------------------------------------------------------------------------------------------------------
@intrinsic
def load(typingctx, array, index):
    """16 floats from element `index` of a float32 array, in memory order."""

    def codegen(context, builder, sig, values):
        pointer = pointer_to(context, builder, sig.args[0], *values)
        return builder.load(builder.bitcast(pointer, F32X16.as_pointer()), align=1)

    return f32x16(array, types.intp), codegen


@intrinsic
def fetch(typingctx, array, index, size):
    """Ask for `size` bytes from element `index` of an array on, a multiple of 64. They may lie beyond its end."""

    def codegen(context, builder, sig, values):
        array_v, index_v, size_v = values
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        e = Emitter(builder)
        with cgutils.for_range(builder, builder.udiv(size_v, I64(64))) as loop:
            e.prefetch(e.at(pointer, builder.mul(loop.index, I64(64))), cache=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp), codegen


@intrinsic
def store(typingctx, array, index, vector):
    """Write 16 floats at element `index` of a float32 array."""

    def codegen(context, builder, sig, values):
        pointer = pointer_to(context, builder, sig.args[0], values[0], values[1])
        builder.store(values[2], builder.bitcast(pointer, F32X16.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def get(typingctx, array, index):
    """The element at `index` in memory order, whatever the dimensions of the array."""

    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        return builder.load(builder.gep(data, [values[1]]))

    return array.dtype(array, types.intp), codegen


@intrinsic
def put(typingctx, array, index, value):
    """Write the element at `index` in memory order."""

    def codegen(context, builder, sig, values):
        data = context.make_array(sig.args[0])(context, builder, values[0]).data
        builder.store(values[2], builder.gep(data, [values[1]]))
        return context.get_dummy_value()

    return types.void(array, types.intp, array.dtype), codegen


@intrinsic
def ask_ahead(typingctx, array, index):
    """Ask for the cache line that holds element `index`, which may lie anywhere."""

    def codegen(context, builder, sig, values):
        Emitter(builder).prefetch(pointer_to(context, builder, sig.args[0], *values))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def load_half(typingctx, array, index):
    """16 half-precision numbers from element `index` of a uint16 array, as floats."""

    def codegen(context, builder, sig, values):
        e = Emitter(builder)
        return e.join(e.load_half(pointer_to(context, builder, sig.args[0], *values)))

    return f32x16(array, types.intp), codegen


def _rounded(b: ir.IRBuilder, x: Value) -> Value:
    """Nearest integers (ties to even) as i32 lanes, for floats within ±2^22; what a NaN becomes is not defined."""
    if LEVEL.name == "neon":  # which rounds and converts slowly: adding SMALL leaves the integer in the last bits
        bits = b.bitcast(b.fadd(x, _constant(SMALL)), I32X16)
        return b.sub(bits, _constant(SMALL_BITS, I32X16))
    return b.fptosi(_call(b, "llvm.rint", x), I32X16)


def _int_sum(b: ir.IRBuilder, x: Value) -> Value:
    return b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, [I32X16]), "llvm.vector.reduce.add.v16i32"), [x])


def _store_words(e: Emitter, vector: Value, word: ir.IntType, pointer: Value, step: Value) -> None:
    """Each `word` of the vector's bits at its own address, `step` bytes apart."""
    count = vector.type.count * vector.type.element.width // word.width
    words = e.b.bitcast(vector, ir.VectorType(word, count))
    for i in range(count):
        target = e.b.bitcast(e.at(pointer, e.b.mul(step, I64(i))), word.as_pointer())
        e.b.store(e.b.extract_element(words, I32(i)), target, align=1)


@intrinsic
def store_cells(typingctx, array, index, step, vector):
    """Round 16 floats within ±127 to the nearest even integer and write them as four cells of 4 bytes, `step` bytes apart.
    Returns their sum (int32)."""

    def codegen(context, builder, sig, values):
        array_v, index_v, step_v, vector_v = values
        rounded = _rounded(builder, vector_v)
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        _store_words(Emitter(builder), builder.trunc(rounded, ir.VectorType(I8, LANES)), I32, pointer, step_v)
        return _int_sum(builder, rounded)

    return types.int32(array, types.intp, types.intp, f32x16), codegen


@intrinsic
def store_two_pieces(typingctx, array, index, step, vector, sums, sums_at):
    """Round 16 floats within ±16319 to integers n = 128·high + low, low in −64…63 (or, for n ≥ 0 and up to 16383, low in 0…127 when
    `sums` is None), and write four cells of 8 bytes (4 high, 4 low), `step` bytes apart. Adds the sums of both pieces to sums[sums_at],
    sums[sums_at + 1]. Where the level has words, the cells are 4 words n, and the sums stay as they are."""
    signed = sums is not types.none

    def codegen(context, builder, sig, values):
        array_v, index_v, step_v, vector_v, sums_v, sums_at_v = values
        if LEVEL.words:
            pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
            _store_words(Emitter(builder), _words(builder, vector_v), I64, pointer, step_v)
            return context.get_dummy_value()
        high, low = _pieces(builder, vector_v, signed)
        bytes_type = ir.VectorType(I8, LANES)
        order = [i for cell in range(4) for i in (*range(4 * cell, 4 * cell + 4), *range(16 + 4 * cell, 20 + 4 * cell))]
        pair = builder.shuffle_vector(
            builder.trunc(high, bytes_type), builder.trunc(low, bytes_type), ir.Constant(ir.VectorType(I32, 32), order)
        )
        _store_words(Emitter(builder), pair, I64, pointer_to(context, builder, sig.args[0], array_v, index_v), step_v)
        if signed:
            _add_sums(context, builder, sig.args[4], sums_v, sums_at_v, (high, low))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, f32x16, sums, types.intp), codegen


def _pieces(b: ir.IRBuilder, x: Value, signed: bool) -> tuple[Value, Value]:
    n = _words(b, x)
    half = _constant(64 if signed else 0, I16X16)
    high = b.ashr(b.add(n, half), _constant(7, I16X16))
    return high, b.sub(n, b.shl(high, _constant(7, I16X16)))


def _add_sums(context: Any, b: ir.IRBuilder, sums_type: Any, sums: Value, at: Value, pieces: tuple[Value, ...]) -> None:
    pointer = b.bitcast(pointer_to(context, b, sums_type, sums, at), I32.as_pointer())
    for i, piece in enumerate(pieces):
        slot = b.gep(pointer, [I64(i)])
        b.store(b.add(b.load(slot), _int_sum(b, b.sext(piece, I32X16))), slot)


@intrinsic
def store_pieces(typingctx, array, index, vector, sums, sums_at):
    """Round 16 floats within ±16319 (0 … 16383 when `sums` is None) to integers n = 128·high + low as store_two_pieces does, and write the
    16 high bytes, then the 16 low ones, at `index`."""
    signed = sums is not types.none

    def codegen(context, builder, sig, values):
        array_v, index_v, vector_v, sums_v, sums_at_v = values
        high, low = _pieces(builder, vector_v, signed)
        both = builder.shuffle_vector(high, low, ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES))))
        pieces = builder.trunc(both, ir.VectorType(I8, 2 * LANES))
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        builder.store(pieces, builder.bitcast(pointer, pieces.type.as_pointer()), align=1)
        if signed:
            _add_sums(context, builder, sig.args[3], sums_v, sums_at_v, (high, low))
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16, sums, types.intp), codegen


@intrinsic
def store_words(typingctx, array, index, vector):
    """Round 16 floats to integers of 16 bits, in the 32 bytes at `index`."""

    def codegen(context, builder, sig, values):
        words = _words(builder, values[2])
        pointer = pointer_to(context, builder, sig.args[0], values[0], values[1])
        builder.store(words, builder.bitcast(pointer, words.type.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


def _words(b: ir.IRBuilder, x: Value) -> Value:
    return b.trunc(_rounded(b, x), I16X16)


@intrinsic
def store_bytes(typingctx, array, index, vector):
    """Round 16 floats to the nearest even integer and write their low bytes at `index`."""

    def codegen(context, builder, sig, values):
        bytes_type = ir.VectorType(I8, LANES)
        pointer = builder.bitcast(pointer_to(context, builder, sig.args[0], values[0], values[1]), bytes_type.as_pointer())
        builder.store(builder.trunc(_rounded(builder, values[2]), bytes_type), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def store_eights(typingctx, array, index, step, vector):
    """Round 16 floats within ±127 to the nearest even integer and write them as two runs of 8 bytes, `step` bytes apart."""

    def codegen(context, builder, sig, values):
        array_v, index_v, step_v, vector_v = values
        rounded = builder.trunc(_rounded(builder, vector_v), ir.VectorType(I8, LANES))
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        _store_words(Emitter(builder), rounded, I64, pointer, step_v)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, f32x16), codegen


@intrinsic
def store_shorts(typingctx, array, index, vector):
    """Round 16 floats within ±32767 to the nearest even integer and write them at `index` of an int16 array."""

    def codegen(context, builder, sig, values):
        shorts = I16X16
        pointer = builder.bitcast(pointer_to(context, builder, sig.args[0], values[0], values[1]), shorts.as_pointer())
        builder.store(builder.trunc(_rounded(builder, values[2]), shorts), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def store_half(typingctx, array, index, vector):
    """Write 16 floats in half precision at `index` of a uint16 array, rounded to nearest even; beyond its range becomes infinite."""

    def codegen(context, builder, sig, values):
        half_type = I16X16
        pointer = builder.bitcast(pointer_to(context, builder, sig.args[0], values[0], values[1]), half_type.as_pointer())
        builder.store(_to_half(builder, values[2]), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


def _to_half(b: ir.IRBuilder, x: Value) -> Value:
    """Bits of half precision, i16 lanes. In integers, so that no level depends on an instruction for it."""
    c = lambda value: _constant(value, I32X16)  # noqa: E731
    bits = b.bitcast(x, I32X16)
    sign = b.and_(b.lshr(bits, c(16)), c(0x8000))
    magnitude = b.and_(bits, c(0x7FFFFFFF))
    odd = b.and_(b.lshr(magnitude, c(13)), c(1))
    normal = b.lshr(b.sub(b.add(magnitude, b.add(c(0xFFF), odd)), c(112 << 23)), c(13))
    # below 2^-14: adding 1/2 leaves the nearest multiple of 2^-24 in the low bits
    shifted = b.fadd(b.bitcast(magnitude, F32X16), _constant(0.5))
    small = b.sub(b.bitcast(shifted, I32X16), c(0x3F000000))
    value = b.select(b.icmp_unsigned("<", magnitude, c(113 << 23)), small, normal)
    value = b.select(b.icmp_unsigned(">=", magnitude, c(0x477FF000)), c(0x7C00), value)
    value = b.select(b.icmp_unsigned(">", magnitude, c(0x7F800000)), c(0x7E00), value)
    return b.trunc(b.or_(value, sign), I16X16)


@intrinsic
def lane(typingctx, vector, index):
    """One lane of a vector."""

    def codegen(context, builder, sig, values):
        return builder.extract_element(values[0], builder.trunc(values[1], I32))

    return types.float32(f32x16, types.intp), codegen


# ---- arithmetic -----------------------------------------------------------------------------------------------------------
@_operation(f32x16, types.float32)
def splat(b, scalar):
    """The scalar in all 16 lanes."""
    return _splat(b, scalar)


@_operation(f32x16, f32x16, f32x16)
def add(b, x, y):
    return b.fadd(x, y)


@_operation(f32x16, f32x16, f32x16)
def sub(b, x, y):
    return b.fsub(x, y)


@_operation(f32x16, f32x16, f32x16)
def mul(b, x, y):
    return b.fmul(x, y)


@_operation(f32x16, f32x16, f32x16)
def div(b, x, y):
    return b.fdiv(x, y)


def _fma(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    return _call(b, "llvm.fma", x, y, z)


@_operation(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x·y + z, rounded once."""
    return _fma(b, x, y, z)


@_operation(f32x16, f32x16)
def absolute(b, x):
    return _call(b, "llvm.fabs", x)


@_operation(f32x16, f32x16)
def nearest(b, x):
    """The nearest integer, ties to even."""
    return _call(b, "llvm.rint", x)


def _maximum(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    # written out: llvm.maximum is slow where there is no instruction for it, and a NaN in either must win
    either = b.select(b.fcmp_ordered(">", x, y), x, y)  # y when unordered
    return b.select(b.fcmp_unordered("uno", x, x), x, either)


@_operation(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    """The larger of each pair; NaN if either is NaN."""
    return _maximum(b, x, y)


@_operation(f32x16, f32x16, types.intp, f32x16)
def first_lanes(b, x, count, other):
    """Lanes below `count` from x, the others from `other` (a select: what x holds there does not matter)."""
    lanes = ir.Constant(I32X16, list(range(LANES)))
    keep = b.icmp_signed("<", lanes, _splat(b, b.trunc(count, I32), I32X16))
    return b.select(keep, x, other)


@_operation(f32x16, f32x16, types.intp, types.intp, f32x16)
def kept_lanes(b, x, mask, count, other):
    """Lanes below `count` whose bit of `mask` is set from x, the others from `other` (a select, as in first_lanes)."""
    lanes = ir.Constant(I32X16, list(range(LANES)))
    bits = b.and_(b.lshr(_splat(b, b.trunc(mask, I32), I32X16), lanes), _constant(1, I32X16))
    keep = b.and_(b.icmp_signed("<", lanes, _splat(b, b.trunc(count, I32), I32X16)), b.icmp_signed("!=", bits, _constant(0, I32X16)))
    return b.select(keep, x, other)


@_operation(f32x16, f32x16, f32x16, f32x16)
def where_zero(b, x, then, other):
    """`then` in the lanes where x is 0, `other` in the rest, those where x is NaN among them."""
    return b.select(b.fcmp_ordered("==", x, _constant(0.0)), then, other)


@_operation(f32x16, f32x16, f32x16)
def larger(b, x, y):
    """The larger of each pair; y when they cannot be compared. One instruction, where `maximum` takes three."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@_operation(f32x16, f32x16, f32x16)
def minimum(b, x, y):
    """The smaller of each pair; y when they cannot be compared."""
    return b.select(b.fcmp_ordered("<", x, y), x, y)


def _fold(b: ir.IRBuilder, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
    """Combine halves until one lane is left: the same tree on every level."""
    half = LANES // 2
    while half:
        low = b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, half), list(range(half))))
        high = b.shuffle_vector(x, x, ir.Constant(ir.VectorType(I32, half), list(range(half, 2 * half))))
        x, half = combine(low, high), half // 2
    return b.extract_element(x, I32(0))


@_operation(types.float32, f32x16)
def lane_sum(b, x):
    return _fold(b, x, b.fadd)


@_operation(types.float32, f32x16)
def lane_max(b, x):
    """The largest lane; NaN if any lane is NaN."""
    return _fold(b, x, lambda low, high: _maximum(b, low, high))


@_operation(types.float32, f32x16)
def lane_max_of_numbers(b, x):
    """The largest lane, when none is NaN (or some lane then)."""
    return _fold(b, x, lambda low, high: b.select(b.fcmp_ordered(">", low, high), low, high))


# ---- exp ------------------------------------------------------------------------------------------------------------------
LOG2_E = 1.4426950408889634
LN2_HIGH, LN2_LOW = 0.693359375, -2.12194440e-4
ROUNDER = 12582912.0  # 1.5·2^23: adding it leaves the nearest integer in the low bits
LOWEST, HIGHEST = -87.3, 88.3
# exp(r) on |r| ≤ ln2/2 as 1 + r + r²·(…): Taylor coefficients 1/7! … 1/2!, enough for float32
COEFFICIENTS = (1 / 5040, 1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2)


@_operation(f32x16, f32x16)
def exp(b, x):
    """e^x within 2 units in the last place; 0 below -87.3, capped at e^88.3; NaN stays NaN."""
    tiny = b.fcmp_ordered("<", x, _constant(LOWEST))
    x = b.select(tiny, _constant(LOWEST), x)
    x = b.select(b.fcmp_ordered(">", x, _constant(HIGHEST)), _constant(HIGHEST), x)
    shifted = _fma(b, x, _constant(LOG2_E), _constant(ROUNDER))
    n = b.fsub(shifted, _constant(ROUNDER))
    r = _fma(b, n, _constant(-LN2_HIGH), x)
    r = _fma(b, n, _constant(-LN2_LOW), r)
    poly = _constant(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        poly = _fma(b, poly, r, _constant(coefficient))
    poly = _fma(b, b.fmul(r, r), poly, b.fadd(r, _constant(1.0)))
    exponent = b.shl(b.bitcast(shifted, I32X16), _constant(23, I32X16))  # n moved into the exponent field
    power = b.bitcast(b.add(exponent, _constant(0x3F800000, I32X16)), F32X16)
    return b.select(tiny, _constant(0.0), b.fmul(poly, power))


# ---- a rough exp ----------------------------------------------------------------------------------------------------------
# A float's bits, read as an integer, are about 2^23·(log2 x + 127): the line between two powers of two lies up to 6 % above 2^x. Lowered
# so that it errs by as much either way.
BITS_PER_E = 2.0**23 / math.log(2.0)
BITS_OF_ONE = 2.0**23 * (127 - 0.0430)


@_operation(f32x16, f32x16)
def rough_exp(b, x):
    """e^x within 3 %, for x ≤ 0; 0 below about -87 and for NaN."""
    bits = _fma(b, x, _constant(BITS_PER_E), _constant(BITS_OF_ONE))
    positive = b.select(b.fcmp_ordered(">", bits, _constant(0.0)), bits, _constant(0.0))
    return b.bitcast(b.fptosi(positive, I32X16), F32X16)
