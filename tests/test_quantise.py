"""The quantisation kernels against brute force in float64, on awkward groups."""

import numpy as np
import pytest
from unpack import q4_codes, q8_codes, unpack_f32, unpack_q4, unpack_scales

from qwenc.checkpoint.quantise import pack_f32, pack_q4, pack_q8


def rows_of(kind, rows=32, inputs=96, seed=0):
    rng = np.random.default_rng(seed)
    shape = (rows, inputs)
    values = {
        "gauss": lambda: rng.standard_normal(shape) * 0.02,
        "laplace": lambda: rng.laplace(size=shape),
        "heavy": lambda: rng.standard_t(2, size=shape),
        "positive": lambda: rng.random(shape),
        "zeros": lambda: np.zeros(shape),
        "constant": lambda: np.full(shape, -0.3),
        "one": lambda: np.where(rng.random(shape) < 0.02, rng.standard_normal(shape), 0),
        "outlier": lambda: np.where(rng.random(shape) < 0.02, 100, 1) * rng.standard_normal(shape),
        "tiny": lambda: rng.standard_normal(shape) * 1e-6,
        "large": lambda: rng.standard_normal(shape) * 1e4,
    }
    return values[kind]().astype(np.float32)


KINDS = ["gauss", "laplace", "heavy", "positive", "zeros", "constant", "one", "outlier", "tiny", "large"]


def groups(rows):
    return rows.astype(np.float64).reshape(rows.shape[0], -1, 32)


DIVISORS = np.concatenate([np.arange(2, 12, 0.05), -np.arange(2, 12, 0.05)])


def best_q4_error(group):
    """Least squared error of one group over 400 scales, each followed by its closed-form best scale."""
    extreme = group[np.argmax(np.abs(group))]
    if extreme == 0:
        return 0.0
    codes = np.clip(np.rint(group / (extreme / DIVISORS[:, None])), -8, 7)
    scales = (codes @ group) / np.maximum((codes * codes).sum(1), 1e-300)
    return float(((group - codes * scales[:, None]) ** 2).sum(1).min())


def test_f32_layout():
    rows = rows_of("gauss")
    values = pack_f32(rows)
    assert values.shape == (2, 96, 16) and values[1, 5, 3] == rows[19, 5]
    assert np.array_equal(unpack_f32(values), rows)


@pytest.mark.parametrize("kind", KINDS)
def test_q8_is_rounded_to_nearest_and_no_worse_than_the_simple_scale(kind):
    """A scale between max|w|/127 and max|w|/96; code = round(w / scale); error at most that of max|w|/127."""
    rows = rows_of(kind)
    codes, scales = pack_q8(rows)
    assert codes.dtype == np.int8 and codes.shape == (2, 3, 512) and scales.dtype == np.uint16 and scales.shape == (2, 3, 16)
    peak = np.abs(groups(rows)).max(-1)
    found = unpack_scales(scales).astype(np.float64)
    half = 2.0**-11  # rounding of a float16, besides its subnormals
    assert (found <= peak / 96 * (1 + half) + 6e-8).all()
    assert (found >= peak / 127 * (1 - half) - 6e-8).all()
    wide = found[..., None]
    ideal = np.clip(np.divide(groups(rows), wide, out=np.zeros_like(groups(rows)), where=wide > 0), -127, 127)
    assert np.abs(q8_codes(codes).reshape(ideal.shape) - ideal).max() <= 0.5 + 1e-4  # ties may go either way
    simple = (peak / 127).astype(np.float16).astype(np.float64)[..., None]
    plain = np.rint(np.divide(groups(rows), simple, out=np.zeros_like(groups(rows)), where=simple > 0)) * simple
    ours = q8_codes(codes).reshape(ideal.shape) * wide
    assert (((ours - groups(rows)) ** 2).sum(-1) <= ((plain - groups(rows)) ** 2).sum(-1) * 1.01 + 1e-12).all()


def test_q8_finds_the_grid_of_a_dequantised_checkpoint():
    """Sixteen equidistant values per group, as a 4-bit format with an offset leaves them."""
    rng = np.random.default_rng(0)
    step, least = rng.uniform(0.01, 0.02, (64, 8, 1)), rng.uniform(-0.3, -0.05, (64, 8, 1))
    rows = (least + step * rng.integers(0, 16, (64, 8, 32))).astype(np.float32).reshape(64, 256)
    codes, scales = pack_q8(rows)
    ours = q8_codes(codes).reshape(64, 8, 32) * unpack_scales(scales).astype(np.float64)[..., None]
    simple = (np.abs(groups(rows)).max(-1, keepdims=True) / 127).astype(np.float16).astype(np.float64)
    plain = np.rint(groups(rows) / simple) * simple
    assert ((ours - groups(rows)) ** 2).mean() < 0.5 * ((plain - groups(rows)) ** 2).mean()


