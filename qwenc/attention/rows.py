"""Query rows on their way through a context: what they are, the tiles that they look at, and the online softmax.

A row is one query head of one token. The rows of a call share a kv head, so each key and value is read once for all of them: the heads
of a group in decode, the heads of a group times a few tokens in prefill.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qwenc.attention.cache import PAGE, TILE, UNIT, slot_of
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import SEGMENT
from qwenc.kernels.jit import allocating, helper, inlined
from qwenc.kernels.level import LEVEL
from qwenc.kernels.linear_tiles import PIECES_TOP
from qwenc.kernels.pointwise import largest_of
from qwenc.kernels.wide import LANES

SIGNED_BIAS = LEVEL.signed_bias
WORDS = LEVEL.words
ROWS_MOST = LEVEL.tile_rows  # query rows that one tile holds in registers: 8 or 2
SEGMENT_KEYS = SEGMENT * TILE
S_ROW = SEGMENT_KEYS + 16  # scores of a row, and a cache line more: rows a power of two apart would crowd the same lines of the cache
PAD = SEGMENT  # entries behind the last of a tile list, which are read ahead

P_TOP = np.float32(16383.0)  # 128·127 + 127: the largest probability in two unsigned pieces
TINY = np.float32(1e-38)  # below it a reciprocal is infinite
NO_SCORE = np.float32(-np.inf)
ALL_KEYS = 0xFFFF


class Rows(NamedTuple):
    """Query rows and their running attention state, for one thread.

    q float32 [rows, head_dim]; o [rows, head_dim rounded up to 32]; m, total (running max and sum), decay, qs float32 [rows]; limit int64
    [rows]: keys that a row sees, counted from position 0; s float32 [rows, S_ROW]: scores of a segment; qp int8 [rows·head_dim·2], pp uint8
    [groups·rows·512]: queries and probabilities in two pieces, as the tiles read them; qo int32 [rows, 2]; ps, pl float32 [groups, rows]:
    scale of pp, and what 4-bit values add. fp, fs, fb: queries folded with the channel scales of a unit (qp, qs and a bias for it).
    weights float32 [512]; channel_low, channel_step float32 [head_dim], codes uint8 [32], unit_codes int8 [32·head_dim],
    unit_scale float32 [32]: room for writing keys and values.
    The tile list: at int64: slot of a tile's first token, pos: its position, mask: the keys that take part, a bit each.
    """

    q: np.ndarray
    o: np.ndarray
    m: np.ndarray
    total: np.ndarray
    decay: np.ndarray
    qs: np.ndarray
    limit: np.ndarray
    s: np.ndarray
    qp: np.ndarray
    pp: np.ndarray
    qo: np.ndarray
    ps: np.ndarray
    pl: np.ndarray
    fp: np.ndarray
    fs: np.ndarray
    fb: np.ndarray
    weights: np.ndarray
    channel_low: np.ndarray
    channel_step: np.ndarray
    codes: np.ndarray
    unit_codes: np.ndarray
    unit_scale: np.ndarray
    at: np.ndarray
    pos: np.ndarray
    mask: np.ndarray


@allocating
def new_rows(rows, head_dim, keys):
    """Room for `rows` query rows that look at up to `keys` keys at a time."""
    groups = (head_dim + 31) // 32
    tiles = (keys + TILE - 1) // TILE + PAD + 2
    return Rows(
        np.zeros((rows, head_dim), np.float32),
        np.zeros((rows, 32 * groups), np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.int64),
        np.zeros((rows, S_ROW), np.float32),
        np.zeros(rows * head_dim * 2, np.int8),
        np.zeros(groups * rows * SEGMENT_KEYS * 2, np.uint8),
        np.zeros((rows, 2), np.int32),
        np.zeros((groups, rows), np.float32),
        np.zeros((groups, rows), np.float32),
        np.zeros(rows * head_dim, np.int8),
        np.zeros(rows, np.float32),
        np.zeros(rows, np.float32),
        np.zeros(2 * SEGMENT_KEYS, np.float32),
        np.zeros(head_dim, np.float32),
        np.zeros(head_dim, np.float32),
        np.zeros(32, np.uint8),
        np.zeros(UNIT * head_dim, np.int8),
        np.zeros(UNIT, np.float32),
        np.zeros(tiles, np.int64),
        np.zeros(tiles, np.int64),
        np.zeros(tiles, np.int64),
    )


@helper
def begin(r, rows):
    """Forget what the rows have seen."""
    for i in range(rows):
        r.m[i] = NO_SCORE
        r.total[i] = np.float32(0.0)
        for d in range(r.o.shape[1]):
            r.o[i, d] = np.float32(0.0)


@inlined
def rows_at_once(rows, first):
    """How many rows the kernel that begins at `first` takes: the largest of 8, 4, 2, 1 that fits."""
    left = min(rows - first, ROWS_MOST)
    return 8 if left >= 8 else 4 if left >= 4 else 2 if left >= 2 else 1


# ---- the tile list --------------------------------------------------------------------------------------------------------
@helper
def list_tiles(r, layers, kv_heads, first_page, layer, head, begin_key, end_key):
    """Make the list of all tiles of the keys from begin_key (a multiple of 16) up to end_key. Returns their number."""
    count = 0
    page, last_page = begin_key // PAGE, (end_key + PAGE - 1) // PAGE
    while page < last_page:
        slot = slot_of(layers, kv_heads, first_page, layer, head, page * PAGE)
        for position in range(max(begin_key, page * PAGE), min(end_key, (page + 1) * PAGE), TILE):
            r.at[count] = slot + position % PAGE
            r.pos[count] = position
            r.mask[count] = ALL_KEYS
            count += 1
        page += 1
    pad_list(r, count)
    return count


@inlined
def pad_list(r, count):
    """Entries behind the last, for the kernels that look beyond it."""
    last = r.at[count - 1] if count > 0 else 0
    for i in range(count, count + PAD):
        r.at[i] = last


# ---- queries --------------------------------------------------------------------------------------------------------------
@helper
def split_queries(r, rows):
    """q to two signed pieces per value, with a scale per row: [strip][rows at once][2][16]; or to words, [strip][rows at once][16]."""
    head_dim = r.q.shape[1]
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        for lane in range(width):
            i = first + lane
            largest = largest_of(r.q, i * head_dim, head_dim)
            factor = simd.splat(PIECES_TOP / largest if largest > 0 else np.float32(0.0))
            r.qs[i] = largest / PIECES_TOP
            r.qo[i, 0] = r.qo[i, 1] = 0
            for d in range(0, head_dim, 16):
                at = first * head_dim * 2 + d * width * 2 + lane * 32
                q = simd.mul(simd.load(r.q, i * head_dim + d), factor)
                if WORDS:
                    simd.store_shorts(r.qp, at, q)
                else:
                    simd.store_pieces(r.qp, at, LANES, q, r.qo, 2 * i)
            r.qo[i, 0] *= -SIGNED_BIAS
            r.qo[i, 1] *= -SIGNED_BIAS
        first += width


# ---- softmax --------------------------------------------------------------------------------------------------------------
@inlined
def softmax_segment(r, row, start, tiles):
    """Turn the scores of one row into e^(s − m) for the keys of the tiles at list entry `start` that it sees, 0 for the others, and move
    its running max and sum along. Sets r.m, r.total, r.decay."""
    at = row * S_ROW
    old = r.m[row]
    limit = r.limit[row]
    none = simd.splat(NO_SCORE)
    top = simd.splat(old)
    for i in range(tiles):
        s = simd.load(r.s, at + 16 * i)
        visible = limit - r.pos[start + i]
        if visible < TILE or r.mask[start + i] != ALL_KEYS:
            s = simd.kept_lanes(s, r.mask[start + i], visible, none)
            simd.store(r.s, at + 16 * i, s)
        top = simd.larger(s, top)  # a NaN shows in the sum
    new = simd.lane_max(top)
    if new == NO_SCORE:  # nothing was visible, or what was is no number
        r.decay[row] = np.float32(1.0)
        whole = simd.splat(np.float32(0.0))
        for i in range(tiles):
            whole = simd.add(whole, simd.load(r.s, at + 16 * i))
            simd.store(r.s, at + 16 * i, simd.splat(np.float32(0.0)))
        bad = simd.lane_sum(whole)
        if bad != bad:
            r.total[row] = bad
        return
    shift = simd.splat(new)
    total = simd.splat(np.float32(0.0))
    for i in range(tiles):
        p = simd.exp(simd.sub(simd.load(r.s, at + 16 * i), shift))
        total = simd.add(total, p)
        simd.store(r.s, at + 16 * i, p)
    decay = simd.lane(simd.exp(simd.splat(old - new)), 0) if old > NO_SCORE else np.float32(0.0)
    r.decay[row] = decay
    r.total[row] = r.total[row] * decay + simd.lane_sum(total)
    r.m[row] = new


@inlined
def split_weights(weights, at, r, base, step, unit, tiles, words):
    """Weights from weights[at] on to two pieces below 128, each `unit` worth, or to words: r.pp[base + tile·step …]."""
    factor = simd.splat(np.float32(1.0) / unit if unit > TINY else np.float32(0.0))
    for i in range(tiles):
        weight = simd.mul(simd.load(weights, at + 16 * i), factor)
        if words:
            simd.store_shorts(r.pp, base + step * i, weight)
        else:
            simd.store_pieces(r.pp, base + step * i, LANES, weight, None, 0)
