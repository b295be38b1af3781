"""The 16-lane operations against NumPy: values, NaN and infinity, and the one rounding of fma."""

import numpy as np
import pytest

from qwenc.kernels import simd
from qwenc.kernels.jit import helper
from qwenc.kernels.level import LEVEL


@helper
def run_exp(x, y):
    for i in range(0, x.size, 16):
        simd.store(y, i, simd.exp(simd.load(x, i)))


@helper
def run_reduce(x):
    v = simd.load(x, 0)
    return simd.lane_sum(v), simd.lane_max(v)


@helper
def run_fma(x, y, z, out):
    simd.store(out, 0, simd.fma(simd.load(x, 0), simd.load(y, 0), simd.load(z, 0)))


@helper
def run_half(bits, out):
    simd.store(out, 0, simd.load_half(bits, 0))


@helper
def run_byte_floats(codes, out):
    for i in range(0, codes.size, 16):
        simd.store(out, i, simd.load_byte_floats(codes, i))


@helper
def code_of(x):
    return simd.byte_code(x)


@helper
def run_loads(codes, signed, out):
    simd.store(out, 0, simd.load_bytes(signed, 3))
    simd.store(out, 16, simd.load_eights(signed, 5, 64))
    simd.store(out, 32, simd.load_nibbles(codes, 7))


@helper
def run_first(x, count, out):
    simd.store(out, 0, simd.first_lanes(simd.load(x, 0), count, simd.splat(np.float32(-1.0))))


@helper
def run_cells(x, out, step):
    return simd.store_cells(out, 0, step, simd.load(x, 0))


@helper
def run_pieces(x, out, step, sums):
    simd.store_two_pieces(out, 0, step, simd.load(x, 0), sums, 0)


@helper
def run_pieces_unsigned(x, out, step):
    simd.store_two_pieces(out, 0, step, simd.load(x, 0), None, 0)


def test_exp_is_within_two_ulp_of_float64():
    x = np.linspace(-87.2, 88.2, 1 << 16).astype(np.float32)
    y = np.empty_like(x)
    run_exp(x, y)
    exact = np.exp(x.astype(np.float64))
    assert np.abs(y / exact - 1).max() <= 2 * 2.0**-23


def test_exp_of_edges():
    x = np.array([np.nan, -np.inf, np.inf, -1000, 0, -0.0, -88, 1000] * 2, np.float32)
    y = np.empty_like(x)
    run_exp(x, y)
    assert np.isnan(y[0]) and y[1] == 0 and y[3] == 0 and y[6] == 0
    assert y[4] == 1 and y[5] == 1
    assert y[2] > 1e38 and np.isfinite(y[2]) and y[7] == y[2]


@pytest.mark.parametrize("lane", range(16))
def test_a_nan_in_any_lane_wins(lane):
    x = np.arange(16, dtype=np.float32)
    x[lane] = np.nan
    total, largest = run_reduce(x)
    assert np.isnan(total) and np.isnan(largest)


def test_lane_max_of_infinities():
    assert run_reduce(np.full(16, -np.inf, np.float32))[1] == -np.inf
    x = np.zeros(16, np.float32)
    x[7] = np.inf
    assert run_reduce(x)[1] == np.inf


def test_fma_rounds_once():
    x = np.full(16, 1 + 2.0**-12, np.float32)
    z = np.full(16, -(1 + 2.0**-11), np.float32)
    out = np.empty(16, np.float32)
    run_fma(x, x, z, out)
    assert (out == 2.0**-24).all()  # two roundings would give 0


