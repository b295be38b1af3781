"""A real model against transformers: SmolLM2-135M-Instruct, which scripts/fetch_smollm2.py brings.

Runs when the model is in models/smollm2 of the checkout, or where QWENC_TEST_SMOLLM2 says; CI fetches it.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

import qwenc

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
MODEL = Path(os.environ.get("QWENC_TEST_SMOLLM2") or ROOT / "models" / "smollm2")

sys.path.insert(0, str(ROOT / "scripts"))
from measure_quality import compare, log_probabilities  # noqa: E402

pytestmark = pytest.mark.skipif(
    not (MODEL / "model.safetensors").is_file(), reason=f"no {MODEL.name} checkpoint: run scripts/fetch_smollm2.py models/smollm2"
)
GREEDY = json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))["prompts"]


@pytest.fixture(scope="module")
def exact():
    with qwenc.load(MODEL, wmode="f32", kv="f32") as engine:
        yield engine


@pytest.fixture(scope="module")
def english():
    with np.load(DATA / "english_nll.npz") as data:
        return dict(data)


@pytest.fixture(scope="module")
def exact_log_probs(exact, english):
    return log_probabilities(exact.logits(english["ids"].tolist()))


def test_goldens_have_margins_that_rounding_cannot_cross():
    for prompt in GREEDY:
        assert len(prompt["ids"]) == 64
        assert min(prompt["margins"]) > 2e-3


@pytest.mark.parametrize("prompt", GREEDY, ids=lambda prompt: prompt["rendered"].replace("\n", " ")[-24:])
def test_greedy_tokens_are_those_of_transformers(exact, prompt):
    steps = list(exact.generate(prompt["prompt_ids"], max_tokens=64, ignore_eos=True))
    assert [step.id for step in steps] == prompt["ids"]
    assert "".join(step.text for step in steps) == prompt["decoded"]


def test_prompts_encode_as_in_transformers(exact):
    for prompt in GREEDY:
        if "text" in prompt:
            assert exact.encode_prompt(prompt["text"], raw=True) == prompt["prompt_ids"]
        elif [message["role"] for message in prompt["messages"]] in (["user"], ["system", "user"]):
            system = prompt["messages"][0]["content"] if len(prompt["messages"]) == 2 else None
            assert exact.encode_prompt(prompt["messages"][-1]["content"], system=system) == prompt["prompt_ids"]


def test_english_ids_and_likelihoods_are_those_of_transformers(exact, english, exact_log_probs):
    ids = english["ids"]
    text = (DATA / "english.txt").read_text(encoding="utf-8")
    assert exact.encode_prompt(text, raw=True)[: len(ids)] == ids.tolist()
    nll = -exact_log_probs[np.arange(len(ids) - 1), ids[1:]]
    np.testing.assert_allclose(nll, english["nll"], atol=5e-4)
    clear = english["margin"] > 1e-3
    assert (exact_log_probs.argmax(axis=1) == english["top1"])[clear].all()


def test_q8_with_int8_kv_stays_close_to_f32(english, exact_log_probs):
    with qwenc.load(MODEL, wmode="q8", kv="q8") as engine:
        found = log_probabilities(engine.logits(english["ids"].tolist()))
    kl, same_top = compare(exact_log_probs, found)
    assert kl <= 0.003
    assert same_top >= 0.98
