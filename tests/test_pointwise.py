"""The floating-point error of the small kernels against float64, bounded. The matrices' and attention's are in their own files."""

import numpy as np
import pytest

from qwenc.kernels.jit import helper
from qwenc.kernels.pointwise import dot, rms_norm, rotate, silu_mul
from qwenc.kernels.reduce import log_sum_exp

EPS = np.finfo(np.float32).eps


@helper
def run_norm(x, weight, count, out):
    rms_norm(x, 0, weight, 0, count, np.float32(1e-6), out, 0)


@helper
def run_rotate(x, cos, sin):
    rotate(x, 0, cos, sin, 0, cos.size)


@helper
def run_silu(gate_up, out):
    for i in range(0, out.size, 16):
        silu_mul(gate_up, i, out.size + i, out, i)


@helper
def run_dot(x, y):
    return dot(x, 0, y, 0, x.size)


@pytest.mark.parametrize("count", [16, 40, 2048])
@pytest.mark.parametrize("size", [1e-6, 1.0, 1e6])
def test_rms_norm(count, size):
    rng = np.random.default_rng(0)
    room = -(-count // 16) * 16
    x, weight, out = np.zeros(room, np.float32), np.zeros(room, np.float32), np.empty(room, np.float32)
    x[:count], weight[:count] = rng.standard_normal(count) * size, rng.standard_normal(count)
    run_norm(x, weight, count, out)
    wide = x.astype(np.float64)
    wanted = weight * wide / np.sqrt((wide**2).sum() / count + 1e-6)
    # each of 16 lanes sums count/16 squares; the square root halves that error; a few roundings more
    assert (np.abs(out - wanted) <= (count / 16 + 8) * EPS * np.abs(wanted)).all()


def test_rotate():
    rng = np.random.default_rng(1)
    x = rng.standard_normal(128).astype(np.float32)
    angle = rng.uniform(-np.pi, np.pi, 64)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    low, high = x[:64].astype(np.float64), x[64:].astype(np.float64)
    wanted = np.concatenate([low * cos - high * sin, high * cos + low * sin])
    run_rotate(x, cos, sin)
    size = np.tile(np.hypot(low, high), 2)  # where two terms cancel, the error is that of the terms
    assert (np.abs(x - wanted) <= 2 * EPS * size).all()


def test_silu():
    gate = np.concatenate([np.linspace(-100, 100, 4000), [0.0, -0.0, 1e-30, -1e-30, 3e4, -3e4] + [1.0] * 10]).astype(np.float32)
    up = np.random.default_rng(2).standard_normal(gate.size).astype(np.float32)
    out = np.empty(gate.size, np.float32)
    run_silu(np.concatenate([gate, up]), out)
    with np.errstate(over="ignore"):
        wanted = gate.astype(np.float64) / (1 + np.exp(-gate.astype(np.float64))) * up
    normal = np.abs(wanted) > 1e-30  # far below, denormal numbers and the overflow of e^x
    assert (np.abs(out - wanted)[normal] <= 6 * EPS * np.abs(wanted)[normal]).all()
    assert (np.abs(out - wanted)[~normal] <= 1e-30).all()


def test_dot():
    rng = np.random.default_rng(3)
    x, y = rng.standard_normal((2, 4096)).astype(np.float32)
    error = abs(run_dot(x, y) - np.dot(x.astype(np.float64), y.astype(np.float64)))
    assert error <= (4096 / 16 + 16) * EPS / 2 * np.abs(x.astype(np.float64) * y).sum()


@pytest.mark.parametrize("count", [5, 16, 1003, 151936])
def test_log_sum_exp(count):
    x = (np.random.default_rng(4).standard_normal(count) * 10).astype(np.float32)
    wide = x.astype(np.float64)
    wanted = wide.max() + np.log(np.exp(wide - wide.max()).sum())
    assert abs(log_sum_exp(x) - wanted) <= 4 * EPS * max(1, abs(wanted))
