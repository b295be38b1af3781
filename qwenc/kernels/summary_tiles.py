"""The inner loops of block selection, written as SIMD instructions: a first look at 8 units of 32 keys, and a query made ready for their
2-bit plane."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwenc.kernels.emit import Emitter
from qwenc.kernels.vector import pointer_to
from qwenc.kernels.wide import F32, I32, I64, LANES, Accumulators, Value, Wide

UNITS_AT_ONCE = 8
F32X8 = ir.VectorType(F32, UNITS_AT_ONCE)


def make_look(rows: int) -> Any:
    """tile(centre, step, scale, page, chunks, q, a, sums, qs, row_at, mid, spread, tilt, out_at, out_step): the 8 units of a page against
    `rows` queries.

    centre int8 [chunks][8 units][8 dims], step 4 bits [chunks/2][8 units][8], dims 16j … 16j + 7 in the lower and the next 8 in the upper
    half of a byte; scale float32 [8 centres, 8 steps]; page: which of these; chunks = head_dim/8. q, a int8 [chunks][rows][8], from
    row_at·chunks·8 on: query and its magnitude in 8 bits; sums float32 [row][3]: the correction of q·centre, half of Σ|q| and half of Σq;
    qs float32 [row]:
    scale of q. Writes for each row at out_at + r·out_step + unit: mid = q·centre, spread = Σ|q|·step, tilt = Σ q·step, with step = (code +
    ½)·scale.
    """

    @intrinsic
    def tile(typingctx, centre, step, scale, page, chunks, q, a, sums, qs, row_at, mid, spread, tilt, out_at, out_step):
        def codegen(context, builder, sig, values):
            centre_v, step_v, scale_v, page_v, chunks_v, q_v, a_v, sums_v, qs_v, row_v, mid_v, spread_v, tilt_v, out_at_v, out_step_v = (
                values
            )
            e = Emitter(builder)
            b = builder
            pairs = b.sdiv(chunks_v, I64(2))
            centre_p = pointer_to(context, b, sig.args[0], centre_v, b.mul(b.mul(page_v, chunks_v), I64(64)))
            step_p = pointer_to(context, b, sig.args[1], step_v, b.mul(b.mul(page_v, pairs), I64(64)))
            q_at = b.mul(b.mul(row_v, chunks_v), I64(8))
            q_p = pointer_to(context, b, sig.args[5], q_v, q_at)
            a_p = pointer_to(context, b, sig.args[6], a_v, q_at)
            acc = Accumulators(e, e.i32, 3 * rows)

            def eight_bytes(pointer: Value, offset: Value) -> list[Value]:
                word = b.load(b.bitcast(e.at(pointer, offset), ir.IntType(64).as_pointer()), align=1)
                kind = ir.VectorType(ir.IntType(64), e.level.vector_bytes // 8)
                one = b.insert_element(ir.Constant(kind, ir.Undefined), word, I32(0))
                every = b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))
                return [b.bitcast(every, e.i8)] * e.parts

            with cgutils.for_range(b, pairs) as loop:
                steps = e.load(e.at(step_p, b.mul(loop.index, I64(64))), e.i8)
                for half, codes in enumerate((e.low_nibbles(steps), e.high_nibbles(steps))):
                    chunk = b.add(b.mul(loop.index, I64(2)), I64(half))
                    middle = e.prepare_signed(e.load(e.at(centre_p, b.mul(chunk, I64(64))), e.i8))
                    for r in range(rows):
                        offset = b.mul(b.add(b.mul(chunk, I64(rows)), I64(r)), I64(8))
                        query, magnitude = eight_bytes(q_p, offset), eight_bytes(a_p, offset)
                        acc.set(3 * r, e.dot_signed(acc.get(3 * r), middle, query))
                        acc.set(3 * r + 1, e.dot_small(acc.get(3 * r + 1), magnitude, codes))
                        acc.set(3 * r + 2, e.dot_small(acc.get(3 * r + 2), codes, query))
            scales = pointer_to(context, b, sig.args[2], scale_v, b.mul(page_v, I64(16)))
            load8 = lambda pointer: b.load(b.bitcast(pointer, F32X8.as_pointer()), align=1)  # noqa: E731
            centre_scale, step_scale = load8(scales), load8(e.at(scales, 32))
            qs_p = pointer_to(context, b, sig.args[8], qs_v, row_v)
            sums_p = pointer_to(context, b, sig.args[7], sums_v, b.mul(row_v, I64(3)))
            for r in range(rows):
                row_scale = _splat8(b, _load_float(b, e, qs_p, 4 * r))
                target = b.add(out_at_v, b.mul(out_step_v, I64(r)))
                outs = zip(((10, mid_v), (11, spread_v), (12, tilt_v)), (centre_scale, step_scale, step_scale), strict=True)
                for i, ((argument, array), unit_scale) in enumerate(outs):
                    dot = b.sitofp(_add_pairs(b, e.join(acc.get(3 * r + i))), F32X8)
                    whole = b.fadd(dot, _splat8(b, _load_float(b, e, sums_p, 4 * (3 * r + i))))
                    value = b.fmul(b.fmul(whole, unit_scale), row_scale)
                    out_p = pointer_to(context, b, sig.args[argument], array, target)
                    b.store(value, b.bitcast(out_p, F32X8.as_pointer()), align=1)
            return context.get_dummy_value()

        n = types.intp
        return types.void(centre, step, scale, n, n, q, a, sums, qs, n, mid, spread, tilt, n, n), codegen

    return tile


def _add_pairs(b: ir.IRBuilder, x: Value) -> Value:
    """Sums of neighbouring lanes of 16."""
    even, odd = (ir.Constant(ir.VectorType(I32, 8), list(range(first, LANES, 2))) for first in (0, 1))
    return b.add(b.shuffle_vector(x, x, even), b.shuffle_vector(x, x, odd))


def _load_float(b: ir.IRBuilder, e: Emitter, pointer: Value, offset: int) -> Value:
    return b.load(b.bitcast(e.at(pointer, offset), F32.as_pointer()), align=1)


def _splat8(b: ir.IRBuilder, scalar: Value) -> Value:
    one = b.insert_element(ir.Constant(F32X8, ir.Undefined), scalar, I32(0))
    return b.shuffle_vector(one, one, ir.Constant(ir.VectorType(I32, 8), [0] * 8))


@intrinsic
def fold_steps(typingctx, step, page, strips, q, row, out, out_at, strip_step):
    """out[out_at + strip·strip_step …] = q·(8·code + 4) / 2^15, rounded, as int8 [2][4][16]: a query times the steps of the 8 units of a
    page, the even ones first, 16 dimensions a strip. q int16 [rows][16·strips]."""

    def codegen(context, builder, sig, values):
        step_v, page_v, strips_v, q_v, row_v, out_v, out_at_v, strip_step_v = values
        e, b = Emitter(builder), builder
        step_p = pointer_to(context, b, sig.args[0], step_v, b.mul(b.mul(page_v, strips_v), I64(64)))
        q_p = pointer_to(context, b, sig.args[3], q_v, b.mul(b.mul(row_v, strips_v), I64(LANES)))
        out_p = pointer_to(context, b, sig.args[5], out_v, out_at_v)
        with cgutils.for_range(b, strips_v) as loop:
            codes = e.load(e.at(step_p, b.mul(loop.index, I64(64))), e.i8)
            factors = [_factors(e, codes, left) for left in (3, -1)]  # of dims 0 … 7 and of 8 … 15
            strip = e.at(q_p, b.mul(loop.index, I64(2 * LANES)))
            queries = [e.load_eight_words(strip, 2 * UNITS_AT_ONCE * half) for half in (0, 1)]
            target = e.at(out_p, b.mul(loop.index, strip_step_v))
            for odd in (0, 1):
                halves = [e.rounded_products(e.eights(f, odd), x) for f, x in zip(factors, queries, strict=True)]
                e.store(e.narrow(*halves), target, 64 * odd)
        return context.get_dummy_value()

    n = types.intp
    return types.void(step, n, n, q, n, out, n, n), codegen


def _factors(e: Emitter, codes: Wide, left: int) -> Wide:
    """8·code + 4, as bytes; left: by how much the codes are to be moved for it."""
    eightfold = e.each(e.b.and_, e.moved(codes, left), e.constant(e.i8, 15 << 3))
    return e.each(e.b.or_, eightfold, e.constant(e.i8, 4))
