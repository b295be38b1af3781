"""The inner loops of matrices, written as SIMD instructions: 16 matrix rows × T tokens.

Each `make_*` returns a Numba intrinsic for one tile size. Arguments named `*_at` are element indices in memory order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwenc.kernels.emit import Emitter, two_pieces
from qwenc.kernels.level import LEVEL, named_cpu
from qwenc.kernels.vector import pointer_to
from qwenc.kernels.wide import I64, LANES, Accumulators, Value, Wide

# Bytes of codes that one token's matrices are fetched ahead: a page, since the core's own prefetcher stops at the end of each. It makes
# decode 10 % quicker. Into which cache: Intel's cores read 8 to 11 % faster by way of the second (docs/benchmarks.md).
AHEAD = 4096
AHEAD_CACHE = 2 if LEVEL.x86 and not named_cpu().startswith("znver") else 1
GROUP = 32  # weights and activations that share a scale
PIECES_TOP = np.float32(16319.0)  # 128·127 + 63: the largest value in two signed pieces, 128·high + low


# ---- linear: y[t, row] = Σ_k w[row, k]·x[t, k] for 16 rows ------------------------------------------------------------------
def _linear_q4_group(e: Emitter, at: Callable[[str], Value], tokens: int) -> list[Wide]:
    """Sums of one group of 32, as floats: (code − 8)·x, by the offset −8·Σx that the activations carry."""
    return [total for which in e.batches(tokens) for total in _some_nibble_sums(e, at, tokens, which, _packed_nibbles)]


def _linear_open_group(e: Emitter, at: Callable[[str], Value], tokens: int) -> list[Wide]:
    """The same of codes that have a byte each."""
    return [total for which in e.batches(tokens) for total in _some_nibble_sums(e, at, tokens, which, _open_nibbles)]


def _packed_nibbles(e: Emitter, codes: Value) -> Iterator[tuple[int, Wide]]:
    """The cells of a group, 4 inputs of 16 rows, and their numbers."""
    for j in range(4):
        both = e.load(codes, e.i8, 64 * j)
        yield j, e.low_nibbles(both)
        yield j + 4, e.high_nibbles(both)


def _open_nibbles(e: Emitter, codes: Value) -> Iterator[tuple[int, Wide]]:
    for cell in range(8):
        yield cell, e.load(codes, e.i8, 64 * cell)


def _some_nibble_sums(
    e: Emitter,
    at: Callable[[str], Value],
    tokens: int,
    which: Sequence[int],
    cells_of: Callable[[Emitter, Value], Iterator[tuple[int, Wide]]],
) -> list[Wide]:
    """Those of the tokens `which`."""
    offsets = [e.small_start(e.load_splat(at("xo"), 4 * t, e.i32)) for t in which]
    acc = [e.nibble_start(offset) for offset in offsets]
    for cell, nibbles in cells_of(e, at("codes")):
        for i, t in enumerate(which):
            acc[i] = e.dot_nibbles(acc[i], nibbles, e.load_word(at("x"), cell * tokens + t, 8 * tokens, e.i8))
        acc = e.settle(acc)
    return [e.small_to_float(e.nibble_sum(a, offset)) for a, offset in zip(acc, offsets, strict=True)]


def _linear_q8_group(e: Emitter, at: Callable[[str], Value], tokens: int) -> list[Wide]:
    """Sums of one group of 32 signed codes, as floats."""
    return [e.small_to_float(total) for total in _linear_q8_sums(e, at, tokens, e.small_start)]


def _linear_q8_sums(e: Emitter, at: Callable[[str], Value], tokens: int, start: Callable[[Wide], Wide]) -> list[Wide]:
    """The same as integers, on top of start(0)."""
    return [total for which in e.batches(tokens) for total in _some_q8_sums(e, at, tokens, which, start)]


def _some_q8_sums(e: Emitter, at: Callable[[str], Value], tokens: int, which: Sequence[int], start: Callable[[Wide], Wide]) -> list[Wide]:
    """Those of the tokens `which`."""
    acc = []
    for t in which:
        if e.level.signed_bias:  # the carried offset is −8·Σx, wanted here is −bias·Σx
            offset = e.load_splat(at("xo"), 4 * t, e.i32)
            acc.append(start(e.each(e.b.mul, offset, e.constant(e.i32, e.level.signed_bias // 8))))
        else:
            acc.append(start(e.constant(e.i32, 0)))
    for j in range(8):
        codes = e.prepare_signed(e.load(at("codes"), e.i8, 64 * j))
        for i, t in enumerate(which):
            acc[i] = e.dot_signed(acc[i], codes, e.load_word(at("x"), j * tokens + t, 8 * tokens, e.i8))
        acc = e.settle(acc)
    return acc


def _linear_q8_fine_group(e: Emitter, at: Callable[[str], Value], tokens: int) -> list[Wide]:
    """The same for activations in two pieces: as if there were twice as many tokens, joined at the end. Or in words."""
    if e.level.words:
        return [e.to_float(total) for which in e.batches(tokens, halves=2) for total in _some_word_sums(e, at, tokens, which)]
    acc = _linear_q8_sums(e, at, 2 * tokens, lambda zero: zero)
    return [e.to_float(two_pieces(e, acc[2 * t], acc[2 * t + 1])) for t in range(tokens)]


def _some_word_sums(e: Emitter, at: Callable[[str], Value], tokens: int, which: Sequence[int]) -> list[Wide]:
    """The same as integers where activations are words, for the tokens `which`."""
    acc = [e.constant(e.i32, 0) * 2 for _ in which]
    for j in range(8):
        codes = e.load_words(at("codes"), 64 * j)
        for i, t in enumerate(which):
            acc[i] = e.dot_words(acc[i], codes, e.load_quad(at("x"), j * tokens + t))
        acc = e.settle(acc)
    return [e.word_sums(a) for a in acc]


# format -> bytes of a group of 16 rows × 32 inputs, pieces of an activation, sums of a group
QUANTISED = {
    "q4": (256, 1, _linear_q4_group),
    "open": (512, 1, _linear_open_group),
    "q8fast": (512, 1, _linear_q8_group),
    "q8": (512, 2, _linear_q8_fine_group),
}


def make_linear(fmt: str, tokens: int, ahead: int = 0) -> Any:
    """tile(codes, codes_at, scales, scales_at, x, xs, xo, tile_at, groups, out, out_at): 16 rows × `tokens` tokens.

    codes, scales: one row tile of the packed format (docs/architecture.md), `groups` groups of 32.
    x int8 [tile][groups][8 cells][tokens][pieces][4] (q8 where the level has words: int16
    [tile][groups][8 cells][tokens][4]), xs float32 [tile][groups][tokens], xo int32 (−8·Σx) [tile][groups][tokens][pieces];
    tile_at picks the token tile. Writes out[out_at + 16·t + row] (float32). ahead: bytes of codes to ask for ahead of those in use.
    """
    group_bytes, pieces, sum_group = QUANTISED[fmt]

    @intrinsic
    def tile(typingctx, codes, codes_at, scales, scales_at, x, xs, xo, tile_at, groups, out, out_at):
        def codegen(context, builder, sig, values):
            codes_v, codes_at_v, scales_v, scales_at_v, x_v, xs_v, xo_v, tile_v, groups_v, out_v, out_at_v = values
            e = Emitter(builder)
            first = builder.mul(builder.mul(tile_v, groups_v), I64(tokens))  # groups·tokens before this token tile
            bases = {
                "codes": (pointer_to(context, builder, sig.args[0], codes_v, codes_at_v), group_bytes),
                "scales": (pointer_to(context, builder, sig.args[2], scales_v, scales_at_v), 2 * LANES),
                "x": (pointer_to(context, builder, sig.args[4], x_v, builder.mul(first, I64(GROUP * pieces))), GROUP * tokens * pieces),
                "xs": (pointer_to(context, builder, sig.args[5], xs_v, first), 4 * tokens),
                "xo": (pointer_to(context, builder, sig.args[6], xo_v, builder.mul(first, I64(pieces))), 4 * tokens * pieces),
            }
            # the float sums stay in registers; of the integer sums only those of one native vector find room beside them
            slices = [(part, Accumulators(part, e.f32, tokens)) for part in e.singles()]
            with cgutils.for_range(builder, groups_v) as loop:
                e.spare_rbp()
                pointers = {name: e.at(base, builder.mul(loop.index, I64(step))) for name, (base, step) in bases.items()}
                if ahead:
                    for line in range(0, group_bytes, 64):
                        e.prefetch(e.at(pointers["codes"], ahead + line), cache=AHEAD_CACHE)
                    e.prefetch(e.at(pointers["scales"], ahead * 2 * LANES // group_bytes), cache=AHEAD_CACHE)
                for part, sums in slices:
                    group_sums = sum_group(part, pointers.__getitem__, tokens)
                    weight_scale = part.load_half(pointers["scales"])
                    for t in range(tokens):
                        scaled = part.each(builder.fmul, group_sums[t], part.load_word(pointers["xs"], t, tokens, e.f32))
                        sums.set(t, part.fma(scaled, weight_scale, sums.get(t)))
            out_p = pointer_to(context, builder, sig.args[9], out_v, out_at_v)
            for part, sums in slices:
                for t in range(tokens):
                    part.store(sums.get(t), out_p, 4 * LANES * t)
            return context.get_dummy_value()

        at = types.intp
        return types.void(codes, at, scales, at, x, xs, xo, at, at, out, at), codegen

    return tile


def make_opener(less: int) -> Any:
    """open(codes, codes_at, groups, room, room_at): the 4-bit codes of a row tile, `groups` groups from codes[codes_at] on, less `less`, to
    a byte each in room uint8 [groups][8 cells][64] from room_at on."""

    @intrinsic
    def open_codes(typingctx, codes, codes_at, groups, room, room_at):
        def codegen(context, builder, sig, values):
            e = Emitter(builder)
            packed = pointer_to(context, builder, sig.args[0], values[0], values[1])
            opened = pointer_to(context, builder, sig.args[3], values[3], values[4])
            offset = e.constant(e.i8, less)
            with cgutils.for_range(builder, values[2]) as loop:
                target = e.at(opened, builder.mul(loop.index, I64(512)))
                for cell, nibbles in _packed_nibbles(e, e.at(packed, builder.mul(loop.index, I64(256)))):
                    e.store(e.each(builder.sub, nibbles, offset), target, 64 * cell)
            return context.get_dummy_value()

        return types.void(codes, types.intp, types.intp, room, types.intp), codegen

    return open_codes


def make_linear_f32(tokens: int) -> Any:
    """tile(values, values_at, x, tile_at, inputs, out, out_at): the float32 sibling. values [inputs][16], x [tile][inputs][tokens];
    inputs is a multiple of 4. One token sums in four chains, so that latency does not bound it."""
    chains = 4 if tokens == 1 else 1

    @intrinsic
    def tile(typingctx, values, values_at, x, tile_at, inputs, out, out_at):
        def codegen(context, builder, sig, args):
            values_v, values_at_v, x_v, tile_v, inputs_v, out_v, out_at_v = args
            e = Emitter(builder)
            weights = pointer_to(context, builder, sig.args[0], values_v, values_at_v)
            xs = pointer_to(context, builder, sig.args[2], x_v, builder.mul(builder.mul(tile_v, inputs_v), I64(tokens)))
            sums = Accumulators(e, e.f32, tokens * chains)
            with cgutils.for_range(builder, builder.sdiv(inputs_v, I64(4))) as loop:
                e.spare_rbp()
                w_p = e.at(weights, builder.mul(loop.index, I64(4 * 4 * LANES)))
                x_p = e.at(xs, builder.mul(loop.index, I64(4 * 4 * tokens)))
                for k in range(4):
                    w = e.load(w_p, e.f32, 4 * LANES * k)
                    for t in range(tokens):
                        slot = t * chains + k % chains
                        sums.set(slot, e.fma(w, e.load_splat(x_p, 4 * (k * tokens + t), e.f32), sums.get(slot)))
            out_p = pointer_to(context, builder, sig.args[5], out_v, out_at_v)
            for t in range(tokens):
                total = sums.get(t * chains)
                for chain in range(1, chains):
                    total = e.each(builder.fadd, total, sums.get(t * chains + chain))
                e.store(total, out_p, 4 * LANES * t)
            return context.get_dummy_value()

        at = types.intp
        return types.void(values, at, x, at, at, out, at), codegen

    return tile
