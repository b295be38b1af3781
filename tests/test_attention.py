"""Attention over cache pages against float64 softmax: group sizes, head sizes, lengths around tiles and pages, masks, poisoned rows."""

import numpy as np
import pytest

from qwenc.attention.attend import attend_span
from qwenc.attention.cache import PAGE, UNIT, FloatKV, Int8K, bytes_per_token, cache_arrays, new_cache, slot_of
from qwenc.attention.rows import begin, new_rows
from qwenc.attention.scores import prepare_rows
from qwenc.attention.store import finish_unit, write_key, write_value
from qwenc.kernels.jit import allocating

LAYERS, KV_HEADS = 2, 3
KINDS = ["q8", "k8v4", "q4", "f32"]


def stage_of(cache):
    """Where keys of 5 bits wait for their unit to fill."""
    if hasattr(cache.k, "tail"):
        return Int8K(cache.k.tail, cache.k.tail_scale)
    return Int8K(np.zeros((1, 1, 1, 16), np.int8), np.zeros((1, 1, 1, 1), np.float32))


@allocating
def fill_all(cache, stage, layer, head, k, v):
    own = (layer * KV_HEADS + head) * UNIT
    head_dim = k.shape[1]
    r = new_rows(1, head_dim, 1)
    for t in range(k.shape[0]):
        slot = slot_of(LAYERS, KV_HEADS, 0, layer, head, t)
        write_key(cache.k, slot, stage, own + t % UNIT, k, t * head_dim, head_dim)
        write_value(cache.v, slot, v, t * head_dim, head_dim, r)
        if t % UNIT == UNIT - 1:
            finish_unit(cache.k, cache.plane, slot - (UNIT - 1), stage, own, head_dim, r)


def fill(cache, layer, head, k, v):
    fill_all(cache, stage_of(cache), layer, head, k, v)


@allocating
def attend_rows(cache, stage, layer, head, q, limit, out):
    """Rows q [rows, head_dim], each over the first limit[row] keys."""
    rows = q.shape[0]
    most = 0
    for i in range(rows):
        most = max(most, limit[i])
    r = new_rows(rows, q.shape[1], most)
    for i in range(rows):
        r.limit[i] = limit[i]
        for d in range(q.shape[1]):
            r.q[i, d] = q[i, d]
    prepare_rows(cache.k, r, rows)
    begin(r, rows)
    own = (most - 1) // UNIT * UNIT
    attend_span(cache, stage, (layer * KV_HEADS + head) * UNIT, r, rows, LAYERS, KV_HEADS, 0, layer, head, 0, own, most)
    for i in range(rows):
        for d in range(q.shape[1]):
            out[i, d] = r.o[i, d] / r.total[i]


def attend(cache, layer, head, q, limit, out):
    attend_rows(cache, stage_of(cache), layer, head, q, limit, out)


def oracle(q, k, v, limit, coded=0):
    """coded: the first keys, which have codes of 5 bits."""
    out = np.empty(q.shape)
    for i, n in enumerate(limit):
        s = scores(q[i], k, coded)[:n]
        p = np.exp(s - s.max())
        out[i] = p / p.sum() @ v[:n].astype(np.float64)
    return out


def scores(q, k, coded):
    """q·k. Where channels hold 16 values, in the units of the first `coded` keys, q·step of a channel is rounded to 8 bits."""
    s = k.astype(np.float64) @ q.astype(np.float64)
    for first in range(0, coded, UNIT):
        s[first : first + UNIT] = coded_scores(q.astype(np.float64), k[first : first + UNIT])
    return s


def coded_scores(q, unit):
    """Of 32 keys of 8 bits."""
    centre, step = coarse_ranges(unit)
    codes = np.rint(np.divide(unit - centre, step, out=np.zeros(unit.shape), where=step > 0) + 15.5)
    return q @ centre + (np.clip(codes, 0, 31) - 15.5) @ eight_bits(q * step)


def eight_bits(x):
    top = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    return np.rint(x * np.divide(127, top, out=np.zeros_like(top), where=top > 0)) * top / 127


