"""Attention of a few query rows over a list of tiles of the cache: all of a context, or the blocks that were chosen."""

from __future__ import annotations

import numpy as np

from qwenc.attention.cache import Q4K, Q4V, TILE, UNIT, FloatKV, Int8K
from qwenc.attention.overloads import is_record
from qwenc.attention.rows import (
    P_TOP,
    S_ROW,
    SEGMENT_KEYS,
    TINY,
    list_tiles,
    rows_at_once,
    softmax_segment,
    split_queries,
    split_weights,
)
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import SEGMENT, make_scores, make_values, strips_at_once
from qwenc.kernels.jit import by_type, helper, inlined

MIDDLE = np.float32(7.5)  # of the codes 0 … 15
AHEAD = (4, 2)  # cache lines of a strip of int8 and of 4-bit values

# eight rows and more are prefill, where the same keys and values are read again and again: nothing to ask for ahead
int8_scores = [[make_scores("int8", rows, lines if rows < 8 else 0) for rows in (1, 2, 4, 8)] for lines in AHEAD]
(i8_1, i8_2, i8_4, i8_8), (i4_1, i4_2, i4_4, i4_8) = int8_scores
q4_1, q4_2, q4_4, q4_8 = (make_scores("q4", rows, 2 if rows < 8 else 0) for rows in (1, 2, 4, 8))
STRIPS_1, STRIPS_2, STRIPS_4, STRIPS_8 = (strips_at_once(rows) for rows in (1, 2, 4, 8))
v8_1, v8_2, v8_4, v8_8 = (make_values("int8", rows, strips_at_once(rows), (256,) if rows < 8 else ()) for rows in (1, 2, 4, 8))
v8_one_1, v8_one_2, v8_one_4 = (make_values("int8", rows, 1, (256,)) for rows in (1, 2, 4))
v4_1, v4_2, v4_4, v4_8 = (make_values("q4", rows, 2, (64, 64) if rows < 8 else ()) for rows in (1, 2, 4, 8))
v4_k8_1, v4_k8_2, v4_k8_4 = (make_values("q4", rows, 2, (256,)) for rows in (1, 2, 4))


def prepare_rows(k, r, rows):
    """Bring r.q into the form in which keys are scored. Call after r.q is set, before anything is attended to."""
    raise NotImplementedError("runs in compiled code only")


@by_type(prepare_rows)
def _prepare_rows(k, r, rows):
    if is_record(k, FloatKV):
        return lambda k, r, rows: None
    return lambda k, r, rows: split_queries(r, rows)


def attend_span(cache, stage, stage_slot, r, rows, layers, kv_heads, first_page, layer, head, begin_key, own_key, end_key):
    """Let the rows see the keys from begin_key (a multiple of 256) up to end_key, each row those below its limit. own_key: where the unit
    begins to which the rows' tokens belong; stage, stage_slot: where its keys lie while they have no codes of 4 bits."""
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
    if is_record(k, Q4K):
        return lambda k: Int8K(k.tail, k.tail_scale)
    return lambda k: k


def is_staged(cache):
    """For overloads: whether keys get their codes only when their unit is full."""
    return is_record(cache[cache.fields.index("k")], Q4K)


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


# ---- scores ---------------------------------------------------------------------------------------------------------------
def score_tiles(k, v, r, rows, start, tiles):
    """r.s = q·k for the keys of list entries start … start + tiles. v: the values, which are read next."""
    raise NotImplementedError("runs in compiled code only")


@by_type(score_tiles, inline=True)
def _score_tiles(k, v, r, rows, start, tiles):
    if is_record(k, FloatKV):
        return lambda k, v, r, rows, start, tiles: score_float(k, r, rows, start, tiles)
    if is_record(k, Q4K):
        return lambda k, v, r, rows, start, tiles: score_q4(k, v, r, rows, start, tiles)
    return lambda k, v, r, rows, start, tiles: score_int8(k, v, r, rows, start, tiles)


@inlined
def score_float(k, r, rows, start, tiles):
    head_dim = r.q.shape[1]
    for i in range(tiles):
        for row in range(rows):
            for key in range(16):
                at = (r.at[start + i] + key) * head_dim
                product = simd.splat(np.float32(0.0))
                for d in range(0, head_dim, 16):
                    product = simd.fma(simd.load(r.q, row * head_dim + d), simd.load(k.values, at + d), product)
                r.s[row, 16 * i + key] = simd.lane_sum(product)


def score_int8(k, v, r, rows, start, tiles):
    """The same for keys of 8 bits."""
    raise NotImplementedError("runs in compiled code only")


