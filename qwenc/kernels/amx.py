"""Matrices in prefill by AMX: 16 rows × 16 tokens × 32 inputs are one instruction.

The sums of a group of 32 are the same integers as everywhere else, and are scaled and added in the same order: the bits do not change.
Tile registers: 0 and 1 hold sums, 2 activations [16 tokens][32 inputs], 3 weights [8 cells][16 rows][4 inputs] as they are packed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwenc.kernels.emit import Emitter, two_pieces
from qwenc.kernels.linear_tiles import GROUP
from qwenc.kernels.vector import pointer_to
from qwenc.kernels.wide import I8, I64, LANES, Accumulators, Value, Wide

TOKENS = 16
SUMS, LOW_SUMS, INPUTS, WEIGHTS = range(4)
SUM_BYTES = 4 * LANES * TOKENS
GROUP_BYTES = LANES * GROUP  # of weights


def make_linear_tiles(pieces: int) -> Any:
    """tile(codes, codes_at, scales, scales_at, x, xs, tile_at, groups, out, out_at): 16 rows × 16 tokens, as make_linear of
    linear_tiles.py, but that codes are signed bytes [groups][8 cells][16 rows][4] and x int8 [tile][groups][pieces][16 tokens][32]."""

    @intrinsic
    def tile(typingctx, codes, codes_at, scales, scales_at, x, xs, tile_at, groups, out, out_at):
        def codegen(context, builder, sig, values):
            codes_v, codes_at_v, scales_v, scales_at_v, x_v, xs_v, tile_v, groups_v, out_v, out_at_v = values
            e = Emitter(builder)
            first = builder.mul(builder.mul(tile_v, groups_v), I64(TOKENS))
            bases = {
                "codes": (pointer_to(context, builder, sig.args[0], codes_v, codes_at_v), GROUP_BYTES),
                "scales": (pointer_to(context, builder, sig.args[2], scales_v, scales_at_v), 2 * LANES),
                "x": (pointer_to(context, builder, sig.args[4], x_v, builder.mul(first, I64(GROUP * pieces))), TOKENS * GROUP * pieces),
                "xs": (pointer_to(context, builder, sig.args[5], xs_v, first), 4 * TOKENS),
            }
            _configure(e)
            rooms = [_room(builder, SUM_BYTES * pieces) for _ in range(2)]
            sums = Accumulators(e, e.f32, TOKENS)

            def one_group(group: Value, room: Value) -> None:
                at = {name: e.at(base, builder.mul(group, I64(step))) for name, (base, step) in bases.items()}
                _sum_group(e, at["codes"], at["x"], room, pieces)
                weight_scale = e.load_half(at["scales"])
                for t in range(TOKENS):
                    scaled = e.each(builder.fmul, e.to_float(_sums_of(e, room, t, pieces)), e.load_splat(at["xs"], 4 * t, e.f32))
                    sums.set(t, e.fma(scaled, weight_scale, sums.get(t)))

            # two at a time, each with a room of its own, so that one is multiplied while the other is scaled
            with cgutils.for_range(builder, builder.lshr(groups_v, I64(1))) as loop:
                for i, room in enumerate(rooms):
                    one_group(builder.add(builder.mul(loop.index, I64(2)), I64(i)), room)
            with builder.if_then(builder.trunc(groups_v, ir.IntType(1))):
                one_group(builder.sub(groups_v, I64(1)), rooms[0])
            out_p = pointer_to(context, builder, sig.args[8], out_v, out_at_v)
            for t in range(TOKENS):
                e.store(sums.get(t), out_p, 4 * LANES * t)
            return context.get_dummy_value()

        at = types.intp
        return types.void(codes, at, scales, at, x, xs, at, at, out, at), codegen

    return tile


def _sum_group(e: Emitter, codes: Value, x: Value, room: Value, pieces: int) -> None:
    """The sums of one group to `room`, int32 [pieces][16 tokens][16 rows]."""
    _call(e, "tileloadd64", WEIGHTS, codes, I64(4 * LANES))
    for piece, sums in enumerate((SUMS, LOW_SUMS)[:pieces]):
        _call(e, "tileloadd64", INPUTS, e.at(x, piece * TOKENS * GROUP), I64(GROUP))
        _call(e, "tilezero", sums)
        _call(e, "tdpbssd", sums, INPUTS, WEIGHTS)
        _call(e, "tilestored64", sums, e.at(room, piece * SUM_BYTES), I64(4 * LANES))


def _sums_of(e: Emitter, room: Value, token: int, pieces: int) -> Wide:
    of_pieces = [e.load(room, e.i32, piece * SUM_BYTES + 4 * LANES * token) for piece in range(pieces)]
    return two_pieces(e, *of_pieces) if pieces == 2 else of_pieces[0]


def _configure(e: Emitter) -> None:
    """Give the tile registers of this thread their shapes. It costs little beside a row tile, and no thread need be told ahead."""
    shape = np.zeros(64, np.uint8)
    shape[0] = 1  # the palette
    rows, row_bytes = shape[48:], shape[16:48].view(np.uint16)
    for register, (count, size) in {SUMS: (TOKENS, 64), LOW_SUMS: (TOKENS, 64), INPUTS: (TOKENS, GROUP), WEIGHTS: (GROUP // 4, 64)}.items():
        rows[register], row_bytes[register] = count, size
    kind = ir.ArrayType(I8, 64)
    value = ir.Constant(kind, [int(byte) for byte in shape])
    room = cgutils.alloca_once(e.b, kind)
    e.b.store(value, room)
    pointer = e.b.bitcast(room, I8.as_pointer())
    e.b.call(e._function("llvm.x86.ldtilecfg", ir.VoidType(), [I8.as_pointer()]), [pointer])


def _call(e: Emitter, name: str, *arguments: Any) -> None:
    """One instruction on tile registers, which are given by number."""
    values = [I8(argument) if isinstance(argument, int) else argument for argument in arguments]
    e.b.call(e._function(f"llvm.x86.{name}", ir.VoidType(), [value.type for value in values]), values)


def _room(builder: ir.IRBuilder, size: int) -> Value:
    room = cgutils.alloca_once(builder, ir.ArrayType(I8, size))
    room.align = 64
    return builder.bitcast(room, I8.as_pointer())


@intrinsic
def open_signed(typingctx, codes, codes_at, groups, room):
    """The 4-bit codes of a row tile, `groups` groups from codes[codes_at] on, less 8, to a byte each in room [groups][8 cells][64]."""

    def codegen(context, builder, sig, values):
        e = Emitter(builder)
        packed = pointer_to(context, builder, sig.args[0], values[0], values[1])
        opened = pointer_to(context, builder, sig.args[3], values[3], I64(0))
        eight = e.constant(e.i8, 8)
        with cgutils.for_range(builder, values[2]) as loop:
            source = e.at(packed, builder.mul(loop.index, I64(GROUP_BYTES // 2)))
            target = e.at(opened, builder.mul(loop.index, I64(GROUP_BYTES)))
            for cell in range(4):
                both = e.load(source, e.i8, 64 * cell)
                e.store(e.each(builder.sub, e.low_nibbles(both), eight), target, 64 * cell)
                e.store(e.each(builder.sub, e.high_nibbles(both), eight), target, 64 * (cell + 4))
        return context.get_dummy_value()

    return types.void(codes, types.intp, types.intp, room), codegen