@pytest.mark.parametrize("kind", KINDS)
def test_q4_is_near_the_best_possible(kind):
    """Summed squared error within 1 % of a 400-scale search per group (plus float16 rounding of the scale)."""
    rows = rows_of(kind)
    codes, scales = pack_q4(rows)
    assert codes.dtype == np.uint8 and codes.shape == (2, 3, 256) and scales.dtype == np.uint16 and scales.shape == (2, 3, 16)
    if kind == "tiny":  # below float16's normal range the scale has few bits: only sanity is asked
        assert np.abs(unpack_q4(codes, scales) - rows).max() <= np.abs(rows).max()
        return
    error = ((unpack_q4(codes, scales) - rows.astype(np.float64)) ** 2).sum()
    best = sum(best_q4_error(group) for group in groups(rows).reshape(-1, 32))
    assert error <= 1.01 * best + 1e-6 * (rows.astype(np.float64) ** 2).sum()


def test_q4_beats_the_simple_scale():
    rows = rows_of("gauss", 64, 512)
    scale = np.abs(groups(rows)).max(-1, keepdims=True) / 7
    simple = ((np.clip(np.rint(groups(rows) / scale), -8, 7) * scale - groups(rows)) ** 2).sum()
    error = ((unpack_q4(*pack_q4(rows)) - rows.astype(np.float64)) ** 2).sum()
    assert error < 0.72 * simple


@pytest.mark.parametrize("low, high", [(-8, 7), (-7, 7), (-7, 8), (-6, 5), (0, 6)])
def test_q4_keeps_a_4_bit_grid(low, high):
    """Weights that already lie on a grid of up to 16 levels come back exactly (a second quantisation loses nothing)."""
    rng = np.random.default_rng(1)
    rows = rng.integers(low, high, (16, 64), endpoint=True).astype(np.float32)
    rows[:, 0::32] = low if -low >= high else high
    np.testing.assert_array_equal(unpack_q4(*pack_q4(rows * np.float32(0.125))), rows * 0.125)


def test_codes_address_the_right_weight():
    """One weight that differs, at every place of a tile."""
    for row in range(16):
        for k in range(64):
            rows = np.zeros((16, 64), np.float32)
            rows[row, k] = -1.0
            for codes, scales, unpack in ((*pack_q4(rows), q4_codes), (*pack_q8(rows), q8_codes)):
                found = unpack(codes) * np.repeat(unpack_scales(scales), 32, axis=-1)
                assert np.flatnonzero(found).tolist() == [row * 64 + k]
                assert found[row, k] == pytest.approx(-1, rel=1e-3)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 31, 40])
def test_non_finite_weights_poison_their_group_only(bad, place):
    rows = rows_of("gauss", 16, 64)
    rows[3, place] = bad
    for _, scales in (pack_q4(rows), pack_q8(rows)):
        broken = ~np.isfinite(unpack_scales(scales))
        assert broken[3, place // 32] and broken.sum() == 1
    assert not np.isfinite(unpack_q4(*pack_q4(rows))[3, 32 * (place // 32) : 32 * (place // 32) + 32]).any()


def test_a_weight_beyond_half_precision_is_not_hidden():
    rows = rows_of("gauss", 16, 32)
    rows[2, 7] = 1e9
    assert not np.isfinite(unpack_scales(pack_q4(rows)[1])[2, 0]) and not np.isfinite(unpack_scales(pack_q8(rows)[1])[2, 0])


@pytest.mark.parametrize("rows", [np.zeros((15, 32), np.float32), np.zeros((16, 31), np.float32), np.zeros((16, 32), np.float64)])
def test_wrong_input_is_a_programming_error(rows):
    with pytest.raises(ValueError):
        pack_q4(rows)


def test_strided_rows():
    wide = rows_of("gauss", 32, 192)
    for pack in (pack_q4, pack_q8):
        for got, expected in zip(pack(wide[::2, :64]), pack(np.ascontiguousarray(wide[::2, :64])), strict=True):
            np.testing.assert_array_equal(got, expected)
