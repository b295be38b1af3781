"""Reductions over a whole vocabulary."""

from __future__ import annotations

import numpy as np

from qwenc.kernels import simd
from qwenc.kernels.jit import jit


@jit
def log_sum_exp(x):
    """ln Σ e^x of float32 x [n], in a fixed order; NaN if any is NaN."""
    floor = simd.splat(np.float32(-np.inf))
    top, whole = floor, x.size // 16 * 16
    for i in range(0, whole, 16):
        top = simd.maximum(top, simd.load(x, i))
    largest = simd.lane_max(top)
    for i in range(whole, x.size):
        largest = max(largest, x[i])
    total = 0.0
    for i in range(0, whole, 16):
        total += simd.lane_sum(simd.exp(simd.sub(simd.load(x, i), simd.splat(largest))))
    for i in range(whole, x.size):
        total += np.exp(np.float64(x[i] - largest))
    return np.float64(largest) + np.log(total)
