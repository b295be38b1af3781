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
from qwenc.kernels.attention_tiles import LINE, PLANE_ROW, make_scores
from qwenc.kernels.jit import allocating, by_type, helper, inlined
from qwenc.kernels.level import LEVEL
from qwenc.kernels.summary_tiles import fold_steps, make_look

BIAS = np.float32(-LEVEL.signed_bias)
Q16_TOP = np.float32(32767.0)
AHEAD = 8  # units between asking for their codes and reading them
LOOK_AHEAD = 4  # pages between asking for what the first look reads and reading it

look_1, look_2, look_4, look_8 = (make_look(rows) for rows in (1, 2, 4, 8))
TILES = UNIT // TILE
SCAN_TILES = [TILES if rows * TILES <= LEVEL.tile_rows else 1 for rows in (1, 2, 4, 8)]  # taken at once, by registers
SCAN_1, SCAN_2, SCAN_4, SCAN_8 = SCAN_TILES
scan_1, scan_2, scan_4, scan_8 = (make_scores("plane", rows, 0, tiles) for rows, tiles in zip((1, 2, 4, 8), SCAN_TILES, strict=True))


class Choice(NamedTuple):
    """Room for one choice, for one thread. q8, a8 int8 [rows·head_dim], sums float32 [rows, 3], q16 int16 [rows, head_dim], qs float32
    [rows], q16s: scales: the queries in the forms that the kernels read. mid, spread, tilt float32 [rows, units]: first look. folded int8
    [rows·head_dim·8], folded_scale, folded_bias float32 [8·rows]: the queries times the steps of the 8 units of a page. m, total float32
    [rows, blocks]: Σ e^(score − m) of a block, m being its largest score or somewhat more; score, best, share float32 [units or blocks];
    kept uint8 [units or blocks]. scanned uint8 [units]: which were looked at key by key; order int64: their numbers. missed float32 [1]:
    estimated share of the attention that the last choice left out, the mean over rows.
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
    folded: np.ndarray
    folded_scale: np.ndarray
    folded_bias: np.ndarray
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
        np.zeros(UNITS * rows * head_dim, np.int8),
        np.zeros(UNITS * rows, np.float32),
        np.zeros(UNITS * rows, np.float32),
        np.zeros((rows, blocks + 16), np.float32),
        np.zeros((rows, blocks + 16), np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most, np.uint8),
        np.zeros(units, np.uint8),
        np.zeros(units + AHEAD, np.int64),
        np.zeros(1, np.float32),
    )


# ---- first look -----------------------------------------------------------------------------------------------------------
@helper
def prepare_look(r, rows, c):
    """The queries in 8 bits for the first look and in 16 for the scan."""
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
    head_dim = c.q16.shape[1]
    chunks = head_dim // 8
    step = c.mid.shape[1]
    for page in range(LOOK_AHEAD):
        ask_for_page(plane, head_dim, (first_slot + page * page_step) // PAGE)
    for page in range((units + UNITS - 1) // UNITS):
        at = (first_slot + page * page_step) // PAGE
        ask_for_page(plane, head_dim, (first_slot + (page + LOOK_AHEAD) * page_step) // PAGE)
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


@inlined
def ask_for_page(plane, head_dim, page):
    """Ask for what the first look reads of a page, for soon."""
    for line in range(0, UNITS * head_dim, LINE):
        simd.ask_ahead(plane.centre, page * UNITS * head_dim + line)
    for line in range(0, UNITS * head_dim // 2, LINE):
        simd.ask_ahead(plane.step, page * UNITS * head_dim // 2 + line)
    simd.ask_ahead(plane.scale, page * 2 * UNITS)


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
        step_scale = np.float32(16384.0) * simd.get(plane.scale, page * 2 * UNITS + UNITS + place)  # 4 · 2^15/8
        for row in range(rows):
            c.folded_scale[place * rows + row] = c.q16s[row] * step_scale
            c.folded_bias[place * rows + row] = c.mid[row, unit + place] - np.float32(6.0) * c.tilt[row, unit + place]


@inlined
def scan_unit(plane, c, r, rows, slot, place, key):
    """r.s from `key` on: scores of the 32 keys of the unit at `slot`, number `place` of its page, from their 2-bit codes."""
    strips = c.q16.shape[1] // 16
    list_unit(r, slot)
    codes, q, scale, bias, of_unit = plane.codes, c.folded, c.folded_scale, c.folded_bias, place * rows
    in_strip = place % 2 * (PLANE_ROW // 2) + place // 2 * 16
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        row, q_at, s_at = of_unit + first, first * strips * PLANE_ROW + in_strip, first * S_ROW + key
        if width == 8:
            for tile in range(0, TILES, SCAN_8):
                scan_8(codes, None, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
        elif width == 4:
            for tile in range(0, TILES, SCAN_4):
                scan_4(codes, None, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
        elif width == 2:
            for tile in range(0, TILES, SCAN_2):
                scan_2(codes, None, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
        else:
            for tile in range(0, TILES, SCAN_1):
                scan_1(codes, None, None, r.at, tile, strips, q, q_at, scale, bias, row, None, r.s, s_at + TILE * tile, S_ROW)
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
