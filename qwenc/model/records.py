"""The three records of a forward pass: shape, weights, run state."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qwenc.attention.cache import UNIT, Int8K
from qwenc.config.model_config import round_up
from qwenc.kernels.records import TILE, Acts, acts_of
from qwenc.model.overloads import is_quantised


class Shape(NamedTuple):
    """Numbers of a model. hidden and head_dim are true sizes; head_room is head_dim rounded up to 16, hidden_room is hidden rounded
    up to 32: the sizes of rows in memory."""

    layers: int
    hidden: int
    hidden_room: int
    heads: int
    kv_heads: int
    head_dim: int
    head_room: int
    eps: np.float32
    qk_norm: bool
    q_scale: np.float32  # 1/√head_dim
    experts_per_token: int
    norm_topk: bool


class Weights(NamedTuple):
    """Every tensor of a model in one weight format. Matrices are Q4, Q8 or F32 stacks (kernels/records.py), None where the model has none.

    input_norm, post_norm float32 [layers, hidden_room]; q_norm, k_norm [layers, head_room] (empty without q/k norm); final_norm
    [hidden_room]; router float32 [moe layers, experts, hidden_room]; mlp int64 [layers]: index into the dense stack, or −1 − index into
    the expert stack.
    """

    embed: Any
    lm_head: Any
    qkv: Any
    o: Any
    gate_up: Any
    down: Any
    expert_gate_up: Any
    expert_down: Any
    router: np.ndarray
    input_norm: np.ndarray
    post_norm: np.ndarray
    q_norm: np.ndarray
    k_norm: np.ndarray
    final_norm: np.ndarray
    mlp: np.ndarray


class Team(NamedTuple):
    """One thread's place among those that run a step. claims int64: work counters, zeroed before the step; timer int64 [12]:
    nanoseconds by phase, kept by rank 0; health int64 [1]: first layer whose output was not finite, or −1."""

    rank: int
    threads: int
    sync: np.ndarray
    claims: np.ndarray
    timer: np.ndarray
    health: np.ndarray


# slots of Team.timer, in the order of timing.DECODE_FIELDS
QKV, ATTN, OUT, GATE_UP, DOWN, LM_HEAD, NORM, ROPE, KV, SILU, OTHER_LOOP = range(11)
TIMER_SLOTS = 12


class Buffers(NamedTuple):
    """Run state of a mini-batch of `tokens` tokens (1 in decode), float32, shared by the team.

    x [tokens, hidden_room] residual stream (in decode every thread has its own); qkv [tokens, qkv rows]; attn [tokens, heads·head_room];
    ffn [tokens, ffn width]; expert_ffn [places, expert width]; logits [tokens, vocabulary rows] or [1, …]; acts: activations as matrices
    read them. part_o [kv_heads·SPANS, group, head_room], part_m, part_l [kv_heads·SPANS, group]: attention of parts of a long context.
    gate float32 [tokens, experts]; choice int64, choice_weight float32 [tokens, experts_per_token]; place int64 [tokens,
    experts_per_token]: row of an assignment in the order by expert; expert_tile int64 [experts + 1]: first token tile of an expert;
    y [places, hidden_room]: what experts give; in decode [1, …] where there are none: what the residual stream gets. stage: keys of the
    mini-batch, by kv head and unit of 32 tokens, that have no codes of 5 bits yet (codes int8 [kv_heads, units, 32·head_room], scale
    float32 [kv_heads, units, 32]; empty unless a cache needs it). missed float32 [layers·kv_heads]: the share of attention that the last
    choice of blocks left out, estimated; kept uint8 [layers·kv_heads, blocks]: that choice, and mass float32 of the same shape: the share
    of attention that each block holds, if anybody wants to know.
    """

    x: np.ndarray
    qkv: np.ndarray
    attn: np.ndarray
    ffn: np.ndarray
    expert_ffn: np.ndarray
    logits: np.ndarray
    acts: Acts
    part_o: np.ndarray
    part_m: np.ndarray
    part_l: np.ndarray
    gate: np.ndarray
    choice: np.ndarray
    choice_weight: np.ndarray
    place: np.ndarray
    expert_tile: np.ndarray
    y: np.ndarray
    stage: Int8K
    missed: np.ndarray
    kept: np.ndarray
    mass: np.ndarray


SPANS = 16  # most parts that a context is cut into in decode


def new_buffers(
    shape: Shape, weights: Weights, tokens: int, *, all_logits: bool = False, staged: bool = False, kept_blocks: int = 0
) -> Buffers:
    """Buffers for mini-batches of up to `tokens` tokens, or for decode when tokens is 1; with all_logits, logits of every
    token instead of the last; staged: for a cache with keys of 5 bits; kept_blocks: blocks of
    which `kept` tells."""
    decode = tokens == 1
    chosen = shape.experts_per_token
    experts = weights.router.shape[1] if weights.expert_down is not None else 0
    # in prefill every expert's tokens begin at a token tile of their own
    places = chosen if decode else round_up(tokens * chosen + min(experts, tokens * chosen) * (TILE - 1), TILE)
    if not experts:
        places = 0
    dense_width = padded_inputs(weights.down) if weights.down is not None else 0
    expert_width = padded_inputs(weights.expert_down) if experts else 0
    row = max(shape.hidden_room, padded_inputs(weights.o), dense_width)
    acts = max(row * round_up(tokens, TILE), places * max(shape.hidden_room, expert_width))
    group = shape.heads // shape.kv_heads
    parts = shape.kv_heads * SPANS if decode else 0

    units = tokens // UNIT + 2 if staged and not decode else 0

    def f32(*sizes: int) -> np.ndarray:
        return np.zeros(sizes, np.float32)

    return Buffers(
        x=f32(tokens, shape.hidden_room),
        qkv=f32(tokens, padded_rows(weights.qkv)),
        attn=f32(tokens, padded_inputs(weights.o)),
        ffn=f32(tokens * dense_width),
        expert_ffn=f32(places * expert_width),  # of its own: what pads a row must stay zero
        logits=f32(tokens if all_logits else 1, padded_rows(weights.lm_head)),
        acts=on_lines(acts_of(is_quantised(weights.qkv), 0 if decode else acts, 1)),
        part_o=f32(parts, group, shape.head_room),
        part_m=f32(parts, group),
        part_l=f32(parts, group),
        gate=f32(tokens, experts),
        choice=np.zeros((tokens, chosen), np.int64),
        choice_weight=f32(tokens, chosen),
        place=np.zeros((tokens, chosen), np.int64),
        expert_tile=np.zeros(experts + 1, np.int64),
        y=f32(max(places, 1) if decode else places, shape.hidden_room),
        stage=Int8K(
            np.zeros((shape.kv_heads, units, UNIT * shape.head_room), np.int8), np.zeros((shape.kv_heads, units, UNIT), np.float32)
        ),
        missed=f32(shape.layers * shape.kv_heads),
        kept=np.zeros((shape.layers * shape.kv_heads, kept_blocks), np.uint8),
        mass=f32(shape.layers * shape.kv_heads, kept_blocks),
    )


def on_lines(acts: Acts) -> Acts:
    """The same, each array beginning at a cache line: rows of a line are read twice as fast."""
    aligned = []
    for array in acts:
        room = np.zeros(array.nbytes + 64, np.uint8)
        first = -room.ctypes.data % 64
        aligned.append(room[first : first + array.nbytes].view(array.dtype))
    return Acts(*aligned)


def padded_rows(matrix: Any) -> int:
    """Rows of a matrix in memory (a multiple of 16)."""
    return 16 * (matrix.codes if is_quantised(matrix) else matrix.values).shape[1]


def padded_inputs(matrix: Any) -> int:
    """Inputs of a matrix in memory (a multiple of 32)."""
    return 32 * matrix.codes.shape[2] if is_quantised(matrix) else matrix.values.shape[2]