def coarse_ranges(unit):
    """(centre, step of 31) of every channel of a unit [32, dims]: centres in 8 bits, widths, rounded up, in 4, to the largest."""
    low, high = unit.min(0).astype(np.float64), unit.max(0).astype(np.float64)
    middle, width = (low + high) / 2, (high - low) / 15
    of_centre, of_step = np.abs(middle).max() / 127, width.max() / 15.5
    centre = np.rint(np.divide(middle, of_centre, out=np.zeros_like(middle), where=of_centre > 0)) * of_centre
    code = np.clip(np.ceil(np.divide(width, of_step, out=np.zeros_like(width), where=of_step > 0) - 0.5 - 1e-6), 0, 15)
    return centre, (code + 0.5) * of_step * 15 / 31


def four_bits(x):
    """x [tokens, dims]: per token in groups of 32 dimensions; steps in one byte, centres in halves of them."""
    out = np.empty(x.shape)
    for first in range(0, x.shape[1], 32):
        group = x[:, first : first + 32].astype(np.float64)
        low, high = group.min(1, keepdims=True), group.max(1, keepdims=True)
        middle = (low + high) / 2
        step = float_of_a_byte(np.maximum((high - low) / 15, np.abs(middle) * 2 / 127))
        low = (np.clip(np.rint(2 * middle / step), -127, 127) / 2 - 7.5) * step
        out[:, first : first + 32] = low + step * np.clip(np.rint((group - low) / step), 0, 15)
    return out


def float_of_a_byte(x):
    """The nearest number with 3 bits of mantissa after the first, 2^-20 or more."""
    power = 2.0 ** np.floor(np.log2(np.maximum(x, 2.0**-18)))
    return np.floor(np.maximum(x, 2.0**-18) / power * 8 + 0.5) / 8 * power


def coded_keys(kv, keys):
    """How many of the keys have codes of 5 bits: those of the units that are full and not the last."""
    return (keys - 1) // UNIT * UNIT if kv == "q4" else 0


def as_stored(kv, k, v):
    """What a cache of that kind makes of keys and values, but for codes of 5 bits, which `scores` makes."""
    if kv == "f32":
        return k, v
    return eight_bits(k), eight_bits(v) if kv == "q8" else four_bits(v)


def case(kv, rows, head_dim, keys, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((keys, head_dim)).astype(np.float32)
    v = rng.standard_normal((keys, head_dim)).astype(np.float32)
    q = (rng.standard_normal((rows, head_dim)) * spread / np.sqrt(head_dim)).astype(np.float32)
    cache = new_cache(kv, max(keys, 1) + PAGE, LAYERS, KV_HEADS, head_dim)
    poison(cache)
    fill(cache, 1, 2, k, v)
    return cache, q, k, v


def poison(cache):
    """Rows that no token has written must not matter, whatever they hold."""
    for name, array in cache_arrays(cache).items():
        array[:] = np.nan if array.dtype == np.float32 else 255 if name == "v.step" else 111  # 255 is NaN, too


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 63, 255, 256, 257, 700])
def test_lengths(kv, keys):
    cache, q, k, v = case(kv, 2, 64, keys)
    out = np.empty((2, 64), np.float32)
    attend(cache, 1, 2, q, np.array([keys, keys]), out)
    np.testing.assert_allclose(out, oracle(q, *as_stored(kv, k, v), [keys, keys], coded_keys(kv, keys)), atol=2e-6 if kv == "f32" else 3e-4)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 32])
@pytest.mark.parametrize("head_dim", [16, 48, 128, 256])
def test_groups_and_head_sizes(kv, rows, head_dim):
    keys = 300
    cache, q, k, v = case(kv, rows, head_dim, keys, seed=rows)
    step = 1 if kv == "q4" else 37  # rows of one call are of one unit there
    limit = np.array([max(1, keys - step * (i % 12)) for i in range(rows)])
    out = np.empty((rows, head_dim), np.float32)
    attend(cache, 1, 2, q, limit, out)
    # a number between two codes of 5 bits may become either: a thirtieth of its channel's range
    atol = {"f32": 3e-6, "q4": 8e-4}.get(kv, 4e-4)
    np.testing.assert_allclose(out, oracle(q, *as_stored(kv, k, v), limit, coded_keys(kv, keys)), atol=atol)


def test_one_key_takes_all():
    """A sharp softmax: the 14-bit probabilities must not blur it."""
    cache, q, k, v = case("q8", 1, 64, 600, spread=80.0)
    q[0] = k[417] * 8
    out = np.empty((1, 64), np.float32)
    attend(cache, 1, 2, q, np.array([600]), out)
    np.testing.assert_allclose(out[0], eight_bits(v)[417], atol=1e-3)


