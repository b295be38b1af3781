"""Which blocks of a long context a few query rows attend to.

Every unit of 32 keys is looked at through its centre and width (7 bytes a key), then key by key at 2 bits: all of them up to 8,192 keys, of
more the likeliest third, but no fewer than that, nor than four times the keys that are kept. A single key that matters hardly shows in the
centre and width of its unit, so what is left out here may be the answer.

A block's weight is the log-sum-exp of its keys' scores. One choice serves all heads of a kv head, and in prefill a tile of queries: a block
counts by the largest share of attention that it has with any of the queries, summed over the heads. The first block and those of the
current unit are always kept.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qwenc.attention.cache import PAGE, UNIT, UNITS, slot_of
from qwenc.attention.look import AHEAD, look, prepare_look
from qwenc.attention.rows import NO_SCORE
from qwenc.attention.scan import (
    TILES,
    add_keys,
    add_own_unit,
    add_scanned,
    add_unit,
    ask_for_unit,
    fold_page,
    list_unit,
    scan_unit,
    unit_slot,
)
from qwenc.attention.scores import score_tiles
from qwenc.attention.top import keep_top
from qwenc.kernels import simd
from qwenc.kernels.jit import helper, inlined

SCAN, SUMMARY, PROBE, ORACLE = range(4)  # in the order of settings.SPARSE_SCORES
WIDTHS = np.float32(4.0)  # steps from a unit's centre to where its best key is expected


class Sparse(NamedTuple):
    """How blocks are chosen. score: SCAN …; block: tokens; k: blocks kept at least; mass: share of the attention until which more
    are kept, up to `most` and to one block in `most_share`; probe: sampled keys; ratio: share of all blocks that is kept at least; group:
    queries that share a choice; from_keys: contexts shorter than this are attended to in full; scan_least, scan_times, scan_share: after
    the first look, that many units are scanned, or that many times those to keep, or one in so many."""

    score: int
    block: int
    k: int
    most: int
    most_share: int
    mass: float
    probe: int
    ratio: float
    group: int
    from_keys: int
    scan_least: int
    scan_times: int
    scan_share: int


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
    multiple of 32) on being theirs; stage, stage_slot: where those lie while they have no codes of 5 bits. Call after prepare_rows.
    Returns the number of blocks kept."""
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
            list_unit(r, unit_slot(first_slot, page_step, unit))
            score_tiles(cache.k, cache.v, r, rows, 0, TILES)
            add_unit(c, r, rows, sparse.block, unit)
    else:
        choose_scanned(sparse, c, rows, group, least, units)
        scan_chosen(cache.plane, c, r, rows, sparse.block, first_slot, page_step, units)
    if rows == group and keys - own_key <= UNIT:  # decode: a query's own unit counts too
        add_own_unit(
            cache, stage, stage_slot, c, r, rows, sparse.block, slot_of(layers, kv_heads, first_page, layer, head, own_key), own_key, keys
        )
    pool(c, rows, group, blocks, False)
    wanted = np.float32(0.0)
    if sparse.mass > 0:
        for i in range(blocks):
            wanted += np.float32(sparse.mass) * c.score[i]
    wanted -= force(c, sparse.block, blocks, own_key)
    most = max(least, min(sparse.most, blocks // sparse.most_share))
    return keep_top(c.score, blocks, least, wanted, most, c.kept)


@inlined
def scan_chosen(plane, c, r, rows, block, first_slot, page_step, units):
    """Look at the units that c.scanned names, key by key."""
    count = 0
    for unit in range(units):  # which they are depends on the text: a branch would be guessed wrong every other time
        c.order[count] = unit
        count += c.scanned[unit]
    for i in range(count, count + AHEAD):
        c.order[i] = units
    for i in range(AHEAD):
        ask_for_unit(plane, r.q.shape[1], unit_slot(first_slot, page_step, c.order[i]))
    page = -1
    for first in range(0, count, UNITS):
        some = min(UNITS, count - first)
        for i in range(some):
            unit = c.order[first + i]
            if unit // UNITS != page:
                page = unit // UNITS
                fold_page(plane, c, rows, unit_slot(first_slot, page_step, page * UNITS), page * UNITS)
            ask_for_unit(plane, r.q.shape[1], unit_slot(first_slot, page_step, c.order[first + i + AHEAD]))
            scan_unit(plane, c, r, rows, unit_slot(first_slot, page_step, unit), unit % UNITS, UNIT * i)
        add_scanned(c, r, rows, block, first, some)


@helper
def choose_scanned(sparse, c, rows, group, least, units):
    """Set c.scanned by unit, when `least` blocks are to be kept, and to 0 up to the end of the last page."""
    count = max(sparse.scan_least, sparse.scan_times * least * sparse.block // UNIT, units // sparse.scan_share)
    for unit in range(c.scanned.size):
        c.scanned[unit] = unit < units
    if count >= units:
        return
    pool(c, rows, group, units, True)
    keep_top(c.score, units, count, np.float32(0.0), units, c.scanned)
    c.scanned[0] = 1


# ---- shares of attention ---------------------------------------------------------------------------------------------------
@helper
def pool(c, rows, group, count, of_units):
    """c.score: the share of attention of each unit, as expected at best, or else of each block; that of the query that wants it most,
    summed over the heads."""
    for j in range(count):
        c.score[j] = np.float32(0.0)
    for i in range(group):
        for j in range(count):
            c.best[j] = np.float32(0.0)
        for row in range(i, rows, group):
            total = weigh_units(c, row, count) if of_units else weigh_blocks(c, row, count)
            scale = np.float32(1.0) / total
            for j in range(count):
                c.best[j] = max(c.best[j], c.share[j] * scale)
        for j in range(count):
            c.score[j] += c.best[j]


@helper
def weigh_units(c, row, units):
    """c.share = e^(best score that a unit can be expected to have − the largest of them). Returns the sum."""
    first = row * c.mid.shape[1]
    none, zero, widths = simd.splat(NO_SCORE), simd.splat(np.float32(0.0)), simd.splat(WIDTHS)
    top = none
    for unit in range(0, units, 16):
        best = simd.fma(widths, simd.load(c.spread, first + unit), simd.load(c.mid, first + unit))
        simd.store(c.share, unit, best)
        top = simd.larger(simd.first_lanes(best, units - unit, none), top)
    top, total = simd.splat(simd.lane_max_of_numbers(top)), zero
    for unit in range(0, units, 16):
        share = simd.exp(simd.sub(simd.load(c.share, unit), top))
        simd.store(c.share, unit, share)
        total = simd.add(total, simd.first_lanes(share, units - unit, zero))
    return simd.lane_sum(total)


@helper
def weigh_blocks(c, row, blocks):
    """c.share = Σ e^(score − the largest) of a block's keys. Returns the sum."""
    first = row * c.m.shape[1]
    none, zero = simd.splat(NO_SCORE), simd.splat(np.float32(0.0))
    top = none
    for b in range(0, blocks, 16):
        top = simd.larger(simd.first_lanes(simd.load(c.m, first + b), blocks - b, none), top)
    top, total = simd.splat(simd.lane_max_of_numbers(top)), zero
    for b in range(0, blocks, 16):
        share = simd.mul(simd.exp(simd.sub(simd.load(c.m, first + b), top)), simd.load(c.total, first + b))
        simd.store(c.share, b, share)
        total = simd.add(total, simd.first_lanes(share, blocks - b, zero))
    return simd.lane_sum(total)


@helper
def force(c, block, blocks, own_key):
    """Let the first block, and those that hold keys from own_key on, come before all others. Returns the score that they had."""
    had = c.score[0]
    c.score[0] = np.float32(np.inf)
    for b in range(max(1, own_key // block), blocks):
        had += c.score[b]
        c.score[b] = np.float32(np.inf)
    return had
