"""Attention of a few query rows over a list of tiles of the cache: all of a context, or the blocks that were chosen."""

from __future__ import annotations

from qwenc.attention.cache import Q5K, Int8K
from qwenc.attention.overloads import is_record
from qwenc.attention.rows import list_tiles, softmax_segment
from qwenc.attention.scores import score_int8, score_tiles
from qwenc.attention.values import weigh_tiles
from qwenc.kernels.attention_tiles import SEGMENT
from qwenc.kernels.jit import by_type, helper, inlined


def attend_span(cache, stage, stage_slot, r, rows, layers, kv_heads, first_page, layer, head, begin_key, own_key, end_key):
    """Let the rows see the keys from begin_key (a multiple of 256) up to end_key, each row those below its limit. own_key: where the unit
    begins to which the rows' tokens belong; stage, stage_slot: where its keys lie while they have no codes of 5 bits."""
    raise NotImplementedError("runs in compiled code only")


@by_type(attend_span)
def _attend_span(cache, stage, stage_slot, r, rows, layers, kv_heads, first_page, layer, head, begin_key, own_key, end_key):
    if not is_staged(cache):

        def run(cache, stage, stage_slot, r, rows, layers, kv_heads, first_page, layer, head, begin_key, own_key, end_key):
            tiles = list_tiles(r, layers, kv_heads, first_page, layer, head, begin_key, end_key)
            attend_tiles(cache.k, cache.v, r, rows, tiles)

        return run

    def run_staged(cache, stage, stage_slot, r, rows, layers, kv_heads, first_page, layer, head, begin_key, own_key, end_key):
        coded = min(own_key, end_key)
        if coded > begin_key:
            attend_tiles(cache.k, cache.v, r, rows, list_tiles(r, layers, kv_heads, first_page, layer, head, begin_key, coded))
        if own_key < end_key:
            tiles = list_tiles(r, layers, kv_heads, first_page, layer, head, own_key, end_key)
            attend_unit(stage, stage_slot, cache.k, cache.v, r, rows, tiles)

    return run_staged


def stage_of(k):
    """Where the keys of the unit that decode fills are found, slot (layer·kv_heads + head)·32, if they wait for their codes."""
    raise NotImplementedError("runs in compiled code only")


@by_type(stage_of, inline=True)
def _stage_of(k):
    if is_record(k, Q5K):
        return lambda k: Int8K(k.tail, k.tail_scale)
    return lambda k: k


def is_staged(cache):
    """For overloads: whether keys get their codes only when their unit is full."""
    return is_record(cache[cache.fields.index("k")], Q5K)


@helper
def attend_tiles(k, v, r, rows, tiles):
    """Let the rows see the keys of the first `tiles` entries of the tile list, each row those below its limit."""
    for start in range(0, tiles, SEGMENT):
        count = min(SEGMENT, tiles - start)
        score_tiles(k, v, r, rows, start, count)
        finish_segment(k, v, r, rows, start, count)


@helper
def attend_unit(keys, slot, k, v, r, rows, tiles):
    """The same for at most 32 keys that lie in `keys` (Int8K) from `slot` on: the unit whose keys have no 4-bit codes yet. The list tells
    where their values are."""
    home_0, home_1 = r.at[0], r.at[1]
    r.at[0], r.at[1] = slot, slot + 16
    r.at[2] = r.at[3] = slot
    score_int8(keys, v, r, rows, 0, tiles)
    r.at[0], r.at[1] = home_0, home_1
    r.at[2] = r.at[3] = home_0
    finish_segment(k, v, r, rows, 0, tiles)


@inlined
def finish_segment(k, v, r, rows, start, count):
    for row in range(rows):
        softmax_segment(r, row, start, count)
    weigh_tiles(k, v, r, rows, start, count)