def test_many_small_probabilities_are_kept():
    """A flat softmax over thousands of keys: none may round to nothing."""
    keys, head_dim = 4096, 32
    cache, q, _, v = case("q8", 1, head_dim, keys)
    q[:] = 0
    out = np.empty((1, head_dim), np.float32)
    attend(cache, 1, 2, q, np.array([keys]), out)
    np.testing.assert_allclose(out[0], eight_bits(v).mean(0), atol=2e-5)


def test_planted_outlier_channel():
    """A channel a hundred times larger costs the others their precision, but stays within the rounding of 8 bits."""
    cache, q, k, v = case("q8", 2, 64, 200)
    k[:, 5] *= 100
    fill(cache, 1, 2, k, v)
    out = np.empty((2, 64), np.float32)
    attend(cache, 1, 2, q, np.array([200, 200]), out)
    np.testing.assert_allclose(out, oracle(q, eight_bits(k), eight_bits(v), [200, 200]), atol=2e-3)


@pytest.mark.parametrize("fill_value", [0.0, 3.0])
def test_constant_vectors(fill_value):
    cache, q, k, v = case("q8", 1, 32, 40)
    k[:] = v[:] = fill_value
    fill(cache, 1, 2, k, v)
    out = np.empty((1, 32), np.float32)
    attend(cache, 1, 2, q, np.array([40]), out)
    np.testing.assert_allclose(out, fill_value, rtol=2e-4, atol=1e-7)


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize(("keys", "bad"), [(40, np.nan), (40, np.inf), (300, np.nan)])
def test_a_bad_key_shows_where_nothing_else_is_seen_before_it(kv, keys, bad):
    """With keys of 5 bits it spoils the scores of its whole unit: a segment of NaN only was taken for one that nobody sees."""
    cache, q, k, v = case(kv, 2, 32, keys)
    k[: 5 if keys < 256 else 256, 3] = bad
    fill(cache, 1, 2, k, v)
    out = np.zeros((2, 32), np.float32)
    attend(cache, 1, 2, q, np.array([keys, keys]), out)
    assert np.isnan(out).any(axis=1).all()


@pytest.mark.parametrize("kv", ["k8v4", "q4"])
@pytest.mark.parametrize(("middle", "width", "least"), [(0.0, 0.0, 1e-9), (3.0, 0.1, 0.02), (10.0, 0.1, 0.06), (28000.0, 0.0, 250.0)])
def test_values_far_from_zero(kv, middle, width, least):
    """Their centre has 8 bits: a group that is far from zero for its width is off by a part of a step of 127."""
    cache, q, k, v = case(kv, 1, 32, 400)
    v[:] = middle + width * v
    fill(cache, 1, 2, k, v)
    out = np.zeros((1, 32), np.float32)
    attend(cache, 1, 2, q, np.array([400]), out)
    assert np.abs(out - oracle(q, k, v, [400])).max() <= least


@pytest.mark.parametrize("kv", KINDS)
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_nan_in_the_cache_shows(kv, which):
    cache, q, k, v = case(kv, 2, 32, 100)
    (k if which == "k" else v)[50, 3] = np.nan
    fill(cache, 1, 2, k, v)
    out = np.zeros((2, 32), np.float32)
    attend(cache, 1, 2, q, np.array([100, 40]), out)
    assert np.isnan(out[0]).any()
    if kv != "q4":
        assert np.isfinite(out[1]).all()  # that row does not see the bad key


@pytest.mark.parametrize(("kv", "least"), [("q8", 2112), ("k8v4", 1632), ("q4", 1266), ("f32", 8192)])
def test_cache_bytes_are_as_promised(kv, least):
    assert bytes_per_token(kv, 1, 8, 128) == least
    if kv in ("q8", "q4"):
        assert bytes_per_token(kv, 3, 8, 128, sparse=True) <= 1.15 * 3 * least
    cache = new_cache(kv, PAGE, 1, 8, 128)
    pages = [array for name, array in cache_arrays(cache).items() if "tail" not in name]
    assert sum(array.nbytes for array in pages) == PAGE * least


def test_the_kinds_of_cache():
    assert isinstance(new_cache("f32", 10, 1, 1, 16).k, FloatKV)
    sparse = new_cache("q4", 10, 1, 1, 16, sparse=True)
    assert sparse.plane.codes is sparse.k.upper  # kept once
