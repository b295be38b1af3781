"""Looking through a context for what a few query rows may want: the first look at every unit of 32 keys, the scan of a unit key by key at
2 bits, and exact scores; and the room in which a choice of blocks is made.

What is found is kept by block as the largest score and Σ e^(score − largest).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qwenc.attention.attend import is_staged
from qwenc.attention.cache import PAGE, TILE, UNIT, UNITS
from qwenc.attention.rows import NO_SCORE, S_ROW, pad_list, rows_at_once
from qwenc.attention.scores import score_int8, score_tiles
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import make_scores
from qwenc.kernels.jit import allocating, by_type, helper, inlined
from qwenc.kernels.level import LEVEL
from qwenc.kernels.summary_tiles import fold_steps, make_look

BIAS = np.float32(-LEVEL.signed_bias)
Q16_TOP = np.float32(1052.0)  # times 31, plus 128, fits into 16 bits

look_1, look_2, look_4, look_8 = (make_look(rows) for rows in (1, 2, 4, 8))
TILES = UNIT // TILE
SCAN_TILES = [TILES if rows * TILES <= LEVEL.tile_rows else 1 for rows in (1, 2, 4, 8)]  # taken at once, by registers
SCAN_1, SCAN_2, SCAN_4, SCAN_8 = SCAN_TILES
scan_1, scan_2, scan_4, scan_8 = (make_scores("plane", rows, 0, tiles) for rows, tiles in zip((1, 2, 4, 8), SCAN_TILES, strict=True))


class Choice(NamedTuple):
    """Room for one choice, for one thread. q8, a8 int8 [rows·head_dim], sums float32 [rows, 3], q16 int16 [rows, head_dim], qs float32
    [rows], q16s: scales: the queries in the forms that the kernels read. mid, spread, tilt float32 [rows, units]: first look. m, total
    float32 [rows, blocks]: largest score of a block, and Σ e^(score − m); score, best, share float32 [units or blocks]; kept uint8 [units
    or blocks]. scanned uint8 [units]: which were looked at key by key; order int64 [units]: their numbers. missed float32 [1]: estimated
    share of the attention that the last choice left out, the mean over rows.
    """

    q8: np.ndarray
    a8: np.ndarray
    sums: np.ndarray
    qs: np.ndarray
    q16: np.ndarray
    q16s: np.ndarray
    mid: np.ndarray
    spread: np.ndarray
    tilt: np.ndarray
    m: np.ndarray
    total: np.ndarray
    score: np.ndarray
    best: np.ndarray
    share: np.ndarray
    kept: np.ndarray
    scanned: np.ndarray
    order: np.ndarray
    missed: np.ndarray


@allocating
def new_choice(rows, head_dim, keys, block):
    """Room for contexts of up to `keys` keys."""
    units = (keys + PAGE - 1) // PAGE * UNITS
    blocks = (keys + block - 1) // block
    most = max(units, blocks)
    return Choice(
        np.zeros(rows * head_dim, np.int8),
        np.zeros(rows * head_dim, np.int8),
        np.zeros((rows, 3), np.float32),
        np.zeros(rows, np.float32),
        np.zeros((rows, head_dim), np.int16),
        np.zeros(rows, np.float32),
        np.zeros((rows, units), np.float32),
        np.zeros((rows, units), np.float32),
        np.zeros((rows, units), np.float32),
        np.zeros((rows, blocks + 16), np.float32),
        np.zeros((rows, blocks + 16), np.float32),
        np.zeros(most, np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most, np.uint8),
        np.zeros(units, np.uint8),
        np.zeros(units, np.int64),
        np.zeros(1, np.float32),
    )


# ---- first look -----------------------------------------------------------------------------------------------------------
@helper
def prepare_look(r, rows, c):
    """The queries in 8 bits for the first look and in 11 for the scan."""
    head_dim = r.q.shape[1]
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        for lane in range(width):
            row = first + lane
            top = simd.splat(np.float32(0.0))
            for d in range(0, head_dim, 16):
                top = simd.larger(simd.absolute(simd.load(r.q, row * head_dim + d)), top)
            largest = simd.lane_max(top)
            c.qs[row] = largest * np.float32(1 / 127)
            c.q16s[row] = largest / Q16_TOP
            to_8 = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
            to_16 = Q16_TOP / largest if largest > 0 else np.float32(0.0)
            factor_8, factor_16 = simd.splat(to_8), simd.splat(to_16)
            total = magnitude = simd.splat(np.float32(0.0))
            for d in range(0, head_dim, 16):
                q = simd.load(r.q, row * head_dim + d)
                code = simd.nearest(simd.mul(q, factor_8))
                at = first * head_dim + d * width + 8 * lane
                simd.store_eights(c.q8, at, 8 * width, code)
                simd.store_eights(c.a8, at, 8 * width, simd.absolute(code))
                simd.store_shorts(c.q16, row * head_dim + d, simd.mul(q, factor_16))
                total, magnitude = simd.add(total, code), simd.add(magnitude, simd.absolute(code))
            of_codes = simd.lane_sum(total)
            c.sums[row, 0] = BIAS * of_codes
            c.sums[row, 1] = np.float32(0.5) * simd.lane_sum(magnitude)
            c.sums[row, 2] = np.float32(0.5) * of_codes
        first += width


@helper
def look(plane, c, rows, first_slot, page_step, units):
    """c.mid, c.spread, c.tilt of all units, and of those that fill up the last page."""
    chunks = c.q16.shape[1] // 8
    step = c.mid.shape[1]
    for page in range((units + UNITS - 1) // UNITS):
        at = (first_slot + page * page_step) // PAGE
        first = 0
        while first < rows:
            width = rows_at_once(rows, first)
            out = first * step + page * UNITS
            a, b, s = plane.centre, plane.step, plane.scale
            if width == 8:
                look_8(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            elif width == 4:
                look_4(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            elif width == 2:
                look_2(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            else:
                look_1(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            first += width


# ---- key by key -----------------------------------------------------------------------------------------------------------
@inlined
def unit_slot(first_slot, page_step, unit):
    """Where a unit of the context begins in the cache."""
    return first_slot + unit // UNITS * page_step + unit % UNITS * UNIT


@inlined
def list_unit(r, slot):
    """The tile list of the unit at `slot`."""
    r.at[0], r.at[1] = slot, slot + TILE
    pad_list(r, TILES)


@inlined
def ask_for_unit(plane, head_dim, slot):
    """Ask for the codes of a unit, for soon."""
    for line in range(0, UNIT * head_dim // 4, 64):
        simd.ask_ahead(plane.codes, slot * head_dim // 4 + line)


@inlined
def fold_unit(plane, c, r, rows, slot, unit):
    """Queries times the steps of a unit: r.fp, r.fs, and what the codes of its keys do not tell, r.fb."""
    strips = c.q16.shape[1] // 16
    page, place = slot // PAGE, unit % UNITS
    step_scale = simd.get(plane.scale, page * 2 * UNITS + UNITS + place)
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        for lane in range(width):
            row = first + lane
            fold_steps(plane.step, page, place, strips, c.q16, row, r.fp, first * 16 * strips + 16 * lane, 16 * width)
            r.fs[row] = np.float32(512.0) * c.q16s[row] * step_scale  # 4 · 256/2
            r.fb[row] = c.mid[row, unit] - np.float32(6.0) * c.tilt[row, unit]
        first += width


@inlined
def scan_unit(plane, c, r, rows, slot):
    """r.s: scores of the 32 keys of a unit from their 2-bit codes."""
    strips = c.q16.shape[1] // 16
    list_unit(r, slot)
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        q_at, s_at = first * 16 * strips, first * S_ROW
        if width == 8:
            for tile in range(0, TILES, SCAN_8):
                s_of = s_at + TILE * tile
                scan_8(plane.codes, None, None, r.at, tile, strips, r.fp, q_at, r.fs, r.fb, first, None, r.s, s_of, S_ROW)
        elif width == 4:
            for tile in range(0, TILES, SCAN_4):
                s_of = s_at + TILE * tile
                scan_4(plane.codes, None, None, r.at, tile, strips, r.fp, q_at, r.fs, r.fb, first, None, r.s, s_of, S_ROW)
        elif width == 2:
            for tile in range(0, TILES, SCAN_2):
                s_of = s_at + TILE * tile
                scan_2(plane.codes, None, None, r.at, tile, strips, r.fp, q_at, r.fs, r.fb, first, None, r.s, s_of, S_ROW)
        else:
            for tile in range(0, TILES, SCAN_1):
                s_of = s_at + TILE * tile
                scan_1(plane.codes, None, None, r.at, tile, strips, r.fp, q_at, r.fs, r.fb, first, None, r.s, s_of, S_ROW)
        first += width


@inlined
def add_unit(c, r, rows, block, unit, rough):
    """Enter the scores of a unit's 32 keys, r.s, into its blocks. rough: a constant, whether a rough exponential will do. For scores from
    2 bits it will: they err by far more."""
    for row in range(rows):
        at = row * S_ROW
        low, high = simd.load(r.s, at), simd.load(r.s, at + TILE)
        if block == UNIT:
            top = simd.lane_max_of_numbers(simd.larger(low, high))
            shift = simd.splat(top)
            low, high = simd.sub(low, shift), simd.sub(high, shift)
            c.m[row, unit] = top
            if rough:
                c.total[row, unit] = simd.lane_sum(simd.add(simd.rough_exp(low), simd.rough_exp(high)))
            else:
                c.total[row, unit] = simd.lane_sum(simd.add(simd.exp(low), simd.exp(high)))
        else:
            add_each(c, r, row, block, unit)


@helper
def add_each(c, r, row, block, unit):
    """The same key by key, for blocks that are no unit. Not inlined: LLVM would compute it even where it is not wanted."""
    for key in range(UNIT):
        add_keys(c, row, block, unit * UNIT + key, 1, r.s[row, key])


@helper
def add_own_unit(cache, stage, stage_slot, c, r, rows, block, slot, own_key, keys):
    """Enter the exact scores of the keys from own_key on, at most 32."""
    score_own(cache, stage, stage_slot, slot, r, rows)
    if block == UNIT:
        none = simd.splat(NO_SCORE)
        for row in range(rows):
            at = row * S_ROW
            simd.store(r.s, at, simd.first_lanes(simd.load(r.s, at), keys - own_key, none))
            simd.store(r.s, at + TILE, simd.first_lanes(simd.load(r.s, at + TILE), keys - own_key - TILE, none))
        add_unit(c, r, rows, block, own_key // UNIT, False)
        return
    for row in range(rows):
        for key in range(min(UNIT, keys - own_key)):
            add_keys(c, row, block, own_key + key, 1, r.s[row, key])


def score_own(cache, stage, stage_slot, slot, r, rows):
    """r.s: scores of the unit at `slot`, which lies in `stage` from stage_slot on while it has no codes of 4 bits."""
    raise NotImplementedError("runs in compiled code only")


@by_type(score_own)
def _score_own(cache, stage, stage_slot, slot, r, rows):
    if is_staged(cache):

        def run_staged(cache, stage, stage_slot, slot, r, rows):
            list_unit(r, stage_slot)
            score_int8(stage, cache.v, r, rows, 0, TILES)

        return run_staged

    def run(cache, stage, stage_slot, slot, r, rows):
        list_unit(r, slot)
        score_tiles(cache.k, cache.v, r, rows, 0, TILES)

    return run


@inlined
def add_keys(c, row, block, first_key, count, score):
    """Enter `count` keys of the same score, from first_key on."""
    for key in range(first_key, first_key + count):
        b = key // block
        m = c.m[row, b]
        if score > m:
            c.total[row, b] = c.total[row, b] * exp_of(m - score) + np.float32(1.0)
            c.m[row, b] = score
        else:
            c.total[row, b] += exp_of(score - m)


@inlined
def exp_of(x):
    return simd.lane(simd.exp(simd.splat(x)), 0) if x > NO_SCORE else np.float32(0.0)
