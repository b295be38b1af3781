"""Float32 weight rows in, codes and scales in the tile layout of the packed file out (docs/architecture.md).

A row tile is turned to [K, 16] first: its 16 rows are then the SIMD lanes of every loop, and no sum is reordered.
A NaN or infinite weight makes the scale of its group NaN, so that inference meets it and stops instead of going on with a clipped value.
"""

from __future__ import annotations

import numpy as np

from qwenc.checkpoint.layout import GROUP, TILE
from qwenc.kernels.jit import helper, jit

# The unrounded code to which a candidate scale maps the extreme weight of a group. Beyond −8 the extreme is clipped, which may serve the
# other 31. Scales may be negative, so both signs of the extreme are covered. Squared error is within 0.1 % of a search 50 times finer.
Q4_EXTREME_CODES = np.arange(-9.0, -5.25, 0.25).astype(np.float32)
Q8_MAX = 127
ROUNDER = np.float32(12582912.0)  # 1.5·2^23: adding it leaves no bits for a fraction
# The same for 8 bits. 127 first: of equals the finest scale wins.
Q8_EXTREME_CODES = np.arange(127.0, 95.0, -1.0).astype(np.float32)


def pack_f32(rows: np.ndarray) -> np.ndarray:
    """rows float32 [16·m, K] -> values float32 [m, K, 16]."""
    tiles = _checked(rows)
    return np.ascontiguousarray(tiles.transpose(0, 2, 1))


