"""Which blocks of a long context a few query rows attend to.

Every unit of 32 keys is looked at through its centre and width (7 bytes a key), the likeliest quarter then key by key at 2 bits; a block's
weight is the log-sum-exp of its keys' scores. One choice serves all heads of a kv head, and in prefill a tile of queries: a block counts by
the largest share of attention that it has with any of the queries, summed over the heads. The first block and those of the current unit
are always kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qwenc.attention.attend import attend_tiles, attend_unit, is_staged, key_arrays, score_int8, score_tiles
from qwenc.attention.cache import PAGE, Q4K, TILE, UNIT, UNITS, FloatKV, slot_of
from qwenc.attention.overloads import is_record
from qwenc.attention.rows import ALL_KEYS, NO_SCORE, S_ROW, list_tiles, pad_list, rows_at_once
from qwenc.attention.top import keep_top
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import make_scores
from qwenc.kernels.jit import allocating, by_type, helper, inlined
from qwenc.kernels.level import LEVEL
from qwenc.kernels.summary_tiles import fold_steps, make_look

SCAN, SUMMARY, PROBE, ORACLE = range(4)  # in the order of settings.SPARSE_SCORES
BIAS = np.float32(-LEVEL.signed_bias)
WIDTHS = np.float32(4.0)  # steps from a unit's centre to where its best key is expected
FIRST = 8  # tiles asked for before the first is read
AHEAD = 3  # units between asking for the codes and reading them
Q16_TOP = np.float32(1052.0)  # times 31, plus 128, fits into 16 bits
LOG_UNIT = np.float32(np.log(UNIT))

look_1, look_2, look_4, look_8 = (make_look(rows) for rows in (1, 2, 4, 8))
TILES = UNIT // TILE
SCAN_TILES = [TILES if rows * TILES <= LEVEL.tile_rows else 1 for rows in (1, 2, 4, 8)]  # taken at once, by registers
SCAN_1, SCAN_2, SCAN_4, SCAN_8 = SCAN_TILES
scan_1, scan_2, scan_4, scan_8 = (make_scores("plane", rows, 0, tiles) for rows, tiles in zip((1, 2, 4, 8), SCAN_TILES, strict=True))


class Sparse(NamedTuple):
    """How blocks are chosen. score: SCAN …; block: tokens; k, most: blocks kept at least and at most; mass: share of the attention until
    which more than k are kept; probe: sampled keys; ratio: share of all blocks that is kept at least; group: queries that share a choice;
    from_keys: contexts shorter than this are attended to in full; look_least, look_share: after the first look, look_least times the keys
    to keep, or one unit in look_share, are scanned."""

    score: int
    block: int
    k: int
    most: int
    mass: float
    probe: int
    ratio: float
    group: int
    from_keys: int
    look_least: int
    look_share: int


class Choice(NamedTuple):
    """Room for one choice, for one thread. q8, a8 int8 [rows·head_dim], sums float32 [rows, 3], q16 int16 [rows, head_dim], qs float32
    [rows], q16s: scales: the queries in the forms that the kernels read. mid, spread, tilt float32 [rows, units]: first look. m, total
    float32 [rows, blocks]: largest score of a block, and Σ e^(score − m); score, best, share float32 [units or blocks]; kept uint8 [units
    or blocks]. scanned uint8 [units]: which were looked at key by key; order int64 [units]:
    their numbers. missed float32 [1]: estimated share of the attention that the last choice left
    out, the mean over rows.
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


@helper
def budget(sparse, blocks):
    """Blocks to keep at least, of `blocks`."""
    return min(blocks, max(sparse.k, int(np.ceil(sparse.ratio * blocks))))


@helper
def is_sparse(sparse, keys):
    """Whether a context of that many keys is worth a choice: long enough, and not all of it would be kept."""
    blocks = (keys + sparse.block - 1) // sparse.block
    return keys > 2 * sparse.block and keys >= sparse.from_keys and blocks > budget(sparse, blocks)


