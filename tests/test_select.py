"""Choosing blocks: the first look, the scan, the choice and the attention over it, against NumPy in float64."""

import numpy as np
import pytest
from test_attention import KV_HEADS, LAYERS, as_stored, coded_keys, fill, poison, scores, stage_of

from qwenc.attention.cache import UNIT, UNITS, new_cache, slot_of
from qwenc.attention.chosen import attend_chosen, estimate_missed
from qwenc.attention.look import look, new_choice, prepare_look
from qwenc.attention.rows import begin, new_rows
from qwenc.attention.scan import fold_page, scan_unit, unit_slot
from qwenc.attention.scores import prepare_rows
from qwenc.attention.select import Sparse, choose
from qwenc.kernels.jit import allocating
from qwenc.model.sparse_plan import make_sparse
from qwenc.settings import Settings

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
        at, place = unit_slot(slot, step, unit), unit % UNITS
        if place == 0:
            fold_page(cache.plane, c, rows, at, unit)
        scan_unit(cache.plane, c, r, rows, at, place, UNIT * place)
        for i in range(rows):
            mid[i, unit], spread[i, unit], tilt[i, unit] = c.mid[i, unit], c.spread[i, unit], c.tilt[i, unit]
            for key in range(UNIT):
                scores[i, unit * UNIT + key] = r.s[i, UNIT * place + key]


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


@allocating
def attend_over_choice(cache, stage, sparse, q, keys, kept, out, missed):
    """One token's group of heads: choose, attend, estimate what was missed."""
    rows, head_dim = q.shape
    r, c = new_rows(rows, head_dim, keys), new_choice(rows, head_dim, keys, sparse.block)
    for i in range(rows):
        r.limit[i] = keys
        for d in range(head_dim):
            r.q[i, d] = q[i, d]
    own, blocks = (keys - 1) // UNIT * UNIT, (keys + sparse.block - 1) // sparse.block
    slot = (1 * KV_HEADS + 2) * UNIT
    prepare_rows(cache.k, r, rows)
    count = choose(cache, stage, slot, sparse, c, r, rows, rows, LAYERS, KV_HEADS, 0, 1, 2, own, keys)
    begin(r, rows)
    attend_chosen(cache, stage, slot, c, sparse.block, r, rows, LAYERS, KV_HEADS, 0, 1, 2, own, keys)
    estimate_missed(c, sparse, r, rows, own, blocks)
    missed[0] = c.missed[0]
    for b in range(blocks):
        kept[b] = c.kept[b]
    for i in range(rows):
        for d in range(head_dim):
            out[i, d] = r.o[i, d] / r.total[i]
    return count


def plan(score=SCAN, block=UNIT, k=4, mass=0.0, most=None, most_share=1, ratio=0.0, scan_least=0):
    return Sparse(score, block, k, most or k, most_share, mass, 8, ratio, 64, 0, scan_least, 3, 5)


