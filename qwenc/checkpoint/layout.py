"""Which tensors a packed file holds, by name, dtype and shape: docs/architecture.md as code."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwenc.config.model_config import ModelConfig, round_up

TILE = 16  # rows of a row tile
GROUP = 32  # inputs that share a scale
FORMATS = {"f32": ("f32",), "q8": ("q8",), "q4": ("q4",), "dual": ("q8", "q4")}  # of each wmode
DTYPE_BYTES = {"U8": 1, "I8": 1, "U16": 2, "F16": 2, "U32": 4, "I32": 4, "F32": 4}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """dtype name as in safetensors, and shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix of `rows` outputs and `inputs` inputs, or a stack of them."""

    name: str
    rows: int
    inputs: int
    stack: tuple[int, ...] = ()

    @property
    def tiles(self) -> int:
        """NB: row tiles, the last one padded with zero rows."""
        return -(-self.rows // TILE)

    @property
    def padded_inputs(self) -> int:
        """K: inputs rounded up to whole groups; the padding is zero."""
        return round_up(self.inputs, GROUP)

    @property
    def weights(self) -> int:
        """Weights of the whole stack, padding included."""
        return math.prod(self.stack) * self.tiles * TILE * self.padded_inputs

    def tensors(self, fmt: str) -> dict[str, TensorSpec]:
        """The tensors that hold it in format `fmt`."""
        tiles = (*self.stack, self.tiles)
        groups = self.padded_inputs // GROUP
        if fmt == "f32":
            return {f"{self.name}.f32.values": TensorSpec("F32", (*tiles, self.padded_inputs, TILE))}
        codes = TensorSpec("U8", (*tiles, groups, 256)) if fmt == "q4" else TensorSpec("I8", (*tiles, groups, 512))
        return {f"{self.name}.{fmt}.codes": codes, f"{self.name}.{fmt}.scales": TensorSpec("F16", (*tiles, groups, TILE))}


def matrices(config: ModelConfig) -> tuple[Matrix, ...]:
    """Every weight matrix of the model, in the order of the file."""
    hidden, layers = config.hidden_size, config.num_hidden_layers
    attention = config.num_attention_heads * config.padded_head_dim
    qkv_rows = attention + 2 * config.num_key_value_heads * config.padded_head_dim
    found = [Matrix("embed", config.vocab_size, hidden)]
    if not config.tie_word_embeddings:
        found.append(Matrix("lm_head", config.vocab_size, hidden))
    found += [Matrix("qkv", qkv_rows, hidden, (layers,)), Matrix("o", hidden, attention, (layers,))]
    if config.dense_layers:
        width = round_up(config.intermediate_size, TILE)
        stack = (len(config.dense_layers),)
        found += [Matrix("gate_up", 2 * width, hidden, stack), Matrix("down", hidden, width, stack)]
    if config.moe is not None:
        width = round_up(config.moe.moe_intermediate_size, TILE)
        experts = (len(config.moe_layers), config.moe.num_experts)
        found += [Matrix("expert_gate_up", 2 * width, hidden, experts), Matrix("expert_down", hidden, width, experts)]
    return tuple(found)


def plain_tensors(config: ModelConfig) -> dict[str, TensorSpec]:
    """The float32 tensors that are never quantised: norms and the router."""
    layers, hidden = config.num_hidden_layers, config.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"input_norm": (layers, hidden), "post_norm": (layers, hidden)}
    if config.qk_norm:
        shapes |= {"q_norm": (layers, config.head_dim), "k_norm": (layers, config.head_dim)}
    shapes["final_norm"] = (hidden,)
    if config.moe is not None:
        shapes["router"] = (len(config.moe_layers), config.moe.num_experts, hidden)
    return {name: TensorSpec("F32", shape) for name, shape in shapes.items()}


def packed_tensors(config: ModelConfig, wmode: str) -> dict[str, TensorSpec]:
    """Every tensor of a packed file of this model (the tokenizer aside), in file order: the formats one after the other."""
    tensors = plain_tensors(config)
    for fmt in FORMATS[wmode]:
        for matrix in matrices(config):
            tensors |= matrix.tensors(fmt)
    return tensors
