"""The model that comes with qwenc, as torch trains it: Qwen3 with tied embeddings, written down once more for speed on a CPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, T, D], cos and sin [T, D/2]: halves rotated, as Qwen3 does."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, [B, heads, T, D] each."""
    length = q.shape[2]
    if length > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])  # quicker, where it fits the cache
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -1e9), -1).to(q.dtype) @ v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, ffn, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
        self.heads, self.kv_heads, self.dim = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], dim
        shapes = {
            "q_proj": (self.heads * dim, hidden),
            "k_proj": (self.kv_heads * dim, hidden),
            "v_proj": (self.kv_heads * dim, hidden),
            "o_proj": (hidden, self.heads * dim),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }
        self.w = nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "q_norm": dim, "k_norm": dim}
        self.norm = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name, size in norms.items()})

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        w = {name: p.bfloat16() for name, p in self.w.items()}
        h = rms_norm(x, self.norm["input_layernorm"])
        q, k, v = (
            F.linear(h, torch.cat([w["q_proj"], w["k_proj"], w["v_proj"]]))
            .view(batch, length, -1, self.dim)
            .transpose(1, 2)
            .split([self.heads, self.kv_heads, self.kv_heads], 1)
        )
        q, k = rotate(rms_norm(q, self.norm["q_norm"]), cos, sin), rotate(rms_norm(k, self.norm["k_norm"]), cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        a = attend(q, k, v)
        x = x + F.linear(a.transpose(1, 2).reshape(batch, length, -1), w["o_proj"])
        h = rms_norm(x, self.norm["post_attention_layernorm"])
        gate, up = F.linear(h, torch.cat([w["gate_proj"], w["up_proj"]])).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w["down_proj"])


class Model(nn.Module):
    """Qwen3 with tied embeddings; computes in bfloat16, keeps its weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(CONFIG["vocab_size"], CONFIG["hidden_size"]))
        self.layers = nn.ModuleList([Layer() for _ in range(CONFIG["num_hidden_layers"])])
        self.final_norm = nn.Parameter(torch.ones(CONFIG["hidden_size"]))
        depth_scale = 1 / math.sqrt(2 * len(self.layers))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=CONFIG["initializer_range"] * (depth_scale if "o_proj" in name or "down_proj" in name else 1))
        half = CONFIG["head_dim"] // 2
        angles = torch.outer(torch.arange(CONFIG["max_position_embeddings"]), CONFIG["rope_theta"] ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] to the hidden states before the output layer, [B, T, hidden]."""
        x = F.embedding(ids, self.embed.bfloat16())
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return rms_norm(x, self.final_norm)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32."""
        return F.linear(hidden, self.embed.bfloat16()).float()


@contextlib.contextmanager
def rounded_weights(model: Model, rounded: bool = True) -> Iterator[None]:
    """The matrices as `q4` stores them, near enough, for as long as this lasts. Gradients then go to the weights proper."""
    matrices = [p for p in model.parameters() if p.dim() == 2] if rounded else []
    kept = [p.detach().clone() for p in matrices]
    with torch.no_grad():
        for p in matrices:
            p.copy_(round_to_4_bits(p))
    yield
    with torch.no_grad():
        for p, values in zip(matrices, kept, strict=True):
            p.copy_(values)


def round_to_4_bits(p: torch.Tensor) -> torch.Tensor:
    """p [N, K] with one scale per 32 inputs, the best of four."""
    groups = p.view(p.shape[0], -1, 32)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = groups, torch.full_like(extreme, math.inf)
    for code in (-9.0, -8.0, -7.0, -6.0):
        scale = torch.where(extreme != 0, extreme / code, 1.0)
        tried = (groups / scale).round().clamp(-8, 7) * scale
        miss = (tried - groups).pow(2).sum(-1, keepdim=True)
        best, least = torch.where(miss < least, tried, best), torch.minimum(miss, least)
    return best.view_as(p)
