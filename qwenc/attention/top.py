"""The largest of many numbers, without sorting them."""

from __future__ import annotations

import numpy as np

from qwenc.kernels.jit import helper, inlined

INFINITY_BITS = 0x7F800000


@helper
def keep_top(score, count, least, wanted, most, kept):
    """Set kept[i] to 1 for the largest of score[:count] (none below 0), else 0: as few as are at least `least` and whose finite scores sum
    to `wanted`, but at most `most`. Infinite scores are all kept, and count. The lower index wins among equals. Returns how many.

    Bisects the threshold over the bits of the numbers, which order as the numbers do.
    """
    bits = score.view(np.int32)
    low, high = 0, INFINITY_BITS + 1  # enough are at least `low`, not enough at least `high`
    while high - low > 1:
        middle = (low + high) // 2
        number = is_enough(bits, score, count, middle, least, wanted, most)
        if number > 0:
            low = middle
            if number == least:  # fewer would not do
                break
        else:
            high = middle
    number, held = 0, np.float32(0.0)
    for i in range(count):
        above = bits[i] > low
        kept[i] = above
        if above:
            number += 1
            held += score[i] if bits[i] < INFINITY_BITS else np.float32(0.0)
    for i in range(count):
        if bits[i] == low and (low == INFINITY_BITS or (number < most and (number < least or held < wanted))):
            kept[i] = 1
            number += 1
            held += score[i] if bits[i] < INFINITY_BITS else np.float32(0.0)
    return number


@inlined
def is_enough(bits, score, count, threshold, least, wanted, most):
    """How many numbers are at least `threshold`, or 0 if these are too few."""
    number, held = 0, np.float32(0.0)
    for i in range(count):
        number += bits[i] >= threshold
    if wanted > 0:
        for i in range(count):
            if threshold <= bits[i] < INFINITY_BITS:
                held += score[i]
    return number if number >= most or (number >= least and held >= wanted) else 0
