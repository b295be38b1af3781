"""The model as a page of float64 NumPy, from a packed file: the oracle for the converter and for the real forward pass."""

import numpy as np
from unpack import matrix

from qwenc.config.rope import rope_inv_freq, rope_tables


def forward(packed, ids, fmt="f32"):
    """Logits float64 [n, vocab] of teacher-forced `ids`, with the weights that the packed file holds in format `fmt`."""
    config = packed.config
    heads, kv_heads, dim, pad = config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.padded_head_dim
    names = ["embed", "qkv", "o"] + ["gate_up", "down"] * bool(config.dense_layers) + ["expert_gate_up", "expert_down"] * bool(config.moe)
    weights = {name: matrix(packed, name, fmt).astype(np.float64) for name in names}
    plain = {name: packed.tensors[name].astype(np.float64) for name in packed.tensors if "." not in name}
    cos, sin = rope_tables(*rope_inv_freq(config.rope, dim), np.arange(len(ids)))
    cos, sin = cos[:, None].astype(np.float64), sin[:, None].astype(np.float64)
    n, hidden = len(ids), config.hidden_size

    x = weights["embed"][ids, :hidden]
    for layer in range(config.num_hidden_layers):
        y = rms_norm(x, plain["input_norm"][layer], config.rms_norm_eps)
        qkv = linear(weights["qkv"][layer], y).reshape(n, heads + 2 * kv_heads, pad)[:, :, :dim]
        q, k, v = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, heads + kv_heads :]
        if config.qk_norm:
            q = rms_norm(q, plain["q_norm"][layer], config.rms_norm_eps)
            k = rms_norm(k, plain["k_norm"][layer], config.rms_norm_eps)
        out = np.zeros((n, heads, pad))
        out[:, :, :dim] = attention(rotate(q, cos, sin), rotate(k, cos, sin), v)
        x = x + linear(weights["o"][layer], out.reshape(n, heads * pad))[:, :hidden]
        y = rms_norm(x, plain["post_norm"][layer], config.rms_norm_eps)
        if layer in config.dense_layers:
            i = config.dense_layers.index(layer)
            x = x + mlp(weights["gate_up"][i], weights["down"][i], y)[:, :hidden]
        else:
            i = config.moe_layers.index(layer)
            x = x + experts(config.moe, plain["router"][i], weights["expert_gate_up"][i], weights["expert_down"][i], y)
    x = rms_norm(x, plain["final_norm"], config.rms_norm_eps)
    head = weights["embed"] if config.tie_word_embeddings else matrix(packed, "lm_head", fmt).astype(np.float64)
    return linear(head, x)[:, : config.vocab_size]


def linear(weight, x):
    """x·Wᵀ, the inputs padded with zeros to the width of W."""
    return x @ weight[:, : x.shape[-1]].T


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rotate(x, cos, sin):
    """Rotate-half RoPE of x [n, heads, dim]."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(q, k, v):
    """Causal attention; q [n, heads, dim], k and v [n, kv_heads, dim]."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    return np.einsum("hqk,khd->qhd", softmax(scores), v)


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def mlp(gate_up, down, x):
    """SwiGLU; tile 2i of gate_up holds gate rows, tile 2i + 1 up rows."""
    y = linear(gate_up, x).reshape(len(x), -1, 2, 16)
    gate, up = y[:, :, 0].reshape(len(x), -1), y[:, :, 1].reshape(len(x), -1)
    return linear(down, gate / (1 + np.exp(-gate)) * up)


def experts(moe, router, gate_up, down, x):
    """Softmax over all experts, the best k of them, renormalised if the model says so."""
    out = np.zeros_like(x)
    probabilities = softmax(x @ router.T)
    for t, p in enumerate(probabilities):
        chosen = np.argsort(-p, kind="stable")[: moe.num_experts_per_tok]
        gates = p[chosen] / (p[chosen].sum() if moe.norm_topk_prob else 1.0)
        for expert, gate in zip(chosen, gates, strict=True):
            out[t] += gate * mlp(gate_up[expert], down[expert], x[t : t + 1])[0, : x.shape[1]]
    return out