def run(kv, sparse, keys, rows=2, head_dim=64, seed=0, spread=3.0):
    cache, k, v, rng = filled(kv, keys, head_dim, seed)
    q = (spread * rng.standard_normal((rows, head_dim)) / np.sqrt(head_dim)).astype(np.float32)
    blocks = -(-keys // sparse.block)
    kept, out, missed = np.zeros(blocks, np.uint8), np.zeros((rows, head_dim), np.float32), np.zeros(1, np.float32)
    count = attend_over_choice(cache, stage_of(cache), sparse, q, keys, kept, out, missed)
    k, v = as_stored(kv, k, v)
    share = softmax(np.array([scores(row, k, coded_keys(kv, keys)) for row in q]))
    by_block = np.add.reduceat(share, np.arange(0, keys, sparse.block), axis=1)
    return count, kept.astype(bool), out, float(missed[0]), share, by_block, v


def softmax(s):
    p = np.exp(s - s.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


@pytest.mark.parametrize("kv", ["q8", "k8v4", "q4", "f32"])
@pytest.mark.parametrize("block", [32, 16, 7, 100, 5000])
@pytest.mark.parametrize("keys", [65, 320, 321, 607])
def test_attention_over_the_kept_blocks_is_masked_by_token(kv, block, keys):
    _, kept, out, _, share, _, v = run(kv, plan(block=block), keys)
    seen = np.repeat(kept, block)[:keys]
    expected = (share * seen) @ v / (share * seen).sum(1, keepdims=True)
    np.testing.assert_allclose(out, expected, atol=3e-3)
    assert kept[0] and kept[-1]


@pytest.mark.parametrize("score", [SCAN, ORACLE])
@pytest.mark.parametrize(("rows", "head_dim"), [(1, 128), (2, 16), (4, 48), (8, 256), (5, 64)])
@pytest.mark.parametrize("block", [32, 16, 64])
def test_the_choice_is_that_of_the_true_shares(score, rows, head_dim, block):
    shares = []
    for seed in range(6):
        count, kept, _, _, _, by_block, _ = run("q8", plan(score, block, k=6), 1000, rows, head_dim, seed=seed)
        assert count == kept.sum() == 6
        pooled = by_block.sum(0)
        forced = np.zeros(len(kept), bool)
        forced[0] = True
        forced[999 // 32 * 32 // block :] = True
        best = np.argsort(-np.where(forced, np.inf, pooled))[:6]
        shares.append(pooled[kept].sum() / pooled[best].sum())
    # one draw of keys says little: with 2 bits, and few channels to average over, a single block is easily mistaken
    assert np.mean(shares) >= (1 - 1e-3 if score == ORACLE else 0.55)


@pytest.mark.parametrize("k", [1, 2, 31, 1000])
def test_budgets_at_the_edges(k):
    count, kept, *_ = run("q8", plan(k=k), 1000)
    assert count == kept.sum() == min(max(k, 2), 32)
    assert kept[0] and kept[-1]


def test_a_ratio_of_the_blocks():
    assert run("q8", plan(k=2, ratio=0.5), 1000)[0] == 16


def test_a_target_mass_takes_the_blocks_that_it_needs():
    counts = []
    for mass in (0.5, 0.9, 0.99):
        count, kept, _, _, _, by_block, _ = run("q8", plan(ORACLE, k=2, most=24, mass=mass), 1000, rows=1)
        held = by_block[0, kept].sum()
        assert held >= mass - 1e-3 or count == 24
        without_least = held - by_block[0, kept][1:-1].min() if count > 2 else 0
        assert without_least < mass + 1e-3  # no more than needed
        counts.append(count)
    assert counts == sorted(counts) and counts[0] < counts[-1] <= 24


def test_a_target_mass_takes_no_more_than_a_share_of_the_blocks():
    for k, expected in ((2, 8), (11, 11)):  # of 32
        assert run("q8", plan(ORACLE, k=k, most=24, most_share=4, mass=0.99), 1000, rows=1, spread=0.3)[0] == expected


def test_prefill_keeps_more_blocks_unless_it_is_told_how_many():
    told, untold = (make_sparse(Settings(sparse_attn=True, sparse_k=8, sparse_pf_k=k), prefill=True) for k in (9, None))
    assert (told.k, told.most, told.mass) == (9, 9, 0)
    assert (untold.k, untold.most) == (8, 16) and untold.mass > 0 and untold.most_share > 1
    assert make_sparse(Settings(sparse_attn=True, sparse_k=8), prefill=False).most == 8


@pytest.mark.parametrize("score", [SCAN, ORACLE])
def test_the_missed_mass_is_estimated(score):
    errors = []
    for seed in range(6):
        _, kept, _, missed, _, by_block, _ = run("q8", plan(score, k=5), 1500, seed=seed)
        errors.append(missed - by_block[:, ~kept].sum(1).mean())
    assert np.abs(errors).mean() < (0.005 if score == ORACLE else 0.15)


@pytest.mark.parametrize("kv", ["q8", "q4"])
def test_a_needle_is_found_at_any_depth(kv):
    """One key that the query wants, far back: the scan must rank its block first, wherever it lies in its unit."""
    for place in (40, 333, 700, 1183):
        cache, k, v, rng = filled(kv, 1300, 64, seed=place)
        q = rng.standard_normal((2, 64)).astype(np.float32)
        k[place] = 3 * q[0] + 0.5 * k[place]
        fill(cache, 1, 2, k, v)
        kept, out, missed = np.zeros(41, np.uint8), np.zeros((2, 64), np.float32), np.zeros(1, np.float32)
        attend_over_choice(cache, stage_of(cache), plan(k=3), q[:1], 1300, kept, out[:1], missed)
        assert kept[place // UNIT]


def test_a_needle_among_wide_units_is_found_where_all_are_scanned():
    """Twelve units of wide channels promise more at a first look than the one that holds the answer. A scan of six misses it."""
    cache, k, v, rng = filled("q8", 1000, 64)
    q = rng.standard_normal((1, 64)).astype(np.float32)
    k[:] = 0.1 * rng.standard_normal(k.shape)
    k[UNIT : 13 * UNIT] = rng.choice([-1.0, 1.0], (12 * UNIT, 64))
    k[700] = 0.7 * np.sign(q[0])
    fill(cache, 1, 2, k, v)
    found = []
    for scan_least in (0, make_sparse(Settings(sparse_attn=True), prefill=False).scan_least):
        kept, out, missed = np.zeros(32, np.uint8), np.zeros((1, 64), np.float32), np.zeros(1, np.float32)
        attend_over_choice(cache, stage_of(cache), plan(k=3, scan_least=scan_least), q, 1000, kept, out, missed)
        found.append(bool(kept[700 // UNIT]))
    assert found == [False, True]


def test_8_and_4_bits_choose_alike():
    """Both keep the same 2-bit plane, made from the same 8-bit keys."""
    for seed in range(3):
        assert (run("q8", plan(k=6), 1500, seed=seed)[1] == run("q4", plan(k=6), 1500, seed=seed)[1]).all()
