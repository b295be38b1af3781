"""Attention over cache pages against float64 softmax: group sizes, head sizes, lengths around tiles and pages, masks, poisoned rows."""

import numpy as np
import pytest

from qwenc.attention.cache import PAGE, FloatKV, bytes_per_token, new_cache, write_kv
from qwenc.attention.exact import attend_page, begin, new_rows, prepare_rows
from qwenc.kernels.jit import helper


@helper
def fill(cache, layer, head, k, v):
    for t in range(k.shape[0]):
        write_kv(cache, layer, head, t, k, t * k.shape[1], v, t * v.shape[1], k.shape[1])


@helper
def attend(cache, layer, head, q, limit, out):
    """Rows q [rows, head_dim], each over the first limit[row] keys."""
    rows = q.shape[0]
    r = new_rows(rows, q.shape[1])
    most = 0
    for i in range(rows):
        r.limit[i] = limit[i]
        most = max(most, limit[i])
        for d in range(q.shape[1]):
            r.q[i, d] = q[i, d]
    prepare_rows(cache, r, rows)
    begin(r, rows)
    for page in range((most + PAGE - 1) // PAGE):
        attend_page(cache, page, layer, head, r, rows, min(PAGE, most - page * PAGE))
    for i in range(rows):
        for d in range(q.shape[1]):
            out[i, d] = r.o[i, d] / r.total[i]


def oracle(q, k, v, limit):
    out = np.empty(q.shape)
    for i, n in enumerate(limit):
        s = k[:n].astype(np.float64) @ q[i].astype(np.float64)
        p = np.exp(s - s.max())
        out[i] = p / p.sum() @ v[:n].astype(np.float64)
    return out


def eight_bits(x):
    top = np.abs(x).max(-1, keepdims=True).astype(np.float64)
    return np.rint(x * np.divide(127, top, out=np.zeros_like(top), where=top > 0)) * top / 127


def case(kv, rows, head_dim, keys, seed=0, spread=1.0):
    rng = np.random.default_rng(seed)
    k = rng.standard_normal((keys, head_dim)).astype(np.float32)
    v = rng.standard_normal((keys, head_dim)).astype(np.float32)
    q = (rng.standard_normal((rows, head_dim)) * spread / np.sqrt(head_dim)).astype(np.float32)
    cache = new_cache(kv, max(keys, 1) + PAGE, 2, 3, head_dim)
    poison(cache)
    fill(cache, 1, 2, k, v)
    return cache, q, k, v


def poison(cache):
    """Rows that no token has written must not matter, whatever they hold."""
    for array in cache:
        array[:] = np.nan if array.dtype == np.float32 else 111


@pytest.mark.parametrize("kv", ["q8", "f32"])
@pytest.mark.parametrize("keys", [1, 2, 15, 16, 17, 63, 255, 256, 257, 700])
def test_lengths(kv, keys):
    cache, q, k, v = case(kv, 2, 64, keys)
    out = np.empty((2, 64), np.float32)
    attend(cache, 1, 2, q, np.array([keys, keys]), out)
    if kv == "q8":
        k, v = eight_bits(k), eight_bits(v)
    np.testing.assert_allclose(out, oracle(q, k, v, [keys, keys]), atol=3e-4 if kv == "q8" else 2e-6)


@pytest.mark.parametrize("kv", ["q8", "f32"])
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 32])
@pytest.mark.parametrize("head_dim", [16, 48, 128, 256])
def test_groups_and_head_sizes(kv, rows, head_dim):
    keys = 300
    cache, q, k, v = case(kv, rows, head_dim, keys, seed=rows)
    limit = np.array([max(1, keys - 37 * i) for i in range(rows)])
    out = np.empty((rows, head_dim), np.float32)
    attend(cache, 1, 2, q, limit, out)
    if kv == "q8":
        k, v = eight_bits(k), eight_bits(v)
    np.testing.assert_allclose(out, oracle(q, k, v, limit), atol=4e-4 if kv == "q8" else 3e-6)


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


@pytest.mark.parametrize("kv", ["q8", "f32"])
@pytest.mark.parametrize("which", ["k", "v"])
def test_a_nan_in_the_cache_shows(kv, which):
    cache, q, k, v = case(kv, 2, 32, 100)
    (k if which == "k" else v)[50, 3] = np.nan
    fill(cache, 1, 2, k, v)
    out = np.zeros((2, 32), np.float32)
    attend(cache, 1, 2, q, np.array([100, 40]), out)
    assert np.isnan(out[0]).any()
    assert np.isfinite(out[1]).all()  # that row does not see the bad key


def test_cache_bytes_are_as_promised():
    assert bytes_per_token("q8", 1, 8, 128) == 2112
    cache = new_cache("q8", PAGE, 1, 8, 128)
    assert sum(array.nbytes for array in cache) == PAGE * 2112
    assert isinstance(new_cache("f32", 10, 1, 1, 16), FloatKV)
    assert bytes_per_token("f32", 2, 3, 64) == sum(a.nbytes for a in new_cache("f32", PAGE, 2, 3, 64)) // PAGE
