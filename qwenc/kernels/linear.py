"""Matrix rows times activations, for every weight format. `stack` counts matrices in memory order (layer, or layer·experts + expert)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from qwenc.kernels import simd
from qwenc.kernels.amx import make_linear_tiles, shape_tiles
from qwenc.kernels.jit import by_type, helper, inlined
from qwenc.kernels.level import LEVEL
from qwenc.kernels.linear_tiles import AHEAD, GROUP, PIECES_TOP, make_linear, make_linear_f32, make_opener
from qwenc.kernels.records import F32, Q4, Q8, TILE, Q8Fast

# Taking 4-bit codes apart once for all tokens of a mini-batch pays where that is not hidden behind the products (docs/benchmarks.md).
# Tile registers take codes of a byte only.
TILES = LEVEL.tiles
OPENS = LEVEL.shorts or TILES
LINE = 64  # bytes of a cache line: what is opened begins at one
open_codes = make_opener(8 if TILES else 0)


def _many(fmt: str, pieces: int = 1) -> Any:
    """The kernel of a token tile."""
    return make_linear_tiles(pieces) if TILES else make_linear(fmt, TILE)


linear_q4_one, linear_q4_many = make_linear("q4", 1, AHEAD), _many("open" if OPENS else "q4")
linear_q8_one, linear_q8_many = make_linear("q8", 1, AHEAD), _many("q8", 2)
linear_q8fast_one, linear_q8fast_many = make_linear("q8fast", 1, AHEAD), _many("q8fast")
linear_f32_one, linear_f32_many = make_linear_f32(1), make_linear_f32(TILE)


def _is(matrix: types.Type, record: type) -> bool:
    return isinstance(matrix, types.BaseNamedTuple) and matrix.instance_class is record


def row_tiles(w):
    """Number of 16-row tiles of each matrix in the stack."""
    raise NotImplementedError("runs in compiled code only")


@by_type(row_tiles)
def _row_tiles(w):
    if _is(w, F32):
        return lambda w: w.values.shape[1]
    return lambda w: w.codes.shape[1]


def linear_one(w, stack, tile, acts, token, out, out_at):
    """out[out_at … +16] = 16 rows (row tile `tile`) of matrix `stack` times the activation row `token`, prepared with tokens=1."""
    raise NotImplementedError("runs in compiled code only")


def new_room(w):
    """Room for a row tile that is made ready for `linear_many`."""
    raise NotImplementedError("runs in compiled code only")


def make_ready(w, stack, tile, room):
    """Bring row tile `tile` into the form in which `linear_many` reads it."""
    raise NotImplementedError("runs in compiled code only")


def linear_many(w, room, stack, tile, acts, token, out, out_at):
    """out[out_at + 16·t + row] for the TILE tokens of token tile number `token`, prepared with tokens=TILE. room: with this row tile made
    ready."""
    raise NotImplementedError("runs in compiled code only")


@by_type(new_room, allocates=True)
def _new_room(w):
    if _is(w, Q4) and OPENS:
        return lambda w: np.empty(w.codes.shape[2] * 512 + LINE, np.uint8)
    return lambda w: np.empty(0, np.uint8)


@by_type(make_ready)
def _make_ready(w, stack, tile, room):
    if TILES and not _is(w, F32) and not _is(w, Q4):
        return lambda w, stack, tile, room: shape_tiles()
    if not (_is(w, Q4) and OPENS):
        return lambda w, stack, tile, room: None

    def run(w, stack, tile, room):
        if TILES:
            shape_tiles()
        groups = w.codes.shape[2]
        open_codes(w.codes, (stack * w.codes.shape[1] + tile) * groups * w.codes.shape[3], groups, room, simd.bytes_to_line(room))

    return run


def fetch_rows(w, stack, tile):
    """Ask for the beginning of row tile `tile`, before `linear_one` reads it: the first load of a run would wait for memory."""
    raise NotImplementedError("runs in compiled code only")


@by_type(fetch_rows)
def _fetch_rows(w, stack, tile):
    if _is(w, F32):
        return lambda w, stack, tile: simd.fetch(w.values, (stack * w.values.shape[1] + tile) * w.values.shape[2] * 16, AHEAD)

    def run(w, stack, tile):
        groups, size = w.codes.shape[2], w.codes.shape[3]
        at = (stack * w.codes.shape[1] + tile) * groups
        simd.fetch(w.codes, at * size, AHEAD)
        simd.fetch(w.scales, at * 16, AHEAD * 32 // size)

    return run


def _quantised(kernel):
    def run(w, stack, tile, acts, token, out, out_at):
        groups = w.codes.shape[2]
        at = (stack * w.codes.shape[1] + tile) * groups
        kernel(w.codes, at * w.codes.shape[3], w.scales, at * 16, acts.codes, acts.scales, acts.offsets, token, groups, out, out_at)

    return run


def _opened(kernel):
    def run(w, room, stack, tile, acts, token, out, out_at):
        groups = w.codes.shape[2]
        at = (stack * w.codes.shape[1] + tile) * groups
        kernel(room, simd.bytes_to_line(room), w.scales, at * 16, acts.codes, acts.scales, acts.offsets, token, groups, out, out_at)

    return run


def _by_format(w, q4, q8, q8fast, f32):
    """What calls the kernel of the matrix's format."""
    for record, kernel in ((Q4, q4), (Q8, q8), (Q8Fast, q8fast)):
        if _is(w, record):
            return _quantised(kernel)

    def run_f32(w, stack, tile, acts, token, out, out_at):
        inputs = w.values.shape[2]
        f32(w.values, (stack * w.values.shape[1] + tile) * inputs * 16, acts.values, token, inputs, out, out_at)

    return run_f32


