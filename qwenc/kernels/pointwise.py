"""Norm, rotary embedding, activation: the small steps between the matrices. Arrays are float32 in memory order; `*_at` are element
indices."""

from __future__ import annotations

import numpy as np

from qwenc.kernels import simd
from qwenc.kernels.jit import helper


@helper
def rms_norm(x, x_at, weight, weight_at, count, eps, out, out_at):
    """out = weight · x / sqrt(mean(x²) + eps) over `count` values. All three are padded with zeros to a multiple of 16.

    Where the squares overflow the result is NaN: dividing by an infinite mean would give zeros, and zeros look like an answer.
    """
    squares = simd.splat(np.float32(0.0))
    for i in range(0, count, 16):
        v = simd.load(x, x_at + i)
        squares = simd.fma(v, v, squares)
    mean = simd.lane_sum(squares) / np.float32(count)
    scale = simd.splat(np.float32(1.0) / np.sqrt(mean + eps) if mean < np.inf else np.float32(np.nan))
    for i in range(0, count, 16):
        simd.store(out, out_at + i, simd.mul(simd.load(weight, weight_at + i), simd.mul(simd.load(x, x_at + i), scale)))


@helper
def largest_of(x, at, count):
    """max|x| of `count` values, a multiple of 16; NaN if any is."""
    top = simd.absolute(simd.load(x, at))
    for i in range(16, count, 16):
        top = simd.maximum(top, simd.absolute(simd.load(x, at + i)))
    return simd.lane_max(top)


@helper
def rotate(x, x_at, cos, sin, angle_at, half):
    """Rotary embedding in place: the pairs (x[i], x[i + half]) turn by the angle of dimension i."""
    for i in range(half):
        a, b = simd.get(x, x_at + i), simd.get(x, x_at + half + i)
        c, s = simd.get(cos, angle_at + i), simd.get(sin, angle_at + i)
        simd.put(x, x_at + i, a * c - b * s)
        simd.put(x, x_at + half + i, b * c + a * s)


@helper
def scale_into(x, x_at, factor, out, out_at, count):
    """out = factor · x over `count` values, a multiple of 16."""
    f = simd.splat(factor)
    for i in range(0, count, 16):
        simd.store(out, out_at + i, simd.mul(simd.load(x, x_at + i), f))


@helper
def silu_mul(gate_up, gate_at, up_at, out, out_at):
    """out = silu(gate) · up for 16 values."""
    g = simd.load(gate_up, gate_at)
    one = simd.splat(np.float32(1.0))
    denominator = simd.add(one, simd.exp(simd.sub(simd.splat(np.float32(0.0)), g)))
    simd.store(out, out_at, simd.mul(simd.div(g, denominator), simd.load(gate_up, up_at)))


@helper
def add_into(x, x_at, out, out_at):
    """out += x for 16 values."""
    simd.store(out, out_at, simd.add(simd.load(out, out_at), simd.load(x, x_at)))


@helper
def copy_into(x, x_at, out, out_at):
    """out = x for 16 values."""
    simd.store(out, out_at, simd.load(x, x_at))


@helper
def dot(x, x_at, y, y_at, count):
    """Σ x·y over `count` values, a multiple of 16."""
    total = simd.splat(np.float32(0.0))
    for i in range(0, count, 16):
        total = simd.fma(simd.load(x, x_at + i), simd.load(y, y_at + i), total)
    return simd.lane_sum(total)


@helper
def all_finite(x, x_at, count):
    """Whether no value is NaN or infinite (x − x is 0 only for finite x)."""
    bad = simd.splat(np.float32(0.0))
    for i in range(0, count, 16):
        v = simd.load(x, x_at + i)
        bad = simd.maximum(bad, simd.absolute(simd.sub(v, v)))
    return simd.lane_max(bad) == np.float32(0.0)