@by_type(score_int8, inline=True)
def _score_int8(k, v, r, rows, start, tiles):
    k_1, k_2, k_4, k_8 = (i4_1, i4_2, i4_4, i4_8) if is_record(v, Q4V) else (i8_1, i8_2, i8_4, i8_8)

    def run(k, v, r, rows, start, tiles):
        head_dim = r.q.shape[1]
        strips = head_dim // 16
        first = 0
        while first < rows:
            width = rows_at_once(rows, first)
            q_at, s_at = first * head_dim * 2, first * S_ROW
            if width == 8:
                for i in range(tiles):
                    k_8(k.codes, None, k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            elif width == 4:
                for i in range(tiles):
                    ask_ranges(k, v, r, start + i)
                    k_4(k.codes, None, k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            elif width == 2:
                for i in range(tiles):
                    ask_ranges(k, v, r, start + i)
                    k_2(k.codes, None, k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            else:
                for i in range(tiles):
                    ask_ranges(k, v, r, start + i)
                    k_1(k.codes, None, k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            first += width

    return run


def ask_ranges(k, v, r, i):
    """Ask for the scales of the values of list entry i, and of the keys a segment later. In chosen blocks nothing else would fetch them
    in time."""
    raise NotImplementedError("runs in compiled code only")


@by_type(ask_ranges, inline=True)
def _ask_ranges(k, v, r, i):
    four_k, four_v = is_record(k, Q4K), is_record(v, Q4V)

    def run(k, v, r, i):
        head_dim = r.q.shape[1]
        coming = r.at[i + SEGMENT]
        if four_k:
            if coming % UNIT == 0:
                for d in range(0, head_dim, 32):  # a cache line
                    simd.ask_ahead(k.low, coming // UNIT * head_dim + d)
                    simd.ask_ahead(k.step, coming // UNIT * head_dim + d)
        else:
            simd.ask_ahead(k.scale, coming)
        if four_v:
            ranges = r.o.shape[1] // 2  # of a tile
            for d in range(0, ranges, 32):
                simd.ask_ahead(v.low, r.at[i] // TILE * ranges + d)
                simd.ask_ahead(v.step, r.at[i] // TILE * ranges + d)
        else:
            simd.ask_ahead(v.scale, r.at[i])

    return run


@inlined
def score_q4(k, v, r, rows, start, tiles):
    head_dim = r.q.shape[1]
    strips = head_dim // 16
    folded = -1
    for i in range(start, start + tiles):
        unit = r.at[i] // UNIT
        if unit != folded:
            fold_queries(k, unit, r, rows)
            folded = unit
        if rows < 8:
            ask_ranges(k, v, r, i)
        first = 0
        while first < rows:
            width = rows_at_once(rows, first)
            q_at, s_at = first * head_dim, first * S_ROW + 16 * (i - start)
            if width == 8:
                q4_8(k.upper, k.lower, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            elif width == 4:
                q4_4(k.upper, k.lower, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            elif width == 2:
                q4_2(k.upper, k.lower, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            else:
                q4_1(k.upper, k.lower, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            first += width


@inlined
def fold_queries(k, unit, r, rows):
    """q·(low + step·code) = q·(low + 7.5·step) + (q·step)·(code − 7.5): the first term as a bias, q·step in 8 bits, far finer than
    codes."""
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        for lane in range(0, width, 2):
            fold_two(k, unit, r, first + lane, first + min(lane + 1, width - 1), first, width)
        first += width


@inlined
def fold_two(k, unit, r, row_a, row_b, first, width):
    """The same for two rows of the `width` that one kernel takes, so that the ranges are read once for both."""
    head_dim = r.q.shape[1]
    at = unit * head_dim
    top_a = top_b = bias_a = bias_b = sum_a = sum_b = simd.splat(np.float32(0.0))
    middle = simd.splat(MIDDLE)
    for d in range(0, head_dim, 16):
        step = simd.load_half(k.step, at + d)
        centre = simd.fma(step, middle, simd.load_half(k.low, at + d))
        q_a, q_b = simd.load(r.q, row_a * head_dim + d), simd.load(r.q, row_b * head_dim + d)
        bias_a, bias_b = simd.fma(q_a, centre, bias_a), simd.fma(q_b, centre, bias_b)
        q_a, q_b = simd.mul(q_a, step), simd.mul(q_b, step)
        top_a, top_b = simd.larger(simd.absolute(q_a), top_a), simd.larger(simd.absolute(q_b), top_b)
        simd.store(r.weights, d, q_a)
        simd.store(r.weights, head_dim + d, q_b)
    largest_a, largest_b = simd.lane_max_of_numbers(top_a), simd.lane_max_of_numbers(top_b)
    unit_a, unit_b = largest_a * np.float32(1 / 127), largest_b * np.float32(1 / 127)
    factor_a = simd.splat(np.float32(1.0) / unit_a if unit_a > TINY else np.float32(0.0))
    factor_b = simd.splat(np.float32(1.0) / unit_b if unit_b > TINY else np.float32(0.0))
    for d in range(0, head_dim, 16):
        strip = first * head_dim + d * width
        x_a = simd.nearest(simd.mul(simd.load(r.weights, d), factor_a))
        x_b = simd.nearest(simd.mul(simd.load(r.weights, head_dim + d), factor_b))
        sum_a, sum_b = simd.add(sum_a, x_a), simd.add(sum_b, x_b)
        simd.store_bytes(r.fp, strip + 16 * (row_a - first), x_a)
        simd.store_bytes(r.fp, strip + 16 * (row_b - first), x_b)
    r.fs[row_a], r.fs[row_b] = unit_a, unit_b
    r.fb[row_a] = simd.lane_sum(bias_a) - MIDDLE * unit_a * simd.lane_sum(sum_a)
    r.fb[row_b] = simd.lane_sum(bias_b) - MIDDLE * unit_b * simd.lane_sum(sum_b)


# ---- values ---------------------------------------------------------------------------------------------------------------
def weigh_tiles(k, v, r, rows, start, tiles):
    """r.o = decay·r.o + Σ p·v over the keys of list entries start … start + tiles, p in r.s. k: the keys, which are read next."""
    raise NotImplementedError("runs in compiled code only")


@by_type(weigh_tiles, inline=True)
def _weigh_tiles(k, v, r, rows, start, tiles):
    if is_record(v, FloatKV):
        return lambda k, v, r, rows, start, tiles: weigh_float(v, r, rows, start, tiles)
    if is_record(v, Q4V):
        return lambda k, v, r, rows, start, tiles: weigh_q4(k, v, r, rows, start, tiles)
    return lambda k, v, r, rows, start, tiles: weigh_int8(k, v, r, rows, start, tiles)


@inlined
def weigh_float(v, r, rows, start, tiles):
    head_dim = r.q.shape[1]
    for row in range(rows):
        for d in range(0, head_dim, 16):
            total = simd.mul(simd.load(r.o, row * r.o.shape[1] + d), simd.splat(r.decay[row]))
            for i in range(16 * tiles):
                p = r.s[row, i]
                if p != 0:  # NaN counts; what nobody sees may hold anything
                    total = simd.fma(simd.splat(p), simd.load(v.values, (r.at[start + i // 16] + i % 16) * head_dim + d), total)
            simd.store(r.o, row * r.o.shape[1] + d, total)


@inlined
def weigh_int8(k, v, r, rows, start, tiles):
    head_dim = r.q.shape[1]
    o_step = r.o.shape[1]
    strips = head_dim // 16
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        for lane in range(width):
            weigh_row(v.scale, r, first + lane, start, tiles)
            split_weights(r.weights, 0, r, first * SEGMENT_KEYS * 2 + lane * 32, width * 32, r.ps[0, first + lane], tiles)
        p_at, size = first * SEGMENT_KEYS * 2, 16 * head_dim
        strip = 0
        while strip < strips:
            o_at, ps, decay = first * o_step + 16 * strip, r.ps, r.decay
            many = strips - strip
            if width == 8:
                v8_8(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, k.codes, None, strips, r.o, o_at, o_step)
                strip += STRIPS_8
            elif width == 4 and many >= STRIPS_4:
                v8_4(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, k.codes, None, strips, r.o, o_at, o_step)
                strip += STRIPS_4
            elif width == 4:
                v8_one_4(
                    v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, k.codes, None, strips, r.o, o_at, o_step
                )
                strip += 1
            elif width == 2 and many >= STRIPS_2:
                v8_2(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, k.codes, None, strips, r.o, o_at, o_step)
                strip += STRIPS_2
            elif width == 2:
                v8_one_2(
                    v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, k.codes, None, strips, r.o, o_at, o_step
                )
                strip += 1
            elif many >= STRIPS_1:
                v8_1(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, k.codes, None, strips, r.o, o_at, o_step)
                strip += STRIPS_1
            else:
                v8_one_1(
                    v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, k.codes, None, strips, r.o, o_at, o_step
                )
                strip += 1
        first += width


@inlined
def weigh_row(scale, r, row, start, tiles):
    """r.weights = p·(scale of v), and r.ps: what one unit of a weight's two pieces is worth. What nobody sees may hold anything, NaN
    too."""
    top = total = simd.splat(np.float32(0.0))
    for i in range(tiles):
        p = simd.load(r.s, row * S_ROW + 16 * i)
        weight = simd.mul(p, simd.load(scale, r.at[start + i]))
        if r.pos[start + i] + TILE > r.limit[row]:
            weight = simd.where_zero(p, p, weight)
        simd.store(r.weights, 16 * i, weight)
        top, total = simd.larger(weight, top), simd.add(total, weight)
    r.ps[0, row] = simd.lane_max_of_numbers(top) / P_TOP + np.float32(0.0) * simd.lane_sum(total)  # NaN if any weight is


def weigh_q4(k, v, r, rows, start, tiles):
    raise NotImplementedError("runs in compiled code only")


@by_type(weigh_q4, inline=True)
def _weigh_q4(k, v, r, rows, start, tiles):
    four = is_record(k, Q4K)
    v_1, v_2, v_4 = (v4_1, v4_2, v4_4) if four else (v4_k8_1, v4_k8_2, v4_k8_4)

    def run(k, v, r, rows, start, tiles):
        head_dim = r.q.shape[1]
        o_step = r.o.shape[1]
        strips = head_dim // 16
        groups = o_step // 32
        size = 256 * groups
        keys, keys_2 = key_arrays(k)
        first = 0
        while first < rows:
            width = rows_at_once(rows, first)
            for group in range(groups):
                p_at = (group * rows + first) * SEGMENT_KEYS * 2
                for lane in range(0, width, 2):
                    other = min(lane + 1, width - 1)
                    weigh_two(v, r, first + lane, first + other, group, groups, start, tiles)
                    split_weights(r.weights, 0, r, p_at + lane * 32, width * 32, r.ps[group, first + lane], tiles)
                    split_weights(r.weights, SEGMENT_KEYS, r, p_at + other * 32, width * 32, r.ps[group, first + other], tiles)
                o_at, strip = first * o_step + 32 * group, 2 * group
                ps, pl, decay = r.ps[group], r.pl[group], r.decay
                if width == 8:
                    v4_8(
                        v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, keys_2, strips, r.o, o_at, o_step
                    )
                elif width == 4:
                    v_4(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, keys_2, strips, r.o, o_at, o_step)
                elif width == 2:
                    v_2(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, keys_2, strips, r.o, o_at, o_step)
                else:
                    v_1(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, keys_2, strips, r.o, o_at, o_step)
            first += width

    return run


def key_arrays(k):
    """The one or two arrays of codes."""
    raise NotImplementedError("runs in compiled code only")


@by_type(key_arrays, inline=True)
def _key_arrays(k):
    if is_record(k, Q4K):
        return lambda k: (k.upper, k.lower)
    return lambda k: (k.codes, k.codes)


@inlined
def weigh_two(v, r, row_a, row_b, group, groups, start, tiles):
    """r.weights = p·step of a group of dimensions, for two rows; r.ps as in weigh_row; r.pl = Σ p·low. A NaN among the values is one in
    their `low`, and so in r.pl."""
    none = simd.splat(np.float32(0.0))
    top_a = top_b = total_a = total_b = none
    limit = min(r.limit[row_a], r.limit[row_b])
    for i in range(tiles):
        at = (r.at[start + i] // 16 * groups + group) * 16
        low, step = simd.load_half(v.low, at), simd.load_half(v.step, at)
        a, b = simd.load(r.s, row_a * S_ROW + 16 * i), simd.load(r.s, row_b * S_ROW + 16 * i)
        sum_a, sum_b = simd.fma(a, low, total_a), simd.fma(b, low, total_b)
        of_a, of_b = simd.mul(a, step), simd.mul(b, step)
        if r.pos[start + i] + TILE > limit:
            sum_a, sum_b = simd.where_zero(a, total_a, sum_a), simd.where_zero(b, total_b, sum_b)
            of_a, of_b = simd.where_zero(a, none, of_a), simd.where_zero(b, none, of_b)
        total_a, total_b, a, b = sum_a, sum_b, of_a, of_b
        top_a, top_b = simd.larger(a, top_a), simd.larger(b, top_b)
        simd.store(r.weights, 16 * i, a)
        simd.store(r.weights, SEGMENT_KEYS + 16 * i, b)
    r.ps[group, row_a] = simd.lane_max_of_numbers(top_a) / P_TOP
    r.ps[group, row_b] = simd.lane_max_of_numbers(top_b) / P_TOP
    r.pl[group, row_a], r.pl[group, row_b] = simd.lane_sum(total_a), simd.lane_sum(total_b)