@by_type(linear_one)
def _linear_one(w, stack, tile, acts, token, out, out_at):
    return _by_format(w, linear_q4_one, linear_q8_one, linear_q8fast_one, linear_f32_one)


@by_type(linear_many)
def _linear_many(w, room, stack, tile, acts, token, out, out_at):
    if _is(w, Q4) and OPENS:
        return _opened(linear_q4_many)
    run_tile = helper(_by_format(w, linear_q4_many, linear_q8_many, linear_q8fast_many, linear_f32_many))
    return lambda w, room, stack, tile, acts, token, out, out_at: run_tile(w, stack, tile, acts, token, out, out_at)


# ---- activations ----------------------------------------------------------------------------------------------------------
def prepare(w, x, x_at, acts, tokens, token):
    """Put one activation row x[x_at …] (as long as the matrix's padded inputs) into place `token` of acts, whose tiles hold
    `tokens` tokens, as matrix `w` reads it: int8 (15 bits for Q8) with a scale per 32 values, or float32."""
    raise NotImplementedError("runs in compiled code only")


@by_type(prepare)
def _prepare(w, x, x_at, acts, tokens, token):
    if _is(w, F32):

        def run_f32(w, x, x_at, acts, tokens, token):
            inputs = w.values.shape[2]
            first = (token // tokens) * inputs * tokens + token % tokens
            for k in range(inputs):
                acts.values[first + k * tokens] = simd.get(x, x_at + k)

        return run_f32

    quantise, pieces = (quantise_group_fine, 2) if _is(w, Q8) else (quantise_group, 1)

    def run(w, x, x_at, acts, tokens, token):
        groups = w.codes.shape[2]
        lane = token % tokens
        first = (token // tokens) * groups * tokens
        for g in range(groups):
            at = first + g * tokens
            if TILES and tokens == TILE:  # [pieces][tokens][32]
                codes_at = at * GROUP * pieces + GROUP * lane
                if pieces == 2:
                    quantise_group_apart(x, x_at + GROUP * g, acts, codes_at, GROUP * tokens, at + lane)
                else:
                    quantise_group(x, x_at + GROUP * g, acts, codes_at, 4, at + lane)
            else:
                codes_at = (at * GROUP + 4 * lane) * pieces
                quantise(x, x_at + GROUP * g, acts, codes_at, 4 * tokens * pieces, at + lane)

    return run


@inlined
def scaled_group(x, x_at, top):
    """32 values, scaled so that the largest magnitude among them is `top`, 16 and 16; and that magnitude."""
    low, high = simd.load(x, x_at), simd.load(x, x_at + 16)
    largest = simd.lane_max(simd.maximum(simd.absolute(low), simd.absolute(high)))
    factor = simd.splat(top / largest if largest > 0 else np.float32(0.0))
    return simd.mul(low, factor), simd.mul(high, factor), largest


@helper
def quantise_group(x, x_at, acts, codes_at, cell_step, place):
    """32 values to int8: scale = max|x|/127, codes written in cells of four `cell_step` bytes apart. A NaN makes the scale NaN."""
    low, high, largest = scaled_group(x, x_at, np.float32(127.0))
    total = simd.store_cells(acts.codes, codes_at, cell_step, low)
    total += simd.store_cells(acts.codes, codes_at + 4 * cell_step, cell_step, high)
    acts.scales[place] = largest * np.float32(1 / 127)
    acts.offsets[place] = -8 * total


@helper
def quantise_group_apart(x, x_at, acts, codes_at, piece_step, place):
    """32 values to 15 bits as quantise_group_fine does, but their high pieces side by side and the low ones `piece_step` bytes further."""
    low, high, largest = scaled_group(x, x_at, PIECES_TOP)
    acts.offsets[2 * place] = acts.offsets[2 * place + 1] = 0  # not looked at
    simd.store_pieces(acts.codes, codes_at, piece_step, low, acts.offsets, 2 * place)
    simd.store_pieces(acts.codes, codes_at + 16, piece_step, high, acts.offsets, 2 * place)
    acts.scales[place] = largest / PIECES_TOP


@helper
def quantise_group_fine(x, x_at, acts, codes_at, cell_step, place):
    """32 values to 15 bits in two signed pieces: scale = max|x|/16319, value ≈ scale·(128·high + low)."""
    low, high, largest = scaled_group(x, x_at, PIECES_TOP)
    acts.offsets[2 * place] = acts.offsets[2 * place + 1] = 0
    simd.store_two_pieces(acts.codes, codes_at, cell_step, low, acts.offsets, 2 * place)
    simd.store_two_pieces(acts.codes, codes_at + 4 * cell_step, cell_step, high, acts.offsets, 2 * place)
    acts.scales[place] = largest / PIECES_TOP
    acts.offsets[2 * place] *= -8
    acts.offsets[2 * place + 1] *= -8


# ---- rows as they are -----------------------------------------------------------------------------------------------------
def read_row(w, row, out, out_at):
    """Row `row` of an unstacked matrix (the embedding of a token) as float32 into out[out_at …]."""
    raise NotImplementedError("runs in compiled code only")


@by_type(read_row)
def _read_row(w, row, out, out_at):
    if _is(w, F32):

        def run_f32(w, row, out, out_at):
            for k in range(w.values.shape[2]):
                simd.put(out, out_at + k, w.values[0, row // 16, k, row % 16])

        return run_f32

    if _is(w, Q8) or _is(w, Q8Fast):

        def run_q8(w, row, out, out_at):
            lane = 4 * (row % 16)
            for g in range(w.codes.shape[2]):
                scale = half_to_float(w.scales, ((row // 16) * w.codes.shape[2] + g) * 16, row % 16)
                codes = w.codes[0, row // 16, g]
                for k in range(GROUP):
                    simd.put(out, out_at + GROUP * g + k, np.float32(codes[(k // 4) * 64 + lane + k % 4]) * scale)

        return run_q8

    def run_q4(w, row, out, out_at):
        lane = 4 * (row % 16)
        for g in range(w.codes.shape[2]):
            scale = half_to_float(w.scales, ((row // 16) * w.codes.shape[2] + g) * 16, row % 16)
            codes = w.codes[0, row // 16, g]
            for k in range(16):
                byte = codes[(k // 4) * 64 + lane + k % 4]
                simd.put(out, out_at + GROUP * g + k, np.float32(np.int32(byte & 15) - 8) * scale)
                simd.put(out, out_at + GROUP * g + 16 + k, np.float32(np.int32(byte >> 4) - 8) * scale)

    return run_q4


@helper
def half_to_float(halves, first, lane):
    """One of 16 half-precision numbers."""
    return simd.lane(simd.load_half(halves, first), lane)
