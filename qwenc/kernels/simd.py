"""Sixteen floats in a register: what kernels written in Python use between the emitted tiles.

Every operation is one IEEE operation per lane in a fixed order, so all SIMD levels give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from qwenc.kernels.simd_memory import (
    BYTE_NAN,
    BYTE_ONE,
    BYTE_SHIFT,
    ask_ahead,
    byte_floats,
    bytes_to_line,
    fetch,
    get,
    load,
    load_byte_floats,
    load_bytes,
    load_eights,
    load_half,
    load_nibbles,
    put,
    store,
    store_bytes,
    store_cells,
    store_eights,
    store_pieces,
    store_shorts,
    store_two_pieces,
)
from qwenc.kernels.vector import call, constant, f32x16, operation, splat_vector
from qwenc.kernels.wide import F32, F32X16, I32, I32X16, I64, LANES, Value

__all__ = [  # of simd_memory, to be had here too
    "ask_ahead",
    "bytes_to_line",
    "fetch",
    "get",
    "load",
    "load_byte_floats",
    "load_bytes",
    "load_eights",
    "load_half",
    "load_nibbles",
    "put",
    "store",
    "store_bytes",
    "store_cells",
    "store_eights",
    "store_pieces",
    "store_shorts",
    "store_two_pieces",
]


@intrinsic
def lane(typingctx, vector, index):
    """One lane of a vector."""

    def codegen(context, builder, sig, values):
        return builder.extract_element(values[0], builder.trunc(values[1], I32))

    return types.float32(f32x16, types.intp), codegen


# ---- arithmetic -----------------------------------------------------------------------------------------------------------
@operation(f32x16, types.float32)
def splat(b, scalar):
    """The scalar in all 16 lanes."""
    return splat_vector(b, scalar)


@operation(types.float32, types.int64)
def float_of_bits(b, bits):
    """The float that the lower 32 bits are."""
    return b.bitcast(b.trunc(bits, I32), F32)


@operation(types.float32, types.int64)
def byte_float(b, code):
    """What a code of 8 bits means: 5 bits of exponent and 3 of mantissa, (1 + mantissa/8)·2^(exponent − 18); 255 is NaN."""
    return byte_floats(b, b.trunc(code, I32))


@operation(types.int64, types.float32)
def byte_code(b, x):
    """The code of the float of a byte nearest to x ≥ 0; of NaN beyond its range, and of a NaN."""
    bits = b.and_(b.bitcast(x, I32), I32(0x7FFFFFFF))
    code = b.sub(b.lshr(b.add(bits, I32(1 << (BYTE_SHIFT - 1))), I32(BYTE_SHIFT)), I32(BYTE_ONE))
    code = b.select(b.icmp_signed(">", code, I32(0)), code, I32(0))
    return b.zext(b.select(b.icmp_signed("<", code, I32(BYTE_NAN)), code, I32(BYTE_NAN)), I64)


@operation(f32x16, f32x16, f32x16)
def add(b, x, y):
    return b.fadd(x, y)


@operation(f32x16, f32x16, f32x16)
def sub(b, x, y):
    return b.fsub(x, y)


@operation(f32x16, f32x16, f32x16)
def mul(b, x, y):
    return b.fmul(x, y)


@operation(f32x16, f32x16, f32x16)
def div(b, x, y):
    return b.fdiv(x, y)


def _fma(b: ir.IRBuilder, x: Value, y: Value, z: Value) -> Value:
    return call(b, "llvm.fma", x, y, z)


@operation(f32x16, f32x16, f32x16, f32x16)
def fma(b, x, y, z):
    """x·y + z, rounded once."""
    return _fma(b, x, y, z)


@operation(f32x16, f32x16)
def absolute(b, x):
    return call(b, "llvm.fabs", x)


@operation(f32x16, f32x16)
def nearest(b, x):
    """The nearest integer, ties to even."""
    return call(b, "llvm.rint", x)


def _maximum(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    # written out: llvm.maximum is slow where there is no instruction for it, and a NaN in either must win
    either = b.select(b.fcmp_ordered(">", x, y), x, y)  # y when unordered
    return b.select(b.fcmp_unordered("uno", x, x), x, either)


@operation(f32x16, f32x16, f32x16)
def maximum(b, x, y):
    """The larger of each pair; NaN if either is NaN."""
    return _maximum(b, x, y)


@operation(f32x16, f32x16, types.intp, f32x16)
def first_lanes(b, x, count, other):
    """Lanes below `count` from x, the others from `other` (a select: what x holds there does not matter)."""
    return b.select(_lanes_below(b, count), x, other)


def _lanes_below(b: ir.IRBuilder, count: Value) -> Value:
    return b.icmp_signed("<", _indices(list(range(LANES))), splat_vector(b, b.trunc(count, I32), I32X16))


@operation(f32x16, f32x16, types.intp, types.intp, f32x16)
def kept_lanes(b, x, mask, count, other):
    """Lanes below `count` whose bit of `mask` is set from x, the others from `other` (a select, as in first_lanes)."""
    lanes = ir.Constant(I32X16, list(range(LANES)))
    bits = b.and_(b.lshr(splat_vector(b, b.trunc(mask, I32), I32X16), lanes), constant(1, I32X16))
    keep = b.and_(_lanes_below(b, count), b.icmp_signed("!=", bits, constant(0, I32X16)))
    return b.select(keep, x, other)


@operation(f32x16, f32x16, f32x16, f32x16)
def where_zero(b, x, then, other):
    """`then` in the lanes where x is 0, `other` in the rest, those where x is NaN among them."""
    return b.select(b.fcmp_ordered("==", x, constant(0.0)), then, other)


@operation(f32x16, f32x16, f32x16, f32x16, f32x16)
def where_from(b, x, limit, then, other):
    """`then` in the lanes where x is at least `limit`, `other` in the rest, those where x is NaN among them."""
    return b.select(b.fcmp_ordered(">=", x, limit), then, other)


@operation(f32x16, f32x16, f32x16, f32x16, types.intp)
def count_from(b, number, x, limit, count):
    """`number` (integers, begun with 0.0), one more in those lanes below `count` in which x is at least `limit`."""
    more = b.zext(b.and_(_lanes_below(b, count), b.fcmp_ordered(">=", x, limit)), I32X16)
    return b.bitcast(b.add(b.bitcast(number, I32X16), more), F32X16)


@operation(types.int64, f32x16)
def lane_count(b, number):
    """The sum of what count_from counted."""
    return b.sext(_fold(b, b.bitcast(number, I32X16), b.add), I64)


@operation(f32x16, f32x16, f32x16)
def larger(b, x, y):
    """The larger of each pair; y when they cannot be compared. One instruction, where `maximum` takes three."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