@helper
def choose(cache, stage, stage_slot, sparse, c, r, rows, group, layers, kv_heads, first_page, layer, head, own_key, keys):
    """Set c.kept by block for `rows` rows (tokens × the heads of a group), whose tokens see up to `keys` keys, those from own_key (a
    multiple of 32) on being theirs; stage, stage_slot: where those lie while they have no codes of 4 bits. Call after prepare_rows. Returns
    the
    number of blocks kept."""
    units = own_key // UNIT
    blocks = (keys + sparse.block - 1) // sparse.block
    least = budget(sparse, blocks)
    first_slot = slot_of(layers, kv_heads, first_page, layer, head, 0)
    page_step = layers * kv_heads * PAGE
    if sparse.score != ORACLE:
        prepare_look(r, rows, c)
        look(cache.plane, c, rows, first_slot, page_step, units)
    for row in range(rows):
        for i in range(blocks):
            c.m[row, i] = NO_SCORE
            c.total[row, i] = np.float32(0.0)
    if sparse.score == SUMMARY:
        for row in range(rows):
            for unit in range(units):
                add_keys(c, row, sparse.block, unit * UNIT, UNIT, c.mid[row, unit] + WIDTHS * c.spread[row, unit])
    elif sparse.score == ORACLE:
        for unit in range(units):
            list_unit(r, first_slot, page_step, unit)
            score_tiles(cache.k, cache.v, r, rows, 0, 2)
            add_unit(c, r, rows, sparse.block, unit)
    else:
        pool_units(c, rows, group, units)
        scanned = max(sparse.look_least * least * sparse.block // UNIT, units // sparse.look_share)
        keep_top(c.score, units, scanned, np.float32(0.0), units, c.scanned)
        c.scanned[0] = 1
        count = 0
        for unit in range(units):
            if c.scanned[unit]:
                c.order[count] = unit
                count += 1
        for i in range(count + AHEAD):
            if i < count:
                ask_for_unit(cache.plane, r.q.shape[1], first_slot, page_step, c.order[i])
            if i >= AHEAD:
                unit = c.order[i - AHEAD]
                fold_unit(cache.plane, c, r, rows, first_slot, page_step, unit)
                scan_unit(cache.plane, c, r, rows, first_slot, page_step, unit)
                add_unit(c, r, rows, sparse.block, unit)
    if rows == group and keys - own_key <= UNIT:  # decode: a query's own unit counts too
        add_own_unit(
            cache, stage, stage_slot, c, r, rows, sparse.block, slot_of(layers, kv_heads, first_page, layer, head, own_key), own_key, keys
        )
    pool_blocks(c, rows, group, blocks)
    forced = force(c, sparse.block, blocks, own_key)
    most = min(max(sparse.most, least), blocks)
    return keep_top(c.score, blocks, least, forced_share(np.float32(sparse.mass), forced, np.float32(group)), most, c.kept)


@helper
def forced_share(mass, forced, whole):
    """The share that the other blocks must hold, when the forced ones hold `forced` of `whole`, to reach `mass`."""
    if mass <= 0 or forced >= mass * whole:
        return np.float32(0.0)
    return (mass * whole - forced) / (whole - forced)


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
            total, magnitude = 0, 0
            for d in range(head_dim):
                code = int(np.rint(r.q[row, d] * to_8))
                at = first * head_dim + (d // 8) * 8 * width + 8 * lane + d % 8
                c.q8[at] = np.int8(code)
                c.a8[at] = np.int8(abs(code))
                c.q16[row, d] = np.int16(np.rint(r.q[row, d] * to_16))
                total += code
                magnitude += abs(code)
            c.sums[row, 0] = BIAS * np.float32(total)
            c.sums[row, 1] = np.float32(0.5) * np.float32(magnitude)
            c.sums[row, 2] = np.float32(0.5) * np.float32(total)
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


@helper
def pool_units(c, rows, group, units):
    """c.score[unit]: the share of attention expected of it at best, of the query that wants it most, summed over the heads."""
    for unit in range(units):
        c.score[unit] = np.float32(0.0)
    room = c.mid.shape[1]
    best, bound = c.best, c.share
    for i in range(group):
        for unit in range(room):
            best[unit] = np.float32(0.0)
        for row in range(i, rows, group):
            top = NO_SCORE
            for unit in range(units):
                bound[unit] = c.mid[row, unit] + WIDTHS * c.spread[row, unit]
                top = max(top, bound[unit])
            shift = simd.splat(top)
            total = np.float32(0.0)
            for unit in range(0, units, 16):
                share = simd.exp(simd.sub(simd.load(bound, unit), shift))
                simd.store(bound, unit, share)
                total += simd.lane_sum(simd.first_lanes(share, units - unit, simd.splat(np.float32(0.0))))
            scale = np.float32(1.0) / total
            for unit in range(units):
                best[unit] = max(best[unit], bound[unit] * scale)
        for unit in range(units):
            c.score[unit] += best[unit]


# ---- key by key -----------------------------------------------------------------------------------------------------------
@inlined
def list_unit(r, first_slot, page_step, unit):
    """The tile list of one unit."""
    slot = first_slot + unit // UNITS * page_step + unit % UNITS * UNIT
    r.at[0], r.at[1] = slot, slot + TILE
    pad_list(r, 2)


@inlined
def ask_for_unit(plane, head_dim, first_slot, page_step, unit):
    """Ask for the codes of a unit, for soon."""
    at = (first_slot + unit // UNITS * page_step + unit % UNITS * UNIT) * head_dim // 4
    for line in range(0, UNIT * head_dim // 4, 64):
        simd.ask_ahead(plane.codes, at + line)


@inlined
def fold_unit(plane, c, r, rows, first_slot, page_step, unit):
    """Queries times the steps of a unit: r.fp, r.fs, and what the codes of its keys do not tell, r.fb."""
    strips = c.q16.shape[1] // 16
    page = (first_slot + unit // UNITS * page_step) // PAGE
    place = unit % UNITS
    step_scale = plane_scale(plane, page, UNITS + place)
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
def plane_scale(plane, page, i):
    return simd.get(plane.scale, page * 2 * UNITS + i)


@inlined
def scan_unit(plane, c, r, rows, first_slot, page_step, unit):
    """r.s: scores of the 32 keys of a unit from their 2-bit codes."""
    strips = c.q16.shape[1] // 16
    list_unit(r, first_slot, page_step, unit)
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
def add_unit(c, r, rows, block, unit):
    """Enter the scores of a unit's 32 keys, r.s, into its blocks."""
    for row in range(rows):
        at = row * S_ROW
        low, high = simd.load(r.s, at), simd.load(r.s, at + TILE)
        if block == UNIT:
            top = simd.lane_max_of_numbers(simd.larger(low, high))
            shift = simd.splat(top)
            c.m[row, unit] = top
            c.total[row, unit] = simd.lane_sum(simd.add(simd.exp(simd.sub(low, shift)), simd.exp(simd.sub(high, shift))))
        else:
            add_each(c, r, row, block, unit)


@helper
def add_each(c, r, row, block, unit):
    """The same key by key, for blocks that are no unit. Not inlined: LLVM would compute it even where it is not wanted."""
    for key in range(UNIT):
        add_keys(c, row, block, unit * UNIT + key, 1, r.s[row, key])


def add_own_unit(cache, stage, stage_slot, c, r, rows, block, slot, own_key, keys):
    """Enter the exact scores of the keys from own_key on, at most 32."""
    raise NotImplementedError("runs in compiled code only")


@by_type(add_own_unit)
def _add_own_unit(cache, stage, stage_slot, c, r, rows, block, slot, own_key, keys):
    staged = is_staged(cache)

    def run(cache, stage, stage_slot, c, r, rows, block, slot, own_key, keys):
        r.at[0], r.at[1] = slot, slot + TILE
        if staged:
            r.at[0], r.at[1] = stage_slot, stage_slot + TILE
        pad_list(r, 2)
        score_own(cache, stage, r, rows)
        for row in range(rows):
            for key in range(min(UNIT, keys - own_key)):
                add_keys(c, row, block, own_key + key, 1, r.s[row, key])

    return run


def score_own(cache, stage, r, rows):
    raise NotImplementedError("runs in compiled code only")


@by_type(score_own)
def _score_own(cache, stage, r, rows):
    if is_staged(cache):
        return lambda cache, stage, r, rows: score_int8(stage, cache.v, r, rows, 0, 2, False)
    return lambda cache, stage, r, rows: score_tiles(cache.k, cache.v, r, rows, 0, 2)


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


# ---- blocks ---------------------------------------------------------------------------------------------------------------
@helper
def pool_blocks(c, rows, group, blocks):
    """c.score[block]: its share of attention, of the query that wants it most, summed over the heads."""
    for b in range(blocks):
        c.score[b] = np.float32(0.0)
    best, share = c.best, c.share
    for i in range(group):
        for b in range(blocks):
            best[b] = np.float32(0.0)
        for row in range(i, rows, group):
            top = NO_SCORE
            for b in range(blocks):
                share[b] = c.m[row, b]
                top = max(top, share[b])
            shift = simd.splat(top)
            for b in range(0, blocks, 16):
                simd.store(share, b, simd.exp(simd.sub(simd.load(share, b), shift)))
            total = np.float32(0.0)
            for b in range(blocks):
                share[b] *= c.total[row, b]
                total += share[b]
            scale = np.float32(1.0) / total
            for b in range(blocks):
                best[b] = max(best[b], share[b] * scale)
        for b in range(blocks):
            c.score[b] += best[b]


@helper
def force(c, block, blocks, own_key):
    """Let the first block, and those that hold keys from own_key on, come before all others. Returns the score that they had."""
    had = c.score[0]
    c.score[0] = np.float32(np.inf)
    for b in range(max(1, own_key // block), blocks):
        had += c.score[b]
        c.score[b] = np.float32(np.inf)
    return had


@helper
def list_chosen(c, r, block, layers, kv_heads, first_page, layer, head, end_key):
    """The tile list of the kept blocks, of their keys below end_key. Returns the number of tiles."""
    count = 0
    for b in range((end_key + block - 1) // block):
        if c.kept[b]:
            first, end = b * block, min((b + 1) * block, end_key)
            for tile in range(first // TILE, (end + TILE - 1) // TILE):
                position = tile * TILE
                mask = ALL_KEYS
                if position < first or position + TILE > end:
                    mask = (ALL_KEYS << max(0, first - position)) & (ALL_KEYS >> max(0, position + TILE - end)) & ALL_KEYS
                if count > 0 and r.pos[count - 1] == position:
                    r.mask[count - 1] |= mask
                else:
                    r.at[count] = slot_of(layers, kv_heads, first_page, layer, head, position)
                    r.pos[count], r.mask[count] = position, mask
                    count += 1
    pad_list(r, count)
    return count


@helper
def estimate_missed(c, sparse, r, rows, own_key, blocks):
    """c.missed: the estimated share of attention outside the kept blocks, mean over the rows; call after they have been attended to. What
    was not looked at key by key counts as a unit of normally distributed scores would."""
    head_dim = c.q16.shape[1]
    for b in range(blocks):
        c.best[b] = np.float32(1.0) - np.float32(c.kept[b])
    missed = np.float32(0.0)
    for row in range(rows):
        top = simd.splat(r.m[row])
        outside = np.float32(0.0)
        for b in range(0, blocks, 16):
            weight = simd.mul(read_row(c.total, row, b, blocks), simd.exp(simd.sub(read_row(c.m, row, b, blocks), top)))
            outside += simd.lane_sum(simd.mul(weight, simd.first_lanes(simd.load(c.best, b), blocks - b, simd.splat(np.float32(0.0)))))
        if sparse.score == SCAN:
            outside += unscanned(c, row, sparse.block, own_key // UNIT, head_dim, top)
        missed += outside / (outside + r.total[row])
    c.missed[0] = missed / np.float32(rows)


@inlined
def unscanned(c, row, block, units, head_dim, top):
    """Σ e^(score − top), as expected, over the units that were neither scanned nor kept."""
    for unit in range(units):
        free = c.scanned[unit] == 0 and c.kept[unit * UNIT // block] == 0
        spread = c.spread[row, unit]
        likely = c.mid[row, unit] + min(np.float32(10.5 / head_dim) * spread * spread, WIDTHS * spread)
        c.share[unit] = likely if free else NO_SCORE
    whole = simd.splat(np.float32(0.0))
    none = simd.splat(NO_SCORE)
    for unit in range(0, units, 16):
        likely = simd.first_lanes(simd.load(c.share, unit), units - unit, none)
        whole = simd.add(whole, simd.exp(simd.add(simd.sub(likely, top), simd.splat(LOG_UNIT))))
    return simd.lane_sum(whole)


@inlined
def read_row(array, row, first, count):
    """16 numbers of a row of [rows, …], what is beyond `count` as 0."""
    return simd.first_lanes(simd.load(array, row * array.shape[1] + first), count - first, simd.splat(np.float32(0.0)))


def ask_for_keys(k, r, tiles):
    """Ask for the keys of the first tiles of the list: nobody has."""
    raise NotImplementedError("runs in compiled code only")


@by_type(ask_for_keys)
def _ask_for_keys(k, r, tiles):
    if is_record(k, FloatKV):
        return lambda k, r, tiles: None
    bytes_of = 4 if is_record(k, Q4K) else 1  # dimensions of a key in a byte of key_arrays

    def run(k, r, tiles):
        codes, lower = key_arrays(k)
        step = TILE * r.q.shape[1] // bytes_of
        for i in range(min(tiles, FIRST)):
            for line in range(0, step, 64):
                simd.ask_ahead(codes, r.at[i] // TILE * step + line)
                if bytes_of > 1:
                    simd.ask_ahead(lower, r.at[i] // TILE * step + line)

    return run


@helper
def block_masses(c, block, r, rows, keys, mass, at):
    """mass[at] float32 [blocks]: the share of attention that each block holds, mean over the rows; call after the kept ones have been
    attended to. True where the oracle scored the blocks, else as far as they were looked at. What the keys that are never scored hold
    (those of the
    unit that is not full, in blocks that are always kept) counts for the last block."""
    blocks = (keys + block - 1) // block
    for i in range(blocks):
        mass[at, i] = np.float32(0.0)
    for row in range(rows):
        outside = np.float32(0.0)
        for i in range(blocks):
            if c.kept[i] == 0 and c.total[row, i] > 0:
                outside += c.total[row, i] * exp_of(c.m[row, i] - r.m[row])
        for i in range(blocks):
            if c.total[row, i] > 0:
                share = c.total[row, i] * exp_of(c.m[row, i] - r.m[row]) / (outside + r.total[row])
                mass[at, i] += share / np.float32(rows)
    known = np.float32(0.0)
    for i in range(blocks):
        known += mass[at, i]
    mass[at, blocks - 1] += max(np.float32(0.0), np.float32(1.0) - known)


def attend_chosen(cache, stage, stage_slot, c, block, r, rows, layers, kv_heads, first_page, layer, head, own_key, end_key):
    """Let the rows see the kept blocks, keys below end_key; the rest as in attend_span."""
    raise NotImplementedError("runs in compiled code only")


@by_type(attend_chosen)
def _attend_chosen(cache, stage, stage_slot, c, block, r, rows, layers, kv_heads, first_page, layer, head, own_key, end_key):
    if not is_staged(cache):

        def run(cache, stage, stage_slot, c, block, r, rows, layers, kv_heads, first_page, layer, head, own_key, end_key):
            tiles = list_chosen(c, r, block, layers, kv_heads, first_page, layer, head, end_key)
            ask_for_keys(cache.k, r, tiles)
            attend_tiles(cache.k, cache.v, r, rows, tiles)

        return run

    def run_staged(cache, stage, stage_slot, c, block, r, rows, layers, kv_heads, first_page, layer, head, own_key, end_key):
        tiles = list_chosen(c, r, block, layers, kv_heads, first_page, layer, head, own_key)
        ask_for_keys(cache.k, r, tiles)
        attend_tiles(cache.k, cache.v, r, rows, tiles)
        tiles = list_tiles(r, layers, kv_heads, first_page, layer, head, own_key, end_key)
        attend_unit(stage, stage_slot, cache.k, cache.v, r, rows, tiles)

    return run_staged
