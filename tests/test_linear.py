"""Matrix tiles against float64, for every weight format and both tile shapes, and the int8 activations that they read."""

import numpy as np
import pytest
from unpack import q4_codes, q8_codes, unpack_f32, unpack_scales

from qwenc.checkpoint.quantise import pack_f32, pack_q4, pack_q8
from qwenc.kernels.jit import allocating
from qwenc.kernels.linear import linear_many, linear_one, make_ready, new_room, prepare, read_row
from qwenc.kernels.records import F32, Q4, Q8, TILE, Q8Fast, new_acts


@allocating
def run_one(w, stack, x, acts, out):
    for t in range(x.shape[0]):
        prepare(w, x, t * x.shape[1], acts, 1, t)
        for tile in range(out.shape[1] // 16):
            linear_one(w, stack, tile, acts, t, out, t * out.shape[1] + 16 * tile)


@allocating
def run_many(w, stack, x, acts, out):
    for t in range(x.shape[0]):
        prepare(w, x, t * x.shape[1], acts, TILE, t)
    sums, room = np.empty(16 * TILE, np.float32), new_room(w)
    for tile in range(out.shape[1] // 16):
        make_ready(w, stack, tile, room)
        for token_tile in range((x.shape[0] + TILE - 1) // TILE):
            linear_many(w, room, stack, tile, acts, token_tile, sums, 0)
            for t in range(token_tile * TILE, min(x.shape[0], (token_tile + 1) * TILE)):
                out[t, 16 * tile : 16 * tile + 16] = sums[16 * (t % TILE) : 16 * (t % TILE) + 16]


@allocating
def run_read_row(w, row, out):
    read_row(w, row, out, 0)


def stack_of(fmt, rng, rows, inputs, stack=2):
    """(record, dequantised float64 [stack, rows, inputs])."""
    weights = rng.standard_normal((stack, rows, inputs)).astype(np.float32)
    if fmt == "f32":
        values = np.stack([pack_f32(w) for w in weights])
        return F32(values), unpack_f32(values).astype(np.float64)
    formats = {"q4": (pack_q4, q4_codes, Q4), "q8": (pack_q8, q8_codes, Q8), "q8fast": (pack_q8, q8_codes, Q8Fast)}
    pack, codes_of, record = formats[fmt]
    codes, scales = (np.stack(part) for part in zip(*(pack(w) for w in weights), strict=True))
    dense = codes_of(codes).astype(np.float64) * np.repeat(unpack_scales(scales).astype(np.float64), 32, axis=-1)
    return record(codes, scales), dense


def activations(x, fmt):
    """What a matrix of format `fmt` sees of x: itself, or 8 or 15 bits with a scale per 32 values."""
    if fmt == "f32":
        return x.astype(np.float64)
    groups = x.reshape(len(x), -1, 32)
    top = np.abs(groups).max(-1, keepdims=True)
    most = np.float32(16319 if fmt == "q8" else 127)
    factor = np.divide(most, top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(groups * factor)  # in float32, so that ties fall as they do in the kernel
    return (codes.astype(np.float64) * top / most).reshape(x.shape)


@pytest.mark.parametrize("fmt", ["q4", "q8", "q8fast", "f32"])
@pytest.mark.parametrize("tokens", [1, TILE - 1, TILE, 2 * TILE + 3])
@pytest.mark.parametrize("inputs", [32, 96, 544])
def test_against_float64(fmt, tokens, inputs):
    rng = np.random.default_rng(inputs + tokens)
    w, dense = stack_of(fmt, rng, 48, inputs)
    x = rng.standard_normal((tokens, inputs)).astype(np.float32)
    if tokens > 1:
        x[0] = 0
    wanted = activations(x, fmt) @ dense[1].T
    scale = np.abs(activations(x, fmt)) @ np.abs(dense[1]).T + 1e-9
    for run, places in ((run_one, 1), (run_many, TILE)):
        out = np.full((tokens, 48), np.nan, np.float32)
        run(w, 1, x, new_acts(fmt != "f32", inputs, -(-tokens // places) * places), out)
        # float32 rounding of each group's term and of their sum
        assert (np.abs(out - wanted) / scale).max() < 4e-7 * max(4, inputs // 32)


@pytest.mark.parametrize("fmt", ["q4", "q8", "q8fast"])
def test_one_and_many_tokens_give_the_same_bits(fmt):
    rng = np.random.default_rng(5)
    w, _ = stack_of(fmt, rng, 32, 256)
    x = rng.standard_normal((TILE, 256)).astype(np.float32)
    one, many = np.empty((TILE, 32), np.float32), np.empty((TILE, 32), np.float32)
    run_one(w, 0, x, new_acts(True, 256, TILE), one)
    run_many(w, 0, x, new_acts(True, 256, TILE), many)
    np.testing.assert_array_equal(one, many)


@pytest.mark.parametrize("fmt", ["q4", "q8", "q8fast"])
def test_extreme_codes_do_not_overflow(fmt):
    for code in [0x00, 0xFF, 0x88] if fmt == "q4" else [-127, 127, 1]:
        for sign in (1, -1):
            size = 256 if fmt == "q4" else 512
            array = np.full((1, 1, 3, size), code, np.uint8 if fmt == "q4" else np.int8)
            scales = np.full((1, 1, 3, 16), 1.0, np.float16).view(np.uint16)
            w = {"q4": Q4, "q8": Q8, "q8fast": Q8Fast}[fmt](array, scales)
            value = (code & 15) - 8 if fmt == "q4" else code
            x = np.full((TILE, 96), 127.0 * sign, np.float32)
            for run in (run_one, run_many):
                out = np.empty((TILE, 16), np.float32)
                run(w, 0, x, new_acts(True, 96, TILE), out)
                np.testing.assert_allclose(out, value * 127.0 * sign * 96, rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("fmt", ["q4", "q8", "q8fast", "f32"])
def test_a_bad_activation_is_not_swallowed(fmt, bad):
    rng = np.random.default_rng(1)
    w, _ = stack_of(fmt, rng, 16, 64)
    x = rng.standard_normal((1, 64)).astype(np.float32)
    x[0, 40] = bad
    out = np.zeros((1, 16), np.float32)
    run_one(w, 0, x, new_acts(fmt != "f32", 64, 1), out)
    assert not np.isfinite(out).any()


@pytest.mark.parametrize("fmt", ["q4", "q8", "q8fast", "f32"])
def test_rows_read_back(fmt):
    w, dense = stack_of(fmt, np.random.default_rng(2), 32, 64, stack=1)
    out = np.empty(64, np.float32)
    for row in (0, 15, 16, 31):
        run_read_row(w, row, out)
        np.testing.assert_allclose(out, dense[0, row], rtol=1e-6)