@operation(f32x16, f32x16, f32x16)
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


@operation(types.float32, f32x16)
def lane_sum(b, x):
    return _fold(b, x, b.fadd)


@operation(f32x16, *[f32x16] * 8)
def sums_of_eight(b, *vectors):
    """The sum of the lanes of each of eight vectors, in lanes 0 … 7; the others are 0."""
    fours = [_in_fours(b, _in_twos(b, *vectors[i : i + 2]), _in_twos(b, *vectors[i + 2 : i + 4])) for i in (0, 4)]
    halves = b.fadd(*(b.shuffle_vector(*fours, _indices([*range(at, at + 8), *range(at + 16, at + 24)])) for at in (0, 8)))
    zero = constant(0.0)
    return b.fadd(
        *(b.shuffle_vector(halves, zero, _indices([*range(at, at + 4), *range(at + 8, at + 12), *range(16, 24)])) for at in (0, 4))
    )


def _in_twos(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    """Sums of two lanes each: of x, of y, of x, of y in every four lanes."""
    return b.fadd(*(b.shuffle_vector(x, y, _indices([i for g in range(at, 16, 4) for i in (g, 16 + g, g + 1, 17 + g)])) for at in (0, 2)))


def _in_fours(b: ir.IRBuilder, x: Value, y: Value) -> Value:
    """The same once more."""
    return b.fadd(*(b.shuffle_vector(x, y, _indices([i for g in range(at, 16, 4) for i in (g, g + 1, 16 + g, 17 + g)])) for at in (0, 2)))


def _indices(lanes: list[int]) -> ir.Constant:
    return ir.Constant(I32X16, lanes)


@operation(types.float32, f32x16)
def lane_max(b, x):
    """The largest lane; NaN if any lane is NaN."""
    return _fold(b, x, lambda low, high: _maximum(b, low, high))


@operation(types.float32, f32x16)
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


@operation(f32x16, f32x16)
def exp(b, x):
    """e^x within 2 units in the last place; 0 below -87.3, capped at e^88.3; NaN stays NaN."""
    tiny = b.fcmp_ordered("<", x, constant(LOWEST))
    x = b.select(tiny, constant(LOWEST), x)
    x = b.select(b.fcmp_ordered(">", x, constant(HIGHEST)), constant(HIGHEST), x)
    shifted = _fma(b, x, constant(LOG2_E), constant(ROUNDER))
    n = b.fsub(shifted, constant(ROUNDER))
    r = _fma(b, n, constant(-LN2_HIGH), x)
    r = _fma(b, n, constant(-LN2_LOW), r)
    poly = constant(COEFFICIENTS[0])
    for coefficient in COEFFICIENTS[1:]:
        poly = _fma(b, poly, r, constant(coefficient))
    poly = _fma(b, b.fmul(r, r), poly, b.fadd(r, constant(1.0)))
    exponent = b.shl(b.bitcast(shifted, I32X16), constant(23, I32X16))  # n moved into the exponent field
    power = b.bitcast(b.add(exponent, constant(0x3F800000, I32X16)), F32X16)
    return b.select(tiny, constant(0.0), b.fmul(poly, power))


# ---- a rough exp ----------------------------------------------------------------------------------------------------------
# A float's bits, read as an integer, are about 2^23·(log2 x + 127): the line between two powers of two lies up to 6 % above 2^x. Lowered
# so that it errs by as much either way.
BITS_PER_E = 2.0**23 / math.log(2.0)
BITS_OF_ONE = 2.0**23 * (127 - 0.0430)


@operation(f32x16, types.float32)
def rough_start(b, top):
    """What rough_exp begins with for e^(x − top)."""
    top = splat_vector(b, top)
    return _fma(b, top, constant(-BITS_PER_E), constant(BITS_OF_ONE))


@operation(f32x16, f32x16, f32x16)
def rough_exp(b, x, start):
    """e^(x − top) within 3 %, for x ≤ top and rough_start(top); 0 below about top − 87 and for NaN."""
    bits = _fma(b, x, constant(BITS_PER_E), start)
    positive = b.select(b.fcmp_ordered(">", bits, constant(0.0)), bits, constant(0.0))
    return b.bitcast(b.fptosi(positive, I32X16), F32X16)