def test_a_byte_is_a_float_and_back():
    codes = np.arange(256, dtype=np.uint8)
    out = np.zeros(256, np.float32)
    run_byte_floats(codes, out)
    exact = (1 + (codes & 7) / 8.0) * 2.0 ** ((codes >> 3).astype(float) - 18)
    assert (out[:255] == exact[:255]).all()
    assert np.isnan(out[255])
    assert [code_of(x) for x in out] == list(range(256))
    assert code_of(np.float32(0.0)) == 0
    assert code_of(np.float32(np.inf)) == code_of(-np.float32(np.nan)) == code_of(np.float32(1.6e4)) == 255
    half = (out[100] + out[101]) / 2
    assert code_of(half * np.float32(0.999)) == 100
    assert code_of(half * np.float32(1.001)) == 101


def test_bytes_and_halves_of_bytes_as_floats():
    codes = np.random.default_rng(0).integers(0, 256, 200).astype(np.uint8)
    out = np.zeros((3, 16), np.float32)
    run_loads(codes, codes.view(np.int8), out)
    signed = codes.view(np.int8).astype(np.float32)
    assert (out[0] == signed[3:19]).all()
    assert (out[1] == np.concatenate([signed[5:13], signed[69:77]])).all()
    assert (out[2] == np.concatenate([codes[7:15] & 15, codes[7:15] >> 4])).all()


def test_half_widens_every_bit_pattern_exactly():
    bits = np.arange(1 << 16, dtype=np.uint16)
    out = np.empty(16, np.float32)
    got = np.empty(1 << 16, np.float32)
    for i in range(0, 1 << 16, 16):
        run_half(bits[i : i + 16], out)
        got[i : i + 16] = out
    np.testing.assert_array_equal(got, bits.view(np.float16).astype(np.float32))


@pytest.mark.parametrize("count", [-3, 0, 1, 7, 15, 16, 40])
def test_first_lanes_ignores_what_lies_behind(count):
    x = np.full(16, np.nan, np.float32)
    x[: max(0, count)] = 2
    out = np.empty(16, np.float32)
    run_first(x, count, out)
    kept = min(16, max(0, count))
    assert (out[:kept] == 2).all() and (out[kept:] == -1).all()


def test_cells_are_rounded_to_even_and_spread():
    x = np.array([0.5, 1.5, -0.5, -1.5, 127, -127, 3.49, 2.5, 4, 5, 6, 7, 8, 9, 10, 11], np.float32)
    out = np.full(64, 99, np.int8)
    assert run_cells(x, out, 12) == np.rint(x).sum()
    for cell in range(4):
        np.testing.assert_array_equal(out[12 * cell : 12 * cell + 4], np.rint(x[4 * cell : 4 * cell + 4]))
    assert (out[4:12] == 99).all()


def two_pieces(stored):
    """(high, low) of 16 numbers, as store_two_pieces lays them down: cells of 4 and 4 bytes or, where the level has words, of 4 words."""
    if LEVEL.words:
        numbers = stored.view(np.int16).astype(int)
        return (numbers + 64) >> 7, numbers - ((numbers + 64) >> 7 << 7)
    return stored.reshape(4, 2, 4).transpose(1, 0, 2).reshape(2, 16).astype(int)


def test_two_pieces_recombine():
    rng = np.random.default_rng(0)
    for x in (np.array([16319, -16319, 0, 63, 64, -64, -65, 1] * 2), rng.integers(-16319, 16320, 16)):
        out, sums = np.zeros(32, np.int8), np.zeros(2, np.int32)
        run_pieces(x.astype(np.float32), out, 8, sums)
        high, low = two_pieces(out)
        np.testing.assert_array_equal(128 * high + low, x)
        assert np.abs(high).max() <= 127 and low.min() >= -64 and low.max() <= 63
        assert (sums == ([0, 0] if LEVEL.words else [high.sum(), low.sum()])).all()
    x = np.array([0, 1, 127, 128, 16383, 8191, 300, 5] * 2)
    out = np.zeros(32, np.uint8)
    run_pieces_unsigned(x.astype(np.float32), out, 8)
    high, low = two_pieces(out)
    np.testing.assert_array_equal(128 * high + low, x)
    assert LEVEL.words or out.max() <= 127
