"""Exact attention of a few query rows over pages of the cache, with an online softmax.

A row is one query head of one token. The rows of a call share a kv head, so each key and value is read once for all of them: the heads
of a group in decode, the heads of a group times a few tokens in prefill.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload, register_jitable

from qwenc.attention.cache import PAGE, PAGE_CELLS, FloatKV
from qwenc.kernels import simd
from qwenc.kernels.jit import helper
from qwenc.kernels.level import LEVEL
from qwenc.kernels.tiles import PIECES_TOP, make_scores, make_weighted_values

SIGNED_BIAS = LEVEL.signed_bias
ROWS_MOST = LEVEL.tile_rows  # query rows that one tile holds in registers: 8 or 2
scores_1, scores_2, scores_4, scores_8 = (make_scores(rows) for rows in (1, 2, 4, 8))
values_1, values_2, values_4, values_8 = (make_weighted_values(rows) for rows in (1, 2, 4, 8))

P_TOP = np.float32(16383.0)  # 128·127 + 127: the largest probability in two unsigned pieces
NO_SCORE = np.float32(-np.inf)


class Rows(NamedTuple):
    """Query rows and their running attention state, for one thread.

    q, o float32 [rows, head_dim]; m, total (running max and sum), decay, ps, qs float32 [rows]; limit int64 [rows]: keys that a row sees;
    s float32 [rows, 256]: scores of a page; qp int8 [rows·head_dim·2], pp uint8 [rows·256·2]: queries and probabilities in two
    pieces, as the tiles read them; qo int32 [rows, 2].
    """

    q: np.ndarray
    o: np.ndarray
    m: np.ndarray
    total: np.ndarray
    decay: np.ndarray
    ps: np.ndarray
    qs: np.ndarray
    limit: np.ndarray
    s: np.ndarray
    qp: np.ndarray
    pp: np.ndarray
    qo: np.ndarray


@helper
def new_rows(rows, head_dim):
    """Room for `rows` query rows."""
    return Rows(
        np.zeros((rows, head_dim), np.float32),
        np.zeros((rows, head_dim), np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int64),
        np.zeros((rows, PAGE), np.float32),
        np.zeros(rows * head_dim * 2, np.int8),
        np.zeros(rows * PAGE * 2, np.uint8),
        np.zeros((rows, 2), np.int32),
    )


@helper
def begin(r, rows):
    """Forget what the rows have seen."""
    for i in range(rows):
        r.m[i] = NO_SCORE
        r.total[i] = np.float32(0.0)
        for d in range(r.o.shape[1]):
            r.o[i, d] = np.float32(0.0)


@register_jitable
def tile_rows(rows, first):
    """How many rows the tile that begins at `first` takes: the largest of 8, 4, 2, 1 that fits."""
    left = min(rows - first, ROWS_MOST)
    return 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1


# ---- int8 -----------------------------------------------------------------------------------------------------------------
@helper
def split_queries(r, rows):
    """q to two signed pieces per value, with a scale per row."""
    head_dim = r.q.shape[1]
    first = 0
    while first < rows:
        width = tile_rows(rows, first)
        for lane in range(width):
            i = first + lane
            top = simd.absolute(simd.load(r.q, i * head_dim))
            for d in range(16, head_dim, 16):
                top = simd.maximum(top, simd.absolute(simd.load(r.q, i * head_dim + d)))
            largest = simd.lane_max(top)
            factor = simd.splat(PIECES_TOP / largest if largest > 0 else np.float32(0.0))
            r.qs[i] = largest / PIECES_TOP
            r.qo[i, 0] = r.qo[i, 1] = 0
            for d in range(0, head_dim, 16):
                at = first * head_dim * 2 + (d // 4) * width * 8 + lane * 8
                simd.store_two_pieces(r.qp, at, width * 8, simd.mul(simd.load(r.q, i * head_dim + d), factor), r.qo, 2 * i)
            r.qo[i, 0] *= -SIGNED_BIAS
            r.qo[i, 1] *= -SIGNED_BIAS
        first += width


@helper
def page_scores_int8(k, ks, r, rows, keys):
    """r.s = q·k for the first `keys` keys of a page (rounded up to tiles of 16). k, ks: one page of one kv head."""
    head_dim = r.q.shape[1]
    cells = head_dim // 4
    for key in range(0, keys, 16):
        first = 0
        while first < rows:
            width = tile_rows(rows, first)
            k_at, q_at, s_at = key * head_dim, first * head_dim * 2, first * PAGE + key
            if width == 8:
                scores_8(k, k_at, ks, key, r.qp, q_at, r.qs, r.qo, first, cells, r.s, s_at, PAGE)
            elif width == 4:
                scores_4(k, k_at, ks, key, r.qp, q_at, r.qs, r.qo, first, cells, r.s, s_at, PAGE)
            elif width == 2:
                scores_2(k, k_at, ks, key, r.qp, q_at, r.qs, r.qo, first, cells, r.s, s_at, PAGE)
            else:
                scores_1(k, k_at, ks, key, r.qp, q_at, r.qs, r.qo, first, cells, r.s, s_at, PAGE)
            first += width


@helper
def page_values_int8(v, r, rows, cells):
    """r.o = decay·r.o + Σ p·v over the first 4·cells keys of a page. v: one page of one kv head."""
    head_dim = r.q.shape[1]
    for d in range(0, head_dim, 16):
        v_at = (d // 16) * PAGE_CELLS * 64
        first = 0
        while first < rows:
            width = tile_rows(rows, first)
            p_at, o_at = first * PAGE * 2, first * head_dim + d
            if width == 8:
                values_8(v, v_at, r.pp, p_at, r.ps, r.decay, first, cells, r.o, o_at, head_dim)
            elif width == 4:
                values_4(v, v_at, r.pp, p_at, r.ps, r.decay, first, cells, r.o, o_at, head_dim)
            elif width == 2:
                values_2(v, v_at, r.pp, p_at, r.ps, r.decay, first, cells, r.o, o_at, head_dim)
            else:
                values_1(v, v_at, r.pp, p_at, r.ps, r.decay, first, cells, r.o, o_at, head_dim)
            first += width


@helper
def softmax_page(r, row, keys):
    """Turn the scores of one row into e^(s − m), where the first `keys` count, and move its running max and sum along.
    The rest of the page becomes 0. Returns nothing; sets r.m, r.total, r.decay."""
    at = row * PAGE
    old = r.m[row]
    if keys <= 0:
        r.decay[row] = np.float32(1.0)
        for i in range(0, PAGE, 16):
            simd.store(r.s, at + i, simd.splat(np.float32(0.0)))
        return
    floor = simd.splat(NO_SCORE)
    top = simd.splat(old)
    for i in range(0, keys, 16):
        top = simd.maximum(top, simd.first_lanes(simd.load(r.s, at + i), keys - i, floor))
    new = simd.lane_max(top)
    shift = simd.splat(new)
    total = simd.splat(np.float32(0.0))
    zero = simd.splat(np.float32(0.0))
    for i in range(0, keys, 16):
        p = simd.exp(simd.sub(simd.load(r.s, at + i), shift))
        p = simd.first_lanes(p, keys - i, zero)
        total = simd.add(total, p)
        simd.store(r.s, at + i, p)
    for i in range((keys + 15) // 16 * 16, PAGE, 16):
        simd.store(r.s, at + i, zero)
    decay = simd.lane(simd.exp(simd.splat(old - new)), 0) if old > NO_SCORE else np.float32(0.0)
    r.decay[row] = decay
    r.total[row] = r.total[row] * decay + simd.lane_sum(total)
    r.m[row] = new


@helper
def split_probabilities(vs, r, rows, first, lane, width, visible, keys):
    """p·(scale of v) of one row to two pieces below 128, scaled to the largest of the page. Values of masked keys are never looked at."""
    row = first + lane
    at = row * PAGE
    zero = simd.splat(np.float32(0.0))
    top = zero
    for i in range(0, visible, 16):
        p = simd.mul(simd.load(r.s, at + i), simd.load(vs, i))
        p = simd.first_lanes(p, visible - i, zero)
        simd.store(r.s, at + i, p)
        top = simd.maximum(top, p)
    largest = simd.lane_max(top)
    r.ps[row] = largest / P_TOP
    factor = simd.splat(P_TOP / largest if largest > 0 else np.float32(0.0))
    for i in range(0, keys, 16):
        pp_at = first * PAGE * 2 + (i // 4) * width * 8 + lane * 8
        simd.store_two_pieces(r.pp, pp_at, width * 8, simd.mul(simd.load(r.s, at + i), factor), None, 0)


# ---- both kinds -----------------------------------------------------------------------------------------------------------
def prepare_rows(cache, r, rows):
    """Bring r.q into the form in which the pages of `cache` are scored. Call after r.q is set, before `attend_page`."""
    raise NotImplementedError("runs in compiled code only")


def attend_page(cache, page, layer, head, r, rows, keys):
    """Let the rows see the first `keys` keys of a page, each row only those below its limit (r.limit, counted from position 0)."""
    raise NotImplementedError("runs in compiled code only")


def _is_float(cache: types.Type) -> bool:
    return isinstance(cache, types.BaseNamedTuple) and cache.instance_class is FloatKV


@overload(prepare_rows)
def _prepare_rows(cache, r, rows):
    if _is_float(cache):
        return lambda cache, r, rows: None
    return lambda cache, r, rows: split_queries(r, rows)


@overload(attend_page)
def _attend_page(cache, page, layer, head, r, rows, keys):
    if _is_float(cache):
        return _attend_page_float

    def attend_int8(cache, page, layer, head, r, rows, keys):
        page_scores_int8(cache.k[page, layer, head], cache.ks[page, layer, head], r, rows, keys)
        vs = cache.vs[page, layer, head]
        first = 0
        while first < rows:
            width = tile_rows(rows, first)
            for lane in range(width):
                visible = min(keys, r.limit[first + lane] - page * PAGE)
                softmax_page(r, first + lane, visible)
                split_probabilities(vs, r, rows, first, lane, width, visible, (keys + 15) // 16 * 16)
            first += width
        page_values_int8(cache.v[page, layer, head], r, rows, (keys + 3) // 4)

    return attend_int8


def _attend_page_float(cache, page, layer, head, r, rows, keys):
    head_dim = r.q.shape[1]
    k, v = cache.k[page, layer, head], cache.v[page, layer, head]
    for row in range(rows):
        visible = min(keys, r.limit[row] - page * PAGE)
        for key in range(visible):
            product = simd.splat(np.float32(0.0))
            for d in range(0, head_dim, 16):
                product = simd.fma(simd.load(r.q, row * head_dim + d), simd.load(k, key * head_dim + d), product)
            r.s[row, key] = simd.lane_sum(product)
        softmax_page(r, row, visible)
        for d in range(0, head_dim, 16):
            total = simd.mul(simd.load(r.o, row * head_dim + d), simd.splat(r.decay[row]))
            for key in range(visible):
                total = simd.fma(simd.splat(r.s[row, key]), simd.load(v, key * head_dim + d), total)
            simd.store(r.o, row * head_dim + d, total)
