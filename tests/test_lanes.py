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
