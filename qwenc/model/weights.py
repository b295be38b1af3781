"""From a packed file to the records that a step takes. Matrices stay where they are mapped; only norms are copied, to pad them."""

from __future__ import annotations

from typing import Any

import numpy as np

from qwenc.checkpoint.packed import Packed
from qwenc.config.model_config import ModelConfig, round_up
from qwenc.kernels.records import F32, Q4, Q8, Q8Fast
from qwenc.model.records import Shape, Weights

RECORDS = {"q4": Q4, "q8": Q8, "q8fast": Q8Fast}


def make_shape(config: ModelConfig) -> Shape:
    """The numbers that kernels need."""
    return Shape(
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        hidden_room=round_up(config.hidden_size, 32),
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        head_room=config.padded_head_dim,
        eps=np.float32(config.rms_norm_eps),
        qk_norm=config.qk_norm,
        q_scale=np.float32(config.head_dim**-0.5),
        experts_per_token=config.moe.num_experts_per_tok if config.moe else 0,
        norm_topk=bool(config.moe and config.moe.norm_topk_prob),
    )


def make_weights(packed: Packed, fmt: str) -> Weights:
    """All weights in format "q4", "q8", "q8fast" (the same arrays as q8) or "f32", which the file must hold."""
    stored = "q8" if fmt == "q8fast" else fmt
    config, tensors = packed.config, packed.tensors
    hidden_room, head_room = round_up(config.hidden_size, 32), config.padded_head_dim

    def matrix(name: str) -> Any:
        if fmt == "f32":
            values = tensors.get(f"{name}.f32.values")
            return None if values is None else F32(_stacked(values, 3))
        codes = tensors.get(f"{name}.{stored}.codes")
        return None if codes is None else RECORDS[fmt](_stacked(codes, 3), _stacked(tensors[f"{name}.{stored}.scales"], 3))

    def norm(name: str, room: int) -> np.ndarray:
        found = tensors.get(name)
        return np.zeros((0, room), np.float32) if found is None else _padded(found, room)

    embed = matrix("embed")
    return Weights(
        embed=embed,
        lm_head=embed if config.tie_word_embeddings else matrix("lm_head"),
        qkv=matrix("qkv"),
        o=matrix("o"),
        gate_up=matrix("gate_up"),
        down=matrix("down"),
        expert_gate_up=matrix("expert_gate_up"),
        expert_down=matrix("expert_down"),
        router=_padded(tensors.get("router", np.zeros((0, 0, 0), np.float32)), hidden_room),
        input_norm=norm("input_norm", hidden_room),
        post_norm=norm("post_norm", hidden_room),
        q_norm=norm("q_norm", head_room),
        k_norm=norm("k_norm", head_room),
        final_norm=norm("final_norm", hidden_room),
        mlp=_mlp_index(config),
    )


def _stacked(tensor: np.ndarray, own: int) -> np.ndarray:
    """All stack axes as one: [stack, …own axes]. A view."""
    return tensor.reshape(-1, *tensor.shape[-own:])


def _padded(tensor: np.ndarray, room: int) -> np.ndarray:
    """A float32 copy whose last axis is padded with zeros to `room`."""
    out = np.zeros((*tensor.shape[:-1], room), np.float32)
    out[..., : tensor.shape[-1]] = tensor
    return out


def _mlp_index(config: ModelConfig) -> np.ndarray:
    """Per layer: its index among the dense layers, or −1 − its index among the MoE layers."""
    index = np.zeros(config.num_hidden_layers, np.int64)
    for i, layer in enumerate(config.dense_layers):
        index[layer] = i
    for i, layer in enumerate(config.moe_layers):
        index[layer] = -1 - i
    return index