def pack_q8(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows float32 [16·m, 32·g] -> codes int8 [m, g, 512], scales (float16 bits) uint16 [m, g, 16]. Frees the GIL."""
    tiles = _checked(rows)
    count, groups = len(tiles), tiles.shape[2] // GROUP
    scales = np.empty((count, groups, TILE), np.float32)
    _q8_scales(tiles, Q8_EXTREME_CODES, scales)
    half = _to_half(scales)
    codes = np.empty((count, groups, GROUP * TILE), np.int8)
    _q8_codes(tiles, half.astype(np.float32), codes)
    return codes, half.view(np.uint16)


def pack_q4(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """rows float32 [16·m, 32·g] -> codes uint8 [m, g, 256], scales (float16 bits) uint16 [m, g, 16]. Frees the GIL."""
    tiles = _checked(rows)
    count, groups = len(tiles), tiles.shape[2] // GROUP
    scales = np.empty((count, groups, TILE), np.float32)
    _q4_scales(tiles, Q4_EXTREME_CODES, scales)
    half = _to_half(scales)
    codes = np.empty((count, groups, GROUP * TILE // 2), np.uint8)
    _q4_codes(tiles, half.astype(np.float32), codes)
    return codes, half.view(np.uint16)


def _checked(rows: np.ndarray) -> np.ndarray:
    """rows [16·m, K] as [m, 16, K], contiguous."""
    if rows.dtype != np.float32 or rows.ndim != 2 or rows.shape[0] % TILE or rows.shape[1] % GROUP:
        raise ValueError(f"rows must be float32 [{TILE}·m, {GROUP}·g], not {rows.dtype} {rows.shape}")
    return np.ascontiguousarray(rows).reshape(rows.shape[0] // TILE, TILE, rows.shape[1])


def _to_half(scales: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):  # a scale beyond float16 becomes infinite, on purpose
        return scales.astype(np.float16)


@helper
def _load_group(tiles, tile, group, weights):
    """weights[k, r] = row r of the tile at input k of the group."""
    for r in range(TILE):
        for k in range(GROUP):
            weights[k, r] = tiles[tile, r, group * GROUP + k]


@helper
def _find_extremes(weights, extreme, poison):
    """Per row: the weight of largest magnitude, sign kept, and 0 or, where a weight is not finite, NaN."""
    for r in range(TILE):
        extreme[r] = np.float32(0)
        poison[r] = np.float32(0)
    for k in range(GROUP):
        for r in range(TILE):
            w = weights[k, r]
            extreme[r] = w if abs(w) > abs(extreme[r]) else extreme[r]
            poison[r] += w * np.float32(0)


@helper
def _load_normalised(tiles, tile, group, weights, extreme, inverse, poison):
    """The group with every row divided by its extreme, which so becomes 1: squares then stay in range whatever the weights. inverse =
    1/extreme."""
    _load_group(tiles, tile, group, weights)
    _find_extremes(weights, extreme, poison)
    for r in range(TILE):
        inverse[r] = _inverse(extreme[r])
    for k in range(GROUP):
        for r in range(TILE):
            weights[k, r] *= inverse[r]


@helper
def _nearest(value, least, most):
    """Rounds half to even and clips; NaN gives `least`."""
    clipped = value if value > least else least
    clipped = clipped if clipped < most else most
    return (clipped + ROUNDER) - ROUNDER


@helper
def _inverse(scale):
    return np.float32(1) / scale if scale != 0 else np.float32(0)


@helper
def _as_half(x):
    """x rounded to the 11 significant bits of a float16 (Veltkamp's splitting)."""
    c = x * np.float32(8193)
    return c - (c - x)


@jit
def _q8_scales(tiles, extreme_codes, scales):
    """The scale of least squared error among those that map the extreme weight to one of `extreme_codes`.

    max|w|/127 is not the best: weights that were on a grid before (a dequantised checkpoint) fall back onto it with a slightly larger
    scale.
    """
    weights = np.empty((GROUP, TILE), np.float32)
    extreme = np.empty(TILE, np.float32)
    poison = np.empty(TILE, np.float32)
    step = np.empty(TILE, np.float32)
    inverse = np.empty(TILE, np.float32)
    code_of = np.empty(TILE, np.float32)
    error = np.empty(TILE, np.float32)
    least = np.empty(TILE, np.float32)
    best = np.empty(TILE, np.float32)
    for tile in range(scales.shape[0]):
        for group in range(scales.shape[1]):
            _load_normalised(tiles, tile, group, weights, extreme, inverse, poison)
            for r in range(TILE):
                extreme[r] = abs(extreme[r])  # codes are symmetric: the sign does not matter
                least[r] = np.float32(np.inf)
                best[r] = np.float32(0)
            for extreme_code in extreme_codes:
                for r in range(TILE):
                    step[r] = _as_half(extreme[r] / extreme_code) * abs(inverse[r])  # the scale in units of the extreme
                    code_of[r] = _inverse(step[r])
                    error[r] = np.float32(0)
                for k in range(GROUP):
                    for r in range(TILE):
                        w = weights[k, r]
                        code = (w * code_of[r] + ROUNDER) - ROUNDER  # at most 127: no clipping needed
                        miss = w - code * step[r]
                        error[r] += miss * miss
                for r in range(TILE):
                    better = error[r] < least[r]
                    least[r] = error[r] if better else least[r]
                    best[r] = extreme[r] / extreme_code if better else best[r]
            for r in range(TILE):
                scales[tile, group, r] = best[r] + poison[r]


@jit
def _q8_codes(tiles, scales, codes):
    """code = w / scale, rounded, for scales that already went through float16."""
    weights = np.empty((GROUP, TILE), np.float32)
    inverse = np.empty(TILE, np.float32)
    for tile in range(scales.shape[0]):
        for group in range(scales.shape[1]):
            _load_group(tiles, tile, group, weights)
            for r in range(TILE):
                inverse[r] = _inverse(scales[tile, group, r])
            for j in range(GROUP // 4):
                for r in range(TILE):
                    for b in range(4):
                        code = _nearest(weights[4 * j + b, r] * inverse[r], np.float32(-Q8_MAX), np.float32(Q8_MAX))
                        codes[tile, group, (j * TILE + r) * 4 + b] = np.int8(np.int32(code))


@jit
def _q4_scales(tiles, extreme_codes, scales):
    """The scale of least squared error.

    For given codes c the best scale is <w,c>/<c,c>, and it removes <w,c>²/<c,c> of the error: each candidate is rounded to codes, judged by
    that, and the best one's closed-form scale is kept.
    """
    weights = np.empty((GROUP, TILE), np.float32)
    extreme = np.empty(TILE, np.float32)
    poison = np.empty(TILE, np.float32)
    inverse = np.empty(TILE, np.float32)
    wc = np.empty(TILE, np.float32)
    cc = np.empty(TILE, np.float32)
    gain = np.empty(TILE, np.float32)
    best = np.empty(TILE, np.float32)
    for tile in range(scales.shape[0]):
        for group in range(scales.shape[1]):
            _load_normalised(tiles, tile, group, weights, extreme, inverse, poison)
            for r in range(TILE):
                gain[r] = np.float32(0)
                best[r] = np.float32(0)
            for extreme_code in extreme_codes:
                for r in range(TILE):
                    wc[r] = np.float32(0)
                    cc[r] = np.float32(0)
                for k in range(GROUP):
                    for r in range(TILE):
                        code = _nearest(weights[k, r] * extreme_code, np.float32(-8), np.float32(7))
                        wc[r] += weights[k, r] * code
                        cc[r] += code * code
                for r in range(TILE):
                    ratio = wc[r] / cc[r] if cc[r] > 0 else np.float32(0)
                    better = ratio * wc[r] > gain[r]
                    gain[r] = ratio * wc[r] if better else gain[r]
                    best[r] = ratio if better else best[r]
            for r in range(TILE):
                scales[tile, group, r] = best[r] * extreme[r] + poison[r]


@jit
def _q4_codes(tiles, scales, codes):
    """Codes for scales that already went through float16; byte (j·16 + r)·4 + b holds k = 4j + b (low) and 16 + 4j + b (high)."""
    weights = np.empty((GROUP, TILE), np.float32)
    inverse = np.empty(TILE, np.float32)
    low, high = np.float32(-8), np.float32(7)
    for tile in range(scales.shape[0]):
        for group in range(scales.shape[1]):
            _load_group(tiles, tile, group, weights)
            for r in range(TILE):
                inverse[r] = _inverse(scales[tile, group, r])
            for j in range(GROUP // 8):
                for r in range(TILE):
                    for b in range(4):
                        first = np.int32(_nearest(weights[4 * j + b, r] * inverse[r], low, high)) + 8
                        second = np.int32(_nearest(weights[16 + 4 * j + b, r] * inverse[r], low, high)) + 8
                        codes[tile, group, (j * TILE + r) * 4 + b] = np.uint8(first | (second << 4))
