"""Scores of a few query rows with the keys of a list of tiles, for every kind of key."""

from __future__ import annotations

import numpy as np

from qwenc.attention.ahead import ask_first_lines, ask_key_ranges, ask_value_ranges
from qwenc.attention.cache import Q4V, Q5K, UNIT, UNITS, FloatKV, scales_at
from qwenc.attention.overloads import is_record
from qwenc.attention.rows import S_ROW, TINY, rows_at_once, split_queries
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import SEGMENT, make_scores
from qwenc.kernels.jit import by_type, inlined

MIDDLE = np.float32(15.5)  # of the codes 0 … 31 of keys
STEP = np.float32(15 / 31)  # of these, in steps of a channel
AHEAD = (4, 2)  # cache lines of a strip of int8 and of 4-bit values

# eight rows and more are prefill, where the same keys and values are read again and again: nothing to ask for ahead
int8_scores = [[make_scores("int8", rows, lines if rows < 8 else 0) for rows in (1, 2, 4, 8)] for lines in AHEAD]
(i8_1, i8_2, i8_4, i8_8), (i4_1, i4_2, i4_4, i4_8) = int8_scores
q5_1, q5_2, q5_4, q5_8 = (make_scores("q5", rows, 2 if rows < 8 else 0) for rows in (1, 2, 4, 8))


def prepare_rows(k, r, rows):
    """Bring r.q into the form in which keys are scored. Call after r.q is set, before anything is attended to."""
    raise NotImplementedError("runs in compiled code only")


@by_type(prepare_rows)
def _prepare_rows(k, r, rows):
    if is_record(k, FloatKV):
        return lambda k, r, rows: None
    return lambda k, r, rows: split_queries(r, rows)


def score_tiles(k, v, r, rows, start, tiles):
    """r.s = q·k for the keys of list entries start … start + tiles. v: the values, which are read next."""
    raise NotImplementedError("runs in compiled code only")


@by_type(score_tiles, inline=True)
def _score_tiles(k, v, r, rows, start, tiles):
    if is_record(k, FloatKV):
        return lambda k, v, r, rows, start, tiles: score_float(k, r, rows, start, tiles)
    if is_record(k, Q5K):
        return lambda k, v, r, rows, start, tiles: score_q5(k, v, r, rows, start, tiles)
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
                    k_8((k.codes,), k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            elif width == 4:
                for i in range(tiles):
                    ask_ranges(k, v, r, start + i)
                    k_4((k.codes,), k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            elif width == 2:
                for i in range(tiles):
                    ask_ranges(k, v, r, start + i)
                    k_2((k.codes,), k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            else:
                for i in range(tiles):
                    ask_ranges(k, v, r, start + i)
                    k_1((k.codes,), k.scale, r.at, start + i, strips, r.qp, q_at, r.qs, r.qo, first, v.codes, r.s, s_at + 16 * i, S_ROW)
            first += width

    return run


@inlined
def ask_ranges(k, v, r, i):
    """Ask for the scales of the values of list entry i, and of the keys a segment later. In chosen blocks nothing else would fetch them
    in time."""
    ask_key_ranges(k, r.at[i + SEGMENT], r.q.shape[1])
    ask_value_ranges(v, r.at[i], r.o.shape[1])
    ask_first_lines(k, v, r.at[i + SEGMENT], r.q.shape[1])


@inlined
def score_q5(k, v, r, rows, start, tiles):
    head_dim = r.q.shape[1]
    strips = head_dim // 16
    planes = (k.upper, k.lower, k.last)
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
                q5_8(planes, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            elif width == 4:
                q5_4(planes, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            elif width == 2:
                q5_2(planes, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            else:
                q5_1(planes, None, r.at, i, strips, r.fp, q_at, r.fs, r.fb, first, v.codes, r.s, s_at, S_ROW)
            first += width


@inlined
def fold_queries(k, unit, r, rows):
    """q·key = q·centre + (q·step)·(code − 15.5): the first term as a bias, q·step in 8 bits, far finer than codes."""
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
    top_a = top_b = bias_a = bias_b = sum_a = sum_b = simd.splat(np.float32(0.0))
    for d in range(0, head_dim, 16):
        centre, step = channel_centres(k, unit, head_dim, d), channel_steps(k, unit, head_dim, d)
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
    of_centre, of_step = channel_scales(k, unit)
    r.fs[row_a], r.fs[row_b] = unit_a * of_step, unit_b * of_step
    r.fb[row_a] = simd.lane_sum(bias_a) * of_centre - MIDDLE * r.fs[row_a] * simd.lane_sum(sum_a)
    r.fb[row_b] = simd.lane_sum(bias_b) * of_centre - MIDDLE * r.fs[row_b] * simd.lane_sum(sum_b)


# ---- ranges of channels: their centres and steps are 16 numbers of a strip times a scale of the unit each -------------------
@inlined
def channel_centres(k, unit, head_dim, d):
    return simd.load_eights(k.centre, (unit // UNITS * head_dim + d) * UNITS + unit % UNITS * 8, 8 * UNITS)


@inlined
def channel_steps(k, unit, head_dim, d):
    codes = simd.load_nibbles(k.step, (unit // UNITS * head_dim + d) * UNITS // 2 + unit % UNITS * 8)
    return simd.add(codes, simd.splat(np.float32(0.5)))


@inlined
def channel_scales(k, unit):
    """Scales of the centres and of the steps of codes."""
    at = scales_at(unit)
    return simd.get(k.scale, at), simd.get(k.scale, at + UNITS) * STEP
