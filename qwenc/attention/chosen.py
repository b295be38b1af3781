"""Attention over the blocks that were chosen, and what it left out."""

from __future__ import annotations

import numpy as np

from qwenc.attention.ahead import ask_for_keys
from qwenc.attention.attend import attend_tiles, attend_unit, is_staged
from qwenc.attention.cache import TILE, UNIT, slot_of
from qwenc.attention.rows import ALL_KEYS, NO_SCORE, list_tiles, pad_list
from qwenc.attention.scan import exp_of
from qwenc.attention.select import SCAN, WIDTHS
from qwenc.kernels import simd
from qwenc.kernels.jit import by_type, helper, inlined

LOG_UNIT = np.float32(np.log(UNIT))


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


# ---- what was left out ------------------------------------------------------------------------------------------------------
@helper
def estimate_missed(c, sparse, r, rows, own_key, blocks):
    """c.missed: the estimated share of attention outside the kept blocks, mean over the rows; call after they have been attended to. What
    was not looked at key by key counts as a unit of normally distributed scores would."""
    head_dim = c.q16.shape[1]
    units = own_key // UNIT
    some_unscanned = sparse.score == SCAN and mark_unscanned(c, sparse.block, units)
    for b in range(blocks):
        c.best[b] = np.float32(1.0) - np.float32(c.kept[b])
    missed = np.float32(0.0)
    zero = simd.splat(np.float32(0.0))
    for row in range(rows):
        top, sums = simd.splat(r.m[row]), zero
        for b in range(0, blocks, 16):
            weight = simd.mul(read_row(c.total, row, b, blocks), simd.exp(simd.sub(read_row(c.m, row, b, blocks), top)))
            sums = simd.fma(weight, simd.first_lanes(simd.load(c.best, b), blocks - b, zero), sums)
        outside = simd.lane_sum(sums)
        if some_unscanned:
            outside += expect_unscanned(c, row, units, head_dim, top)
        missed += outside / (outside + r.total[row])
    c.missed[0] = missed / np.float32(rows)


@helper
def mark_unscanned(c, block, units):
    """c.score by unit: 0 if it was neither scanned nor kept, else −∞. Returns whether there are any."""
    some = False
    for unit in range(units):
        free = c.scanned[unit] == 0 and c.kept[unit if block == UNIT else unit * UNIT // block] == 0
        c.score[unit] = np.float32(0.0) if free else NO_SCORE
        some |= free
    return some


@inlined
def expect_unscanned(c, row, units, head_dim, top):
    """Σ e^(score − top), as expected, over the units that mark_unscanned found."""
    first = row * c.mid.shape[1]
    whole, none = simd.splat(np.float32(0.0)), simd.splat(NO_SCORE)
    widths, curve, of_keys = simd.splat(WIDTHS), simd.splat(np.float32(10.5 / head_dim)), simd.sub(simd.splat(LOG_UNIT), top)
    for unit in range(0, units, 16):
        spread = simd.load(c.spread, first + unit)
        above = simd.minimum(simd.mul(curve, simd.mul(spread, spread)), simd.mul(widths, spread))
        likely = simd.add(simd.add(simd.load(c.mid, first + unit), above), simd.add(simd.load(c.score, unit), of_keys))
        whole = simd.add(whole, simd.exp(simd.first_lanes(likely, units - unit, none)))
    return simd.lane_sum(whole)


@inlined
def read_row(array, row, first, count):
    """16 numbers of a row of [rows, …], what is beyond `count` as 0."""
    return simd.first_lanes(simd.load(array, row * array.shape[1] + first), count - first, simd.splat(np.float32(0.0)))


@helper
def block_masses(c, block, r, rows, keys, mass, at):
    """mass[at] float32 [blocks]: the share of attention that each block holds, mean over the rows; call after the kept ones have been
    attended to. True where the oracle scored the blocks, else as far as they were looked at. What the keys that are never scored hold
    (those of the unit that is not full, in blocks that are always kept) counts for the last block."""
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
