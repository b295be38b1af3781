"""The largest of many numbers, without sorting them."""

from __future__ import annotations

import numpy as np

from qwenc.kernels import simd
from qwenc.kernels.jit import helper, inlined

INFINITY_BITS = 0x7F800000


@helper
def keep_top(score, count, least, wanted, most, kept):
    """Set kept[i] to 1 for the largest of score[:count] (none below 0), else 0: as few as are at least `least` and whose finite scores sum
    to `wanted`, but at most `most`. Infinite scores are all kept, and count. The lower index wins among equals. Returns how many.
    score has room for 16 more.

    Bisects the threshold over the bits of the numbers, which order as the numbers do.
    """
    low, high = 0, INFINITY_BITS + 1  # enough are at least `low`, not enough at least `high`
    while high - low > 1:
        middle = (low + high) // 2
        number = count_from(score, count, simd.float_of_bits(middle))
        enough = number >= least
        if wanted > 0 and enough:
            enough = sum_from(score, count, simd.float_of_bits(middle)) >= wanted
        if enough or number >= most:
            low = middle
            if number == least:  # fewer would not do
                break
        else:
            high = middle
    threshold = simd.float_of_bits(low)
    number, held = 0, np.float32(0.0)
    for i in range(count):
        above = score[i] > threshold
        kept[i] = above
        number += above
    if wanted > 0:
        for i in range(count):
            held += score[i] if kept[i] and score[i] < np.inf else np.float32(0.0)
    for i in range(count):
        if score[i] == threshold and (low == INFINITY_BITS or (number < most and (number < least or held < wanted))):
            kept[i] = 1
            number += 1
            held += score[i] if low < INFINITY_BITS else np.float32(0.0)
    return number


@inlined
def count_from(score, count, threshold):
    """How many numbers are at least `threshold`."""
    limit = simd.splat(threshold)
    number = simd.splat(np.float32(0.0))
    for i in range(0, count, 16):
        number = simd.count_from(number, simd.load(score, i), limit, count - i)
    return simd.lane_count(number)


@inlined
def sum_from(score, count, threshold):
    """The sum of the finite numbers that are at least `threshold`."""
    none, low, infinite = simd.splat(np.float32(0.0)), simd.splat(threshold), simd.splat(np.float32(np.inf))
    total = none
    for i in range(0, count, 16):
        x = simd.load(score, i)
        x = simd.where_from(x, infinite, none, simd.where_from(x, low, x, none))
        total = simd.add(total, simd.first_lanes(x, count - i, none))
    return simd.lane_sum(total)
