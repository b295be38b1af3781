"""Sessions with settings of their own on one engine's weights, and going back to a point of a context."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import qwenc

GOLDEN = Path(__file__).parent / "data" / "goldens" / "llama-smol"
IDS = np.random.default_rng(1).integers(0, 160, 300).tolist()


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    from qwenc.checkpoint import model_cache

    patch = pytest.MonkeyPatch()
    patch.setattr(model_cache, "cache_root", lambda: tmp_path_factory.getbasetemp() / "qwenc-cache")
    with qwenc.load(GOLDEN, wmode="f32", kv="f32", prefill_batch=64) as engine:
        yield engine
    patch.undo()


def decode(session, ids):
    return np.stack([session.step(token).copy() for token in ids])


@pytest.mark.parametrize(("kv", "length"), [("f32", 256), ("f32", 250), ("f32", 3), ("q4", 250), ("q4", 256), ("q4", 20)])
def test_rewinding_gives_the_same_logits_again(engine, kv, length):
    """Also where 5-bit keys get their codes between the mark and the rewinding: when their 32 tokens are complete."""
    settings = replace(engine.settings, kv=kv)
    session = engine.session(length + 12, settings=settings)
    session.prefill(IDS[:length])
    mark = session.mark()
    first = decode(session, IDS[length : length + 12])
    session.rewind(mark)
    assert session.length == length
    assert np.array_equal(decode(session, IDS[length : length + 12]), first)
    session.rewind(mark)
    assert np.array_equal(decode(session, IDS[:12]), decode_after(engine, settings, length, IDS[:12])), (
        "other tokens, as if the first had not been"
    )


def decode_after(engine, settings, length, ids):
    session = engine.session(length + len(ids), settings=settings)
    session.prefill(IDS[:length])
    return decode(session, ids)


def test_another_session_goes_on_from_a_mark(engine):
    first = engine.session(300)
    first.prefill(IDS[:280])
    mark = first.mark()
    wanted = decode(first, IDS[280:290])
    second = engine.session(295, settings=replace(engine.settings, prefill_batch=32))
    second.take_over(first, mark)
    assert np.array_equal(decode(second, IDS[280:290]), wanted)
    assert second.kv_bytes() == first.kv_bytes() > 0
    with pytest.raises(qwenc.UsageError):
        engine.session(100).take_over(first, mark)
    with pytest.raises(qwenc.UsageError):
        engine.session(300, settings=replace(engine.settings, kv="q8")).take_over(first, mark)


def test_a_session_with_another_cache_on_the_same_weights(engine):
    ids = IDS[:80]
    exact = engine.session(80).logits(ids)
    rounded = engine.session(80, settings=replace(engine.settings, kv="q8")).logits(ids)
    assert 0 < np.abs(rounded - exact).mean() < 0.05 * np.abs(exact).mean()
    with qwenc.load(GOLDEN, wmode="f32", kv="q8", prefill_batch=64) as other:
        assert np.array_equal(other.session(80).logits(ids), rounded)


def test_settings_that_need_another_engine_are_refused(engine):
    for change in ({"wmode": "q4"}, {"threads": 99}):
        with pytest.raises(qwenc.UsageError, match=next(iter(change))):
            engine.session(10, settings=replace(engine.settings, **change))


# ---- what sparse attention chose -------------------------------------------------------------------------------------------
def watched(engine, length, **sparse):
    settings = replace(engine.settings, kv="q8", sparse_attn=True, sparse_min_ctx=0, sparse_pf_min_ctx=2**31 - 1, **sparse)
    session = engine.session(length + 1, settings=settings, watch=True)
    session.prefill(IDS[:length])
    logits = session.step(IDS[length]).copy()
    return session, logits, session.watched()


def test_watching_tells_the_chosen_blocks_and_their_share_of_attention(engine):
    _, nearly_exact, (most, mass, _) = watched(engine, 280, sparse_score="oracle", sparse_k=8)
    assert most.shape == mass.shape == (engine.config.num_hidden_layers, engine.config.num_key_value_heads, 9)
    assert np.allclose(mass.sum(axis=-1), 1, atol=1e-5) and mass.min() >= 0
    assert (most.sum(axis=-1) == 8).all()
    exact = decode_after(engine, replace(engine.settings, kv="q8"), 280, IDS[280:281])[0]
    assert np.abs(nearly_exact - exact).max() < 0.25 * np.abs(exact).max()

    session, _, (kept, same, missed) = watched(engine, 280, sparse_score="oracle", sparse_k=4)
    assert (kept.sum(axis=-1) == 4).all() and kept[..., 0].all() and kept[..., -1].all()
    assert np.allclose(same[0], mass[0], atol=1e-5), "the first layer sees the same, however few blocks are kept"
    left_out = np.where(kept, 0, same).sum(axis=-1)
    assert np.allclose(session._sequence.missed, left_out, atol=1e-4) and missed == pytest.approx(left_out.mean(), abs=1e-4)
    free = np.where(kept, -1, same)[..., 1:-1]
    chosen = np.where(kept, same, 2)[..., 1:-1]
    assert (chosen.min(axis=-1) >= free.max(axis=-1) - 1e-6).all(), "the oracle takes the heaviest"


def test_an_exact_step_has_no_choice(engine):
    assert watched(engine, 60)[2] is None
    assert engine.session(10).watched() is None
