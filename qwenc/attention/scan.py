"""Looking through the keys of a context for what a few query rows may want, one by one: at 2 bits, unit by unit, and exactly.

What is found is kept by block as the largest score, or somewhat more, and Σ e^(score − that).
"""

from __future__ import annotations

import numpy as np

from qwenc.attention.attend import is_staged
from qwenc.attention.cache import PAGE, TILE, UNIT, UNITS, scales_at
from qwenc.attention.rows import NO_SCORE, S_ROW, pad_list, rows_at_once
from qwenc.attention.scores import score_int8, score_tiles
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import LINE, PLANE_ROW, make_scores
from qwenc.kernels.jit import by_type, helper, inlined
from qwenc.kernels.level import LEVEL
from qwenc.kernels.summary_tiles import fold_steps

TILES = UNIT // TILE
CODE_STEP, CODE_MIDDLE = np.float32(8 * 15 / 31), np.float32(12 * 15 / 31)  # of the codes of a plane, in steps of a channel
SCAN_TILES = [TILES if rows * TILES <= LEVEL.tile_rows else 1 for rows in (1, 2, 4, 8)]  # taken at once, by registers
SCAN_1, SCAN_2, SCAN_4, SCAN_8 = SCAN_TILES
scan_1, scan_2, scan_4, scan_8 = (make_scores("plane", rows, 0, tiles) for rows, tiles in zip((1, 2, 4, 8), SCAN_TILES, strict=True))


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
    for line in range(0, UNIT * head_dim // 4, LINE):
        simd.ask_ahead(plane.codes, slot * head_dim // 4 + line)


@inlined
def fold_page(plane, c, rows, slot, unit):
    """The queries times the steps of the 8 units from `unit` on, which begin at `slot`, and what the codes of their keys do not tell."""
    strips = c.q16.shape[1] // 16
    page = slot // PAGE
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        for lane in range(width):
            out = (first * strips + lane) * PLANE_ROW
            fold_steps(plane.step, page, strips, c.q16, first + lane, c.folded, out, width * PLANE_ROW)
        first += width
    for place in range(UNITS):
        step_scale = CODE_STEP * np.float32(4096.0) * simd.get(plane.scale, scales_at(page * UNITS + place) + UNITS)  # 2^15/8
        for row in range(rows):
            c.folded_scale[place * rows + row] = c.q16s[row] * step_scale
            c.folded_bias[place * rows + row] = c.mid[row, unit + place] - CODE_MIDDLE * c.tilt[row, unit + place]


@inlined
def scan_unit(plane, c, r, rows, slot, place, key):
    """r.s from `key` on: scores of the 32 keys of the unit at `slot`, number `place` of its page, from their 2-bit codes."""
    strips = c.q16.shape[1] // 16
    list_unit(r, slot)
    codes, q, scale, bias, of_unit = (plane.codes,), c.folded, c.folded_scale, c.folded_bias, place * rows
    in_strip = place % 2 * (PLANE_ROW // 2) + place // 2 * 16
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        row, q_at, s_at = of_unit + first, first * strips * PLANE_ROW + in_strip, first * S_ROW + key
        if width == 8:
            for tile in range(0, TILES, SCAN_8):
                scan_8(codes, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
        elif width == 4:
            for tile in range(0, TILES, SCAN_4):
                scan_4(codes, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
        elif width == 2:
            for tile in range(0, TILES, SCAN_2):
                scan_2(codes, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
        else:
            for tile in range(0, TILES, SCAN_1):
                scan_1(codes, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
        first += width


@inlined
def add_scanned(c, r, rows, block, first, count):
    """Enter the scores of the units c.order[first …], at most 8, which lie in r.s, into their blocks. The exponential is a rough one:
    scores from 2 bits err by far more."""
    if block != UNIT:
        for i in range(count):
            for row in range(rows):
                add_each(c, r, row, block, c.order[first + i], UNIT * i)
        return
    none = simd.splat(NO_SCORE)
    for row in range(rows):
        at = row * S_ROW
        for key in range(at + UNIT * count, at + PAGE, TILE):
            simd.store(r.s, key, none)
        largest = none
        for key in range(at, at + PAGE, TILE):
            largest = simd.larger(simd.load(r.s, key), largest)
        top = simd.lane_max_of_numbers(largest)
        start = simd.rough_start(top)
        sums = simd.sums_of_eight(
            rough_weights(r, at, start),
            rough_weights(r, at + UNIT, start),
            rough_weights(r, at + 2 * UNIT, start),
            rough_weights(r, at + 3 * UNIT, start),
            rough_weights(r, at + 4 * UNIT, start),
            rough_weights(r, at + 5 * UNIT, start),
            rough_weights(r, at + 6 * UNIT, start),
            rough_weights(r, at + 7 * UNIT, start),
        )
        simd.store(c.share, 0, sums)
        for i in range(count):
            c.m[row, c.order[first + i]] = top
            c.total[row, c.order[first + i]] = c.share[i]


@inlined
def rough_weights(r, at, start):
    """e^(score − top) of the 32 scores from r.s[at] on, two added in each lane."""
    return simd.add(simd.rough_exp(simd.load(r.s, at), start), simd.rough_exp(simd.load(r.s, at + TILE), start))


@inlined
def add_unit(c, r, rows, block, unit):
    """Enter the exact scores of a unit's 32 keys, r.s, into its blocks."""
    for row in range(rows):
        at = row * S_ROW
        low, high = simd.load(r.s, at), simd.load(r.s, at + TILE)
        if block == UNIT:
            top = simd.lane_max_of_numbers(simd.larger(low, high))
            shift = simd.splat(top)
            low, high = simd.sub(low, shift), simd.sub(high, shift)
            c.m[row, unit] = top
            c.total[row, unit] = simd.lane_sum(simd.add(simd.exp(low), simd.exp(high)))
        else:
            add_each(c, r, row, block, unit, 0)


@helper
def add_each(c, r, row, block, unit, at):
    """The scores of a unit, from r.s[row, at] on, key by key, for blocks that are no unit. Not inlined: LLVM would compute it even where it
    is not wanted."""
    for key in range(UNIT):
        add_keys(c, row, block, unit * UNIT + key, 1, r.s[row, at + key])


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
        add_unit(c, r, rows, block, own_key // UNIT)
        return
    for row in range(rows):
        for key in range(min(UNIT, keys - own_key)):
            add_keys(c, row, block, own_key + key, 1, r.s[row, key])


def score_own(cache, stage, stage_slot, slot, r, rows):
    """r.s: scores of the unit at `slot`, which lies in `stage` from stage_slot on while it has no codes of 5 bits."""
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
