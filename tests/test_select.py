"""Choosing blocks: the first look, the scan, the choice and the attention over it, against NumPy in float64."""

import numpy as np
import pytest

from qwenc.attention.attend import prepare_rows
from qwenc.attention.cache import UNIT, cache_arrays, new_cache, slot_of
from qwenc.attention.rows import S_ROW, begin, new_rows
from qwenc.attention.select import (
    Sparse,
    attend_chosen,
    choose,
    estimate_missed,
    fold_unit,
    look,
    new_choice,
    prepare_look,
    scan_unit,
)
from qwenc.kernels.jit import allocating
from test_attention import KV_HEADS, LAYERS, as_stored, fill, poison, stage_of

SCAN, SUMMARY, PROBE, ORACLE = range(4)


def keys_like_a_model(rng, count, head_dim):
    """Channels of different spread and offset, and a slow drift: what per-channel codes are made for."""
    offset, width = rng.normal(0, 2, head_dim), np.exp(rng.normal(0, 0.7, head_dim))
    drift = np.cumsum(rng.normal(0, 0.1, (count, head_dim)), 0)
    return (offset + drift + width * rng.standard_normal((count, head_dim))).astype(np.float32)


@allocating
def measure(cache, q, units, mid, spread, tilt, scores):
    """The first look and the scan of every unit."""
    rows, head_dim = q.shape
    r, c = new_rows(rows, head_dim, UNIT), new_choice(rows, head_dim, units * UNIT, UNIT)
    for i in range(rows):
        for d in range(head_dim):
            r.q[i, d] = q[i, d]
    slot = slot_of(LAYERS, KV_HEADS, 0, 1, 2, 0)
    step = LAYERS * KV_HEADS * 256
    prepare_look(r, rows, c)
    look(cache.plane, c, rows, slot, step, units)
    for unit in range(units):
        fold_unit(cache.plane, c, r, rows, slot, step, unit)
        scan_unit(cache.plane, c, r, rows, slot, step, unit)
        for i in range(rows):
            mid[i, unit], spread[i, unit], tilt[i, unit] = c.mid[i, unit], c.spread[i, unit], c.tilt[i, unit]
            for key in range(UNIT):
                scores[i, unit * UNIT + key] = r.s[i, key]


def filled(kv, keys, head_dim, seed=0):
    rng = np.random.default_rng(seed)
    k, v = keys_like_a_model(rng, keys, head_dim), rng.standard_normal((keys, head_dim)).astype(np.float32)
    cache = new_cache(kv, keys + 256, LAYERS, KV_HEADS, head_dim, sparse=True)
    poison(cache)
    fill(cache, 1, 2, k, v)
    return cache, k, v, rng


@pytest.mark.parametrize("kv", ["q8", "q4", "f32"])
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 128), (3, 64), (8, 16), (11, 48)])
def test_the_look_and_the_scan(kv, rows, head_dim):
    units = 11
    cache, k, _, rng = filled(kv, units * UNIT, head_dim)
    q = (rng.standard_normal((rows, head_dim)) / np.sqrt(head_dim)).astype(np.float32)
    mid, spread, tilt = (np.zeros((rows, units), np.float32) for _ in range(3))
    scores = np.zeros((rows, units * UNIT), np.float32)
    measure(cache, q, units, mid, spread, tilt, scores)
    of_units = k.reshape(units, UNIT, head_dim).astype(np.float64)
    low, high = of_units.min(1), of_units.max(1)
    centre, step = (low + high) / 2, (high - low) / 15
    size = np.abs(q) @ np.abs(centre).T
    assert np.abs(mid - q @ centre.T).max() < 0.02 * size.max()
    loose = np.abs(q) @ np.broadcast_to(step.max(1, keepdims=True), step.shape).T / 31  # a step is off by half a sixteenth of the largest
    assert (np.abs(spread - np.abs(q) @ step.T) < 1.3 * loose + 0.02 * np.abs(q) @ step.T).all()
    assert (np.abs(tilt - q @ step.T) < 1.3 * loose + 0.02 * np.abs(q) @ step.T).all()
    true = q @ k.T.astype(np.float64)
    error = scores - true
    assert np.abs(error).std() < 0.25 * true.std()
    assert np.corrcoef(scores.ravel(), true.ravel())[0, 1] > 0.95
