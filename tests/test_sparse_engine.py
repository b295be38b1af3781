"""Sparse attention and small KV caches through the whole engine: where it is exact, what it says, that nothing depends on how it is run."""

from pathlib import Path

import numpy as np
import pytest

import qwenc
from qwenc.model.sparse_plan import make_sparse, why_exact
from qwenc.report import Reporter
from qwenc.settings import Settings

MODEL = Path(__file__).parent / "data" / "goldens" / "qwen3-dense-tied"
SPARSE = {"sparse_attn": True, "sparse_k": 2, "sparse_block": 32, "sparse_min_ctx": 0, "sparse_pf_min_ctx": 0}


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(1).integers(0, 160, 230).tolist()


def run(ids, steps=4, batch=64, watch=False, reporter=None, **settings):
    """Logits after a prefill and after each of a few steps, and the session."""
    extra = {"reporter": reporter} if reporter else {}
    with qwenc.load(MODEL, wmode="q8", prefill_batch=batch, **extra, **settings) as engine:
        session = engine.session(len(ids) + steps, watch=watch)
        logits = [session.prefill(ids).copy()]
        for i in range(steps):
            logits.append(session.step(ids[i]).copy())
        return np.array(logits), session


@pytest.mark.parametrize(("keys", "sparse"), [(1, False), (64, False), (65, True), (96, True)])
def test_the_gate(keys, sparse):
    plan = make_sparse(Settings(sparse_attn=True, sparse_k=1, sparse_min_ctx=0), prefill=False)
    assert (why_exact(plan, keys) == "") == sparse


def test_the_gate_by_default_waits_until_sparse_pays():
    for prefill in (False, True):
        plan = make_sparse(Settings(sparse_attn=True), prefill=prefill)
        assert why_exact(plan, 2047) and not why_exact(plan, 2048)


def test_while_all_blocks_would_be_kept_the_bits_are_those_of_exact(ids):
    exact, _ = run(ids)
    kept, session = run(ids, **SPARSE | {"sparse_k": 8})
    np.testing.assert_array_equal(exact, kept)
    assert session.timings.decode.sparse_n == 0


def test_settings_without_sparse_attn_change_nothing(ids):
    exact, _ = run(ids)
    other, _ = run(ids, **SPARSE | {"sparse_attn": False, "sparse_score": "probe"})
    np.testing.assert_array_equal(exact, other)


@pytest.mark.parametrize("kv", ["q8", "q4"])
def test_sparse_is_near_exact_and_no_thread_count_changes_it(ids, kv):
    exact, _ = run(ids, kv=kv)
    sparse, session = run(ids, kv=kv, threads=1, **SPARSE | {"sparse_k": 5})
    more, _ = run(ids, kv=kv, threads=3, **SPARSE | {"sparse_k": 5})
    np.testing.assert_array_equal(sparse, more)
    assert 0 < np.abs(sparse - exact).max() < 0.6 * np.abs(exact).max()
    decode = session.timings.decode
    assert decode.sparse_n == 4 and 0 <= decode.missed_mean <= decode.missed_worst <= 1


@pytest.mark.parametrize("kv", ["q8", "k8v4", "q4", "f32"])
def test_a_mini_batch_changes_no_bit(ids, kv):
    whole, _ = run(ids, kv=kv, batch=256)
    pieces, _ = run(ids, kv=kv, batch=33)
    np.testing.assert_array_equal(whole, pieces)


@pytest.mark.parametrize("score", ["summary", "probe", "oracle"])
def test_the_other_scores_run(ids, score):
    exact, _ = run(ids)
    logits, session = run(ids, **SPARSE | {"sparse_score": score, "sparse_k": 5})
    assert np.isfinite(logits).all() and np.abs(logits - exact).max() < 0.8 * np.abs(exact).max()
    assert (session.timings.decode.sparse_n == 0) == (score == "probe")  # which estimates nothing


def test_small_caches_stay_near(ids):
    exact, _ = run(ids, kv="f32")
    for kv, near in (("q8", 0.03), ("k8v4", 0.3), ("q4", 0.35)):
        logits, _ = run(ids, kv=kv)
        assert np.abs(logits - exact).max() < near * np.abs(exact).max()


class Said(Reporter):
    def __init__(self):
        self.lines = []

    def detail(self, text):
        self.lines.append(text)


def test_the_path_of_each_phase_is_told(ids):
    said = Said()
    run(ids, reporter=said, **SPARSE | {"sparse_pf_min_ctx": 10_000})
    told = [line for line in said.lines if "attention" in line]
    assert told[0].startswith("prefill at 64 tokens: exact attention (")
    assert told[1] == f"decode at {len(ids) + 1} tokens: sparse attention"
