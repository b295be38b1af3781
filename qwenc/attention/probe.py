"""The reference engine's choice of blocks, kept for comparison: each query head alone, by the largest of a few sampled keys of a block."""

from __future__ import annotations

import numpy as np

from qwenc.attention.cache import Q5K, UNIT, FloatKV, slot_of
from qwenc.attention.overloads import is_record
from qwenc.attention.scores import MIDDLE, channel_centres, channel_scales, channel_steps
from qwenc.attention.select import budget
from qwenc.attention.top import keep_top
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import LAST_AT, LOWER_AT
from qwenc.kernels.jit import by_type, helper


@helper
def choose_probed(cache, sparse, c, r, layers, kv_heads, first_page, layer, head, own_key, keys):
    """Set c.kept by block for the one query row r.q[0]; the current block is always kept. Returns the number of blocks kept."""
    blocks = (keys + sparse.block - 1) // sparse.block
    last = own_key // sparse.block
    head_dim = r.q.shape[1]
    key = r.channel_low
    lowest, highest = np.float32(np.inf), np.float32(-np.inf)
    for b in range(last):
        step = max(1, sparse.block // sparse.probe)
        best = np.float32(-np.inf)
        for i in range(min(sparse.probe, sparse.block)):
            slot = slot_of(layers, kv_heads, first_page, layer, head, b * sparse.block + i * step)
            fetch_key(cache.k, slot, key, r.channel_step)
            score = np.float32(0.0)
            for d in range(head_dim):
                score += r.q[0, d] * key[d]
            best = max(best, score)
        c.score[b] = best
        lowest, highest = min(lowest, best), max(highest, best)
    scale = np.float32(1.0) / (highest - lowest) if highest > lowest else np.float32(0.0)
    for b in range(last):  # keep_top wants positive numbers; the order is what counts
        c.score[b] = np.float32(1.0) + (c.score[b] - lowest) * scale
    for b in range(last, blocks):
        c.score[b] = np.float32(np.inf)
    least = budget(sparse, blocks)
    return keep_top(c.score, blocks, least, np.float32(0.0), max(least, blocks - last), c.kept)


def fetch_key(k, slot, out, step):
    """The key at `slot` in float32; step: room for as many numbers."""
    raise NotImplementedError("runs in compiled code only")


@by_type(fetch_key)
def _fetch_key(k, slot, out, step):
    if is_record(k, FloatKV):

        def fetch_float(k, slot, out, step):
            for d in range(out.size):
                out[d] = simd.get(k.values, slot * out.size + d)

        return fetch_float
    return fetch_q5 if is_record(k, Q5K) else fetch_int8


def fetch_int8(k, slot, out, step):
    first = slot // 16 * 16 * out.size + 4 * (slot % 16)
    scale = simd.get(k.scale, slot)
    for d in range(out.size):
        out[d] = np.float32(simd.get(k.codes, first + d // 4 * 64 + d % 4)) * scale


def fetch_q5(k, slot, out, step):
    head_dim = out.size
    unit = slot // UNIT
    of_centre, of_step = channel_scales(k, unit)
    for d in range(0, head_dim, 16):
        simd.store(step, d, simd.mul(channel_steps(k, unit, head_dim, d), simd.splat(of_step)))
        simd.store(out, d, simd.mul(channel_centres(k, unit, head_dim, d), simd.splat(of_centre)))
    tile, in_tile = slot // 16, 4 * (slot % 16)
    for d in range(head_dim):
        strip, cell = d // 16, d % 16 // 4
        at = tile * 4 * head_dim + strip * 64 + in_tile + d % 4
        last_at = (tile * ((head_dim + 31) // 32) + strip // 2) * 64 + in_tile + d % 4
        upper, lower = simd.get(k.upper, at) >> 2 * cell & 3, simd.get(k.lower, at) >> LOWER_AT[cell] & 3
        code = upper << 3 | lower << 1 | simd.get(k.last, last_at) >> (4 * (strip % 2) + LAST_AT[cell]) & 1
        out[d] += step[d] * (np.float32(code) - MIDDLE)
