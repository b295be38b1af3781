"""Values weighted by what the softmax made of the scores, for every kind of value."""

from __future__ import annotations

import numpy as np

from qwenc.attention.ahead import key_arrays
from qwenc.attention.cache import Q4V, Q5K, TILE, FloatKV
from qwenc.attention.overloads import is_record
from qwenc.attention.rows import P_TOP, S_ROW, SEGMENT_KEYS, WORDS, rows_at_once, split_weights
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import make_values, strips_at_once
from qwenc.kernels.jit import by_type, inlined

# eight rows and more are prefill: see scores.py
STRIPS_1, STRIPS_2, STRIPS_4, STRIPS_8 = (strips_at_once(rows) for rows in (1, 2, 4, 8))
v8_1, v8_2, v8_4, v8_8 = (make_values("int8", rows, strips_at_once(rows), (256,) if rows < 8 else ()) for rows in (1, 2, 4, 8))
v8_one_1, v8_one_2, v8_one_4 = (make_values("int8", rows, 1, (256,)) for rows in (1, 2, 4))
v4_1, v4_2, v4_4, v4_8 = (make_values("q4", rows, 2, (64, 64, 32) if rows < 8 else ()) for rows in (1, 2, 4, 8))
v4_k8_1, v4_k8_2, v4_k8_4 = (make_values("q4", rows, 2, (256,)) for rows in (1, 2, 4))


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
            split_weights(r.weights, 0, r, first * SEGMENT_KEYS * 2 + lane * 32, width * 32, r.ps[0, first + lane], tiles, WORDS)
        p_at, size = first * SEGMENT_KEYS * 2, 16 * head_dim
        strip = 0
        while strip < strips:
            o_at, ps, decay = first * o_step + 16 * strip, r.ps, r.decay
            many = strips - strip
            if width == 8:
                v8_8(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, (k.codes,), strips, r.o, o_at, o_step)
                strip += STRIPS_8
            elif width == 4 and many >= STRIPS_4:
                v8_4(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, (k.codes,), strips, r.o, o_at, o_step)
                strip += STRIPS_4
            elif width == 4:
                v8_one_4(
                    v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, (k.codes,), strips, r.o, o_at, o_step
                )
                strip += 1
            elif width == 2 and many >= STRIPS_2:
                v8_2(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, (k.codes,), strips, r.o, o_at, o_step)
                strip += STRIPS_2
            elif width == 2:
                v8_one_2(
                    v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, (k.codes,), strips, r.o, o_at, o_step
                )
                strip += 1
            elif many >= STRIPS_1:
                v8_1(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, (k.codes,), strips, r.o, o_at, o_step)
                strip += STRIPS_1
            else:
                v8_one_1(
                    v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, None, first, (k.codes,), strips, r.o, o_at, o_step
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
    five = is_record(k, Q5K)
    v_1, v_2, v_4 = (v4_1, v4_2, v4_4) if five else (v4_k8_1, v4_k8_2, v4_k8_4)

    def run(k, v, r, rows, start, tiles):
        head_dim = r.q.shape[1]
        o_step = r.o.shape[1]
        strips = head_dim // 16
        groups = o_step // 32
        size = 256 * groups
        keys = key_arrays(k)
        first = 0
        while first < rows:
            width = rows_at_once(rows, first)
            for group in range(groups):
                p_at = (group * rows + first) * SEGMENT_KEYS * 2
                for lane in range(0, width, 2):
                    other = min(lane + 1, width - 1)
                    weigh_two(v, r, first + lane, first + other, group, groups, start, tiles)
                    split_weights(r.weights, 0, r, p_at + lane * 32, width * 32, r.ps[group, first + lane], tiles, False)
                    split_weights(r.weights, SEGMENT_KEYS, r, p_at + other * 32, width * 32, r.ps[group, first + other], tiles, False)
                o_at, strip = first * o_step + 32 * group, 2 * group
                ps, pl, decay = r.ps[group], r.pl[group], r.decay
                if width == 8:
                    v4_8(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, strips, r.o, o_at, o_step)
                elif width == 4:
                    v_4(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, strips, r.o, o_at, o_step)
                elif width == 2:
                    v_2(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, strips, r.o, o_at, o_step)
                else:
                    v_1(v.codes, r.at, start, tiles, size, strip, r.pp, p_at, ps, decay, pl, first, keys, strips, r.o, o_at, o_step)
            first += width

    return run


@inlined
def weigh_two(v, r, row_a, row_b, group, groups, start, tiles):
    """r.weights = p·step of a group of dimensions, for two rows; r.ps as in weigh_row; r.pl = Σ p·low. A NaN among the values is one in
    their step, and so in r.pl."""
    none = simd.splat(np.float32(0.0))
    top_a = top_b = total_a = total_b = none
    limit = min(r.limit[row_a], r.limit[row_b])
    half, middle = simd.splat(np.float32(0.5)), simd.splat(np.float32(-7.5))
    for i in range(tiles):
        at = (r.at[start + i] // 16 * groups + group) * 16
        low = simd.fma(simd.load_bytes(v.centre, at), half, middle)  # in steps
        step = simd.load_byte_floats(v.step, at)
        a, b = simd.load(r.s, row_a * S_ROW + 16 * i), simd.load(r.s, row_b * S_ROW + 16 * i)
        of_a, of_b = simd.mul(a, step), simd.mul(b, step)
        sum_a, sum_b = simd.fma(of_a, low, total_a), simd.fma(of_b, low, total_b)
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
