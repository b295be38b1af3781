"""Matrices in prefill by AMX: 16 rows × 16 tokens × 32 inputs are one instruction.

The sums of a group of 32 are the same integers as everywhere else, and are scaled and added in the same order: the bits do not change.
Groups take turns in two sets of tile registers, and a pair is scaled when the next has been multiplied: what was stored is loaded late.
Each set has sums of one or two pieces, activations [16 tokens][32 inputs] and weights [8 cells][16 rows][4 inputs] as they are packed.
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
SUMS, LOW_SUMS, INPUTS, WEIGHTS = range(4)  # registers of a set
SET = 4  # registers
SUM_BYTES = 4 * LANES * TOKENS
GROUP_BYTES = LANES * GROUP  # of weights
ROOMS = 4  # for the sums of groups: a pair is scaled while the next is multiplied


def make_linear_tiles(pieces: int) -> Any:
    """The tile of make_linear (linear_tiles.py) for 16 rows × 16 tokens, but that codes are signed bytes [groups][8 cells][16 rows][4], x
    is int8 [tile][groups][pieces][16 tokens][32], and xo is not looked at."""

    @intrinsic
    def tile(typingctx, codes, codes_at, scales, scales_at, x, xs, xo, tile_at, groups, out, out_at):
        def codegen(context, builder, sig, values):
            codes_v, codes_at_v, scales_v, scales_at_v, x_v, xs_v, _, tile_v, groups_v, out_v, out_at_v = values
            e = Emitter(builder)
            first = builder.mul(builder.mul(tile_v, groups_v), I64(TOKENS))
            bases = {
                "codes": (pointer_to(context, builder, sig.args[0], codes_v, codes_at_v), GROUP_BYTES),
                "scales": (pointer_to(context, builder, sig.args[2], scales_v, scales_at_v), 2 * LANES),
                "x": (pointer_to(context, builder, sig.args[4], x_v, builder.mul(first, I64(GROUP * pieces))), TOKENS * GROUP * pieces),
                "xs": (pointer_to(context, builder, sig.args[5], xs_v, first), 4 * TOKENS),
            }
            room = _room(builder, ROOMS * SUM_BYTES * pieces)
            sums = Accumulators(e, e.f32, TOKENS)

            def of_group(group: Value) -> dict[str, Value]:
                at = {name: e.at(base, builder.mul(group, I64(step))) for name, (base, step) in bases.items()}
                place = builder.and_(group, I64(ROOMS - 1))
                return at | {"room": e.at(room, builder.mul(place, I64(SUM_BYTES * pieces)))}

            def multiply(group: Value, turn: int) -> None:
                at = of_group(group)
                _sum_group(e, at["codes"], at["x"], at["room"], pieces, SET * turn)

            def scale(group: Value) -> None:
                at = of_group(group)
                weight_scale = e.load_half(at["scales"])
                for t in range(TOKENS):
                    scaled = e.each(builder.fmul, e.to_float(_sums_of(e, at["room"], t, pieces)), e.load_splat(at["xs"], 4 * t, e.f32))
                    sums.set(t, e.fma(scaled, weight_scale, sums.get(t)))

            # A tile that was stored is loaded late: it is scaled while the next ones are multiplied.
            pairs = builder.lshr(groups_v, I64(1))
            with builder.if_then(builder.icmp_signed(">", pairs, I64(0))):
                for turn in range(2):
                    multiply(I64(turn), turn)
                with cgutils.for_range(builder, builder.sub(pairs, I64(1))) as loop:
                    first_of_pair = builder.mul(loop.index, I64(2))
                    for turn in range(2):
                        multiply(builder.add(first_of_pair, I64(2 + turn)), turn)
                    for turn in range(2):
                        scale(builder.add(first_of_pair, I64(turn)))
                for turn in range(2):
                    scale(builder.add(builder.mul(pairs, I64(2)), I64(turn - 2)))
            with builder.if_then(builder.trunc(groups_v, ir.IntType(1))):
                last = builder.sub(groups_v, I64(1))
                multiply(last, 0)
                scale(last)
            out_p = pointer_to(context, builder, sig.args[9], out_v, out_at_v)
            for t in range(TOKENS):
                e.store(sums.get(t), out_p, 4 * LANES * t)
            return context.get_dummy_value()

        at = types.intp
        return types.void(codes, at, scales, at, x, xs, xo, at, at, out, at), codegen

    return tile


def _sum_group(e: Emitter, codes: Value, x: Value, room: Value, pieces: int, first: int) -> None:
    """The sums of one group to `room`, int32 [pieces][16 tokens][16 rows], in the set of registers that begins with `first`."""
    inputs, weights = INPUTS + first, WEIGHTS + first
    _call(e, "tileloadd64", weights, codes, I64(4 * LANES))
    for piece, sums in enumerate((SUMS + first, LOW_SUMS + first)[:pieces]):
        _call(e, "tileloadd64", inputs, e.at(x, piece * TOKENS * GROUP), I64(GROUP))
        _call(e, "tilezero", sums)
        _call(e, "tdpbssd", sums, inputs, weights)
        _call(e, "tilestored64", sums, e.at(room, piece * SUM_BYTES), I64(4 * LANES))


def _sums_of(e: Emitter, room: Value, token: int, pieces: int) -> Wide:
    of_pieces = [e.load(room, e.i32, piece * SUM_BYTES + 4 * LANES * token) for piece in range(pieces)]
    return two_pieces(e, *of_pieces) if pieces == 2 else of_pieces[0]


@intrinsic
def shape_tiles(typingctx):
    """Give the tile registers of this thread their shapes, which takes as long as ten groups."""
    shapes = np.zeros(64, np.uint8)  # as Intel's manual lays them out: palette 1, then bytes of a row and rows of each register
    shapes[0] = 1
    row_bytes, rows = shapes[16:48].view(np.uint16), shapes[48:]
    for register in range(2 * SET):
        rows[register] = GROUP // 4 if register % SET == WEIGHTS else TOKENS
        row_bytes[register] = GROUP if register % SET == INPUTS else 4 * LANES

    def codegen(context, builder, sig, values):
        e = Emitter(builder)
        room = _room(builder, 64)
        kind = ir.ArrayType(I8, 64)
        builder.store(ir.Constant(kind, [int(byte) for byte in shapes]), builder.bitcast(room, kind.as_pointer()))
        _call(e, "ldtilecfg", room)
        return context.get_dummy_value()

    return types.void(), codegen


def _call(e: Emitter, name: str, *arguments: Any) -> None:
    """One instruction on tile registers, which are given by number."""
    values = [I8(argument) if isinstance(argument, int) else argument for argument in arguments]
    function = cgutils.get_or_insert_function(
        e.b.module, ir.FunctionType(ir.VoidType(), [value.type for value in values]), f"llvm.x86.{name}"
    )
    e.b.call(function, values)


def _room(builder: ir.IRBuilder, size: int) -> Value:
    room = cgutils.alloca_once(builder, ir.ArrayType(I8, size))
    room.align = 64
    return builder.bitcast(room, I8.as_pointer())
