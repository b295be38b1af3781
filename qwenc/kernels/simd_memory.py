"""Sixteen floats of a register to and from arrays: as they are, as half-precision numbers, and rounded to what the tiles read."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwenc.kernels.emit import Emitter
from qwenc.kernels.level import LEVEL
from qwenc.kernels.vector import constant, f32x16, pointer_to, rounded
from qwenc.kernels.wide import F32, F32X16, I8, I16X16, I32, I32X16, I64, LANES, Value

BYTE_SHIFT = 20  # bits of a float's mantissa that a float of a byte has not
BYTE_ONE = (127 - 18) << 3  # what its exponent lacks
BYTE_NAN = 255


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
def bytes_to_line(typingctx, array):
    """How many bytes after the beginning of an array the next cache line begins."""

    def codegen(context, builder, sig, values):
        address = builder.ptrtoint(pointer_to(context, builder, sig.args[0], values[0], I64(0)), I64)
        return builder.and_(builder.neg(address), I64(63))

    return types.intp(array), codegen


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


def _load_bytes(b: ir.IRBuilder, pointer: Value, count: int) -> Value:
    return b.load(b.bitcast(pointer, ir.VectorType(I8, count).as_pointer()), align=1)


def _side_by_side(b: ir.IRBuilder, first: Value, second: Value) -> Value:
    """Twice 8 lanes as 16."""
    return b.shuffle_vector(first, second, ir.Constant(I32X16, list(range(LANES))))


@intrinsic
def load_bytes(typingctx, array, index):
    """16 signed bytes from element `index` of an array, as floats."""

    def codegen(context, builder, sig, values):
        codes = _load_bytes(builder, pointer_to(context, builder, sig.args[0], *values), LANES)
        return builder.sitofp(builder.sext(codes, I32X16), F32X16)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_eights(typingctx, array, index, step):
    """Two runs of 8 signed bytes, `step` bytes apart, as floats."""

    def codegen(context, builder, sig, values):
        array_v, index_v, step_v = values
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        first, second = (_load_bytes(builder, p, 8) for p in (pointer, Emitter(builder).at(pointer, step_v)))
        return builder.sitofp(builder.sext(_side_by_side(builder, first, second), I32X16), F32X16)

    return f32x16(array, types.intp, types.intp), codegen


@intrinsic
def load_nibbles(typingctx, array, index):
    """The lower halves of 8 bytes from element `index` of an array, then the upper ones, as floats."""

    def codegen(context, builder, sig, values):
        codes = _load_bytes(builder, pointer_to(context, builder, sig.args[0], *values), 8)
        lower, upper = (ir.Constant(codes.type, [value] * 8) for value in (15, 4))
        both = _side_by_side(builder, builder.and_(codes, lower), builder.lshr(codes, upper))
        return builder.sitofp(builder.zext(both, I32X16), F32X16)

    return f32x16(array, types.intp), codegen


@intrinsic
def load_byte_floats(typingctx, array, index):
    """16 floats of a byte (simd.byte_float) from element `index` of a uint8 array."""

    def codegen(context, builder, sig, values):
        codes = _load_bytes(builder, pointer_to(context, builder, sig.args[0], *values), LANES)
        return byte_floats(builder, builder.zext(codes, I32X16))

    return f32x16(array, types.intp), codegen


def byte_floats(b: ir.IRBuilder, codes: Value) -> Value:
    """Codes (one or many, i32) of 5 bits of exponent and 3 of mantissa, (1 + mantissa/8)·2^(exponent − 18), as floats; 255 is NaN."""
    many = isinstance(codes.type, ir.VectorType)
    c = (lambda value: constant(value, I32X16)) if many else I32
    bits = b.shl(b.add(codes, c(BYTE_ONE)), c(BYTE_SHIFT))
    bits = b.select(b.icmp_unsigned("==", codes, c(BYTE_NAN)), c(0x7FC00000), bits)
    return b.bitcast(bits, F32X16 if many else F32)


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
        codes = rounded(builder, vector_v)
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        _store_words(Emitter(builder), builder.trunc(codes, ir.VectorType(I8, LANES)), I32, pointer, step_v)
        return _int_sum(builder, codes)

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
    half = constant(64 if signed else 0, I16X16)
    high = b.ashr(b.add(n, half), constant(7, I16X16))
    return high, b.sub(n, b.shl(high, constant(7, I16X16)))


def _add_sums(context: Any, b: ir.IRBuilder, sums_type: Any, sums: Value, at: Value, pieces: tuple[Value, ...]) -> None:
    pointer = b.bitcast(pointer_to(context, b, sums_type, sums, at), I32.as_pointer())
    for i, piece in enumerate(pieces):
        slot = b.gep(pointer, [I64(i)])
        b.store(b.add(b.load(slot), _int_sum(b, b.sext(piece, I32X16))), slot)


@intrinsic
def store_pieces(typingctx, array, index, step, vector, sums, sums_at):
    """Round 16 floats within ±16319 (0 … 16383 when `sums` is None) to integers n = 128·high + low as store_two_pieces does, and write the
    16 high bytes at `index` and the 16 low ones `step` bytes further."""
    signed = sums is not types.none

    def codegen(context, builder, sig, values):
        array_v, index_v, step_v, vector_v, sums_v, sums_at_v = values
        high, low = _pieces(builder, vector_v, signed)
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        for piece, target in ((high, pointer), (low, Emitter(builder).at(pointer, step_v))):
            codes = builder.trunc(piece, ir.VectorType(I8, LANES))
            builder.store(codes, builder.bitcast(target, codes.type.as_pointer()), align=1)
        if signed:
            _add_sums(context, builder, sig.args[4], sums_v, sums_at_v, (high, low))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, f32x16, sums, types.intp), codegen


def _words(b: ir.IRBuilder, x: Value) -> Value:
    return b.trunc(rounded(b, x), I16X16)


@intrinsic
def store_bytes(typingctx, array, index, vector):
    """Round 16 floats to the nearest even integer and write their low bytes at `index`."""

    def codegen(context, builder, sig, values):
        bytes_type = ir.VectorType(I8, LANES)
        pointer = builder.bitcast(pointer_to(context, builder, sig.args[0], values[0], values[1]), bytes_type.as_pointer())
        builder.store(builder.trunc(rounded(builder, values[2]), bytes_type), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen


@intrinsic
def store_eights(typingctx, array, index, step, vector):
    """Round 16 floats within ±127 to the nearest even integer and write them as two runs of 8 bytes, `step` bytes apart."""

    def codegen(context, builder, sig, values):
        array_v, index_v, step_v, vector_v = values
        codes = builder.trunc(rounded(builder, vector_v), ir.VectorType(I8, LANES))
        pointer = pointer_to(context, builder, sig.args[0], array_v, index_v)
        _store_words(Emitter(builder), codes, I64, pointer, step_v)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.intp, f32x16), codegen


@intrinsic
def store_shorts(typingctx, array, index, vector):
    """Round 16 floats within ±32767 to the nearest even integer and write them at `index` of an int16 array."""

    def codegen(context, builder, sig, values):
        shorts = I16X16
        pointer = builder.bitcast(pointer_to(context, builder, sig.args[0], values[0], values[1]), shorts.as_pointer())
        builder.store(builder.trunc(rounded(builder, values[2]), shorts), pointer, align=1)
        return context.get_dummy_value()

    return types.void(array, types.intp, f32x16), codegen
