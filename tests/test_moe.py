"""Routing against NumPy, and whole MoE models against float64: every flag that moves an expert."""

import naive_forward
import numpy as np
import pytest
from checkpoints import MOE, weights, write_checkpoint

import qwenc
from qwenc.kernels.jit import helper
from qwenc.model.moe import route


@helper
def run_route(gate, count, norm_topk, choice, weight):
    for t in range(gate.shape[0]):
        route(gate, t * gate.shape[1], gate.shape[1], count, norm_topk, choice.reshape(-1), weight.reshape(-1), t * count)


def routed(gate, count, norm_topk):
    choice, weight = np.zeros((len(gate), count), np.int64), np.zeros((len(gate), count), np.float32)
    run_route(gate.astype(np.float32), count, norm_topk, choice, weight)
    return choice, weight


@pytest.mark.parametrize("norm_topk", [True, False])
@pytest.mark.parametrize(("experts", "count"), [(8, 2), (128, 8), (4, 4), (5, 1)])
def test_softmax_over_all_then_the_top(experts, count, norm_topk):
    gate = np.random.default_rng(0).standard_normal((20, experts)) * 3
    choice, weight = routed(gate, count, norm_topk)
    probs = np.exp(gate - gate.max(1, keepdims=True))
    probs /= probs.sum(1, keepdims=True)
    order = np.argsort(-probs, axis=1)[:, :count]
    np.testing.assert_array_equal(choice, order)
    wanted = np.take_along_axis(probs, order, 1)
    if norm_topk:
        wanted /= wanted.sum(1, keepdims=True)
    np.testing.assert_allclose(weight, wanted, rtol=1e-5)


def test_ties_go_to_the_lower_expert():
    choice, weight = routed(np.zeros((1, 6)), 3, True)
    assert choice.tolist() == [[0, 1, 2]]
    np.testing.assert_allclose(weight, 1 / 3, rtol=1e-6)


def test_huge_logits_do_not_overflow():
    choice, weight = routed(np.array([[1e4, -1e4, 9.999e3, 0]]), 2, False)
    assert choice.tolist() == [[0, 2]]
    np.testing.assert_allclose(weight, [[1 / (1 + np.exp(-1)), np.exp(-1) / (1 + np.exp(-1))]], rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"norm_topk_prob": False},
        {"norm_topk_prob": None},
        {"mlp_only_layers": []},
        {"mlp_only_layers": [0, 2]},
        {"decoder_sparse_step": 2, "mlp_only_layers": []},
        {"num_experts_per_tok": 4},
        {"num_experts_per_tok": 1},
    ],
    ids=str,
)
def test_models(tmp_path, changes):
    config = {key: value for key, value in (MOE | changes).items() if value is not None}
    held = weights(config | {"mlp_only_layers": [0, 2]} if "decoder_sparse_step" in changes else config)
    folder = write_checkpoint(tmp_path / "model", config, held)
    ids = np.random.default_rng(1).integers(0, config["vocab_size"], 40)
    with qwenc.load(folder, wmode="f32", kv="f32", prefill_batch=16) as engine:
        wanted = naive_forward.forward(engine.packed, ids, "f32")
        np.testing.assert_allclose(engine.logits(ids), wanted, atol=2e-5 * np.abs(wanted).max())
        session = engine.session(64)
        stepped = np.array([session.step(int(i)).copy() for i in ids])
        np.testing.assert_allclose(stepped, wanted, atol=2e-5 * np.abs(wanted).max())
