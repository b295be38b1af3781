"""Several completions at a time: each has the tokens and the logits that it has alone."""

from pathlib import Path

import numpy as np
import pytest

import qwenc

GOLDENS = Path(__file__).parent / "data" / "goldens"


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    from qwenc.checkpoint import model_cache

    monkeypatch.setattr(model_cache, "cache_root", lambda: tmp_path_factory.getbasetemp() / "qwenc-cache")


def prompts(count, vocab=150):
    """Different lengths, one beyond a page of the cache."""
    rng = np.random.default_rng(5)
    return [rng.integers(0, vocab, size).tolist() for size in ([3, 40, 1, 300, 17, 255, 64, 2, 90, 31, 5] * 2)[:count]]


def alone(engine, ids, **arguments):
    return [(step.id, step.logprob) for step in engine.generate(ids, **arguments)]


def in_lanes(engine, count, requests):
    """[(ids, arguments)] → what each generates, with `count` of them at work at a time."""
    lanes = engine.lanes(count)
    found = {n: [] for n in range(len(requests))}
    waiting = list(enumerate(requests))
    while waiting or lanes.working:
        while waiting and lanes.free:
            n, (ids, arguments) = waiting.pop(0)
            step = lanes.start(n, ids, **arguments)
            found[n].append((step.id, step.logprob))
        assert lanes.working <= count
        for n, step in lanes.step():
            found[n].append((step.id, step.logprob))
    return [found[n] for n in range(len(requests))]


@pytest.mark.parametrize("name", ["llama-smol", "qwen3-dense-tied", "qwen3-moe"])
@pytest.mark.parametrize("wmode", ["dual", "q8"])
def test_tokens_and_logprobs_are_those_of_single_runs(name, wmode):
    """Lengths around tiles and pages, more completions than lanes, draws with seeds of their own."""
    requests = [
        (ids, {"max_tokens": 3 + n % 5, "ignore_eos": True} | ({"temp": 1.5, "seed": n} if n % 2 else {}))
        for n, ids in enumerate(prompts(11))
    ]
    with qwenc.load(GOLDENS / name, wmode=wmode) as engine:
        wanted = [alone(engine, ids, **arguments) for ids, arguments in requests]
        for count in (2, 3, 9):
            assert in_lanes(engine, count, requests) == wanted


@pytest.mark.parametrize(
    "settings",
    [{"kv": "q4"}, {"sparse_attn": True, "sparse_k": 2, "sparse_pf_min_ctx": 0, "prefill_batch": 64}],
    ids=["4-bit KV", "sparse"],
)
def test_other_caches_and_sparse_attention(settings):
    requests = [(ids, {"max_tokens": 4, "ignore_eos": True}) for ids in prompts(6)]
    with qwenc.load(GOLDENS / "qwen3-dense-tied", wmode="q4", **settings) as engine:
        wanted = [alone(engine, ids, **arguments) for ids, arguments in requests]
        assert in_lanes(engine, 4, requests) == wanted
        long = prompts(4)[3]  # begins as the next ones do, which therefore take its keys and values
        alike = [([*long[:n], 1, 2, 3], {"max_tokens": 3, "ignore_eos": True}) for n in (299, 150, 64, 33)]
        wanted = [alone(engine, ids, **arguments) for ids, arguments in alike]
        assert in_lanes(engine, 2, alike) == wanted


def test_float32_weights_run_one_after_the_other():
    with qwenc.load(GOLDENS / "llama-smol", wmode="f32", kv="f32") as engine:
        assert engine.lanes().count == 1
        requests = [(ids, {"max_tokens": 3, "ignore_eos": True}) for ids in prompts(4)]
        assert in_lanes(engine, 3, requests) == [alone(engine, ids, **arguments) for ids, arguments in requests]


def test_a_prompt_that_fails_harms_no_other():
    """A NaN in the cache of one context; a prompt that is too long; a lane that is free again."""
    with qwenc.load(GOLDENS / "llama-smol", wmode="q8", ctx_size=200) as engine:
        wanted = alone(engine, prompts(2)[1], max_tokens=5, ignore_eos=True)
        lanes = engine.lanes(2)
        with pytest.raises(qwenc.UsageError, match="the context holds 200"):
            lanes.start("long", prompts(4)[3])
        found = [lanes.start("good", prompts(2)[1], max_tokens=5, ignore_eos=True)]
        lanes.start("bad", prompts(1)[0], max_tokens=5, ignore_eos=True)
        lanes._lanes[1].session.cache.k.scale[...] = np.nan
        taken = dict(lanes.step())
        assert isinstance(taken["bad"], qwenc.QwencError) and "not finite" in str(taken["bad"]) and lanes.working == 1
        found.append(taken["good"])
        while lanes.working:
            found += [step for _key, step in lanes.step()]
        assert [(step.id, step.logprob) for step in found] == wanted


def test_memory_decides_how_many_run_together(monkeypatch):
    from qwenc import lanes as module

    with qwenc.load(GOLDENS / "llama-smol", wmode="q8") as engine:
        monkeypatch.setattr(module, "available_bytes", lambda: 2 * 100 * engine.bytes_per_token)  # half of it: 100 tokens
        lanes = engine.lanes()
        assert lanes.count == 8 and lanes.fits(1 << 30)  # alone, anything
        lanes.start(0, [1] * 40, max_tokens=20, ignore_eos=True)
        assert lanes.fits(40) and not lanes.fits(41)
