"""A mini-batch of tokens through the model: the sibling of decode.py, with weights read once for all of them.

Norms, activations and attention are split by tokens, matrices by rows.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from qwenc.attention.cache import PAGE, write_kv
from qwenc.attention.exact import attend_page, begin, new_rows, prepare_rows
from qwenc.kernels.jit import helper, jit
from qwenc.kernels.linear import linear_many, prepare, read_row, row_tiles
from qwenc.kernels.pointwise import add_into, all_finite, copy_into, rms_norm, rotate, scale_into, silu_mul
from qwenc.kernels.records import TILE, new_acts
from qwenc.kernels.sync import agree_to_leave, barrier, chunk_of, claim, lap, leaving, now_ns
from qwenc.model.matrices import matrix_rows, matrix_tokens, prepare_normed, prepare_tokens
from qwenc.model.moe import experts_many
from qwenc.model.overloads import is_absent, is_quantised
from qwenc.model.records import ATTN, DOWN, GATE_UP, LM_HEAD, NORM, OTHER_LOOP, OUT, QKV, ROPE

QUERY_ROWS = 32  # rows (tokens × heads of a group) that one piece of attention work holds
PHASES_PER_LAYER = 13


@jit
def prefill_step(team, w, shape, cache, b, ids, position, cos, sin, all_logits):
    """Put the tokens `ids` (int64 [tokens]) at positions from `position` on. Leaves the logits of the last one in b.logits[0], or, with
    all_logits, of each one in b.logits. cos, sin float32 [tokens, head_dim/2]. Work claims must be zero.
    """
    tokens = ids.size
    now = now_ns()
    t = claim(team, 0)
    while t < tokens:
        read_row(w.embed, ids[t], b.x, t * shape.hidden_room)
        t = claim(team, 0)
    rows = new_rows(max(QUERY_ROWS, shape.heads // shape.kv_heads), shape.head_room)
    barrier(team)
    now = lap(team, OTHER_LOOP, now)
    phase = 1
    for layer in range(shape.layers):
        prepare_normed(team, phase, w.qkv, w.input_norm, layer, shape, tokens, b)
        now = lap(team, NORM, now)
        matrix_tokens(team, phase + 1, w.qkv, layer, tokens, b.acts, b.qkv, copy_into)
        now = lap(team, QKV, now)

        store_tokens(team, phase + 2, w, shape, cache, b, layer, tokens, position, cos, sin)
        now = lap(team, ROPE, now)
        attend_tokens(team, phase + 3, shape, cache, b, rows, layer, tokens, position)
        now = lap(team, ATTN, now)

        prepare_tokens(team, phase + 4, w.o, tokens, b.attn, b.attn.shape[1], b)
        now = lap(team, NORM, now)
        agree_to_leave(team)
        matrix_tokens(team, phase + 5, w.o, layer, tokens, b.acts, b.x, add_into)
        now = lap(team, OUT, now)
        if leaving(team):
            break

        dense = w.mlp[layer]
        if dense >= 0:
            now = mlp_many(team, phase + 6, w, w.gate_up, w.down, shape, layer, dense, tokens, b, now)
        else:
            router, gate_up, down = w.router, w.expert_gate_up, w.expert_down
            now = experts_many(team, phase + 6, w, router, gate_up, down, shape, layer, -1 - dense, tokens, b.acts, b, now)
        phase += PHASES_PER_LAYER
        if team.rank == 0 and team.health[0] < 0 and not all_finite(b.x, 0, tokens * shape.hidden_room):
            team.health[0] = layer
    if all_logits:
        prepare_normed(team, phase, w.lm_head, w.final_norm, 0, shape, tokens, b)
        now = lap(team, NORM, now)
        matrix_tokens(team, phase + 1, w.lm_head, 0, tokens, b.acts, b.logits, copy_into)
    else:
        last_logits(team, phase, w, shape, tokens, b)
    lap(team, LM_HEAD, now)


def prefill_phases(layers):
    """Work counters that a step needs."""
    return PHASES_PER_LAYER * layers + 3


# ---- MLP and logits -------------------------------------------------------------------------------------------------------------
def mlp_many(team, phase, w, gate_up, down, shape, layer, stack, tokens, b, now):
    """x += down(silu(gate(x)) · up(x)) of a dense layer. Returns the time."""
    raise NotImplementedError("runs in compiled code only")


@overload(mlp_many)
def _mlp_many(team, phase, w, gate_up, down, shape, layer, stack, tokens, b, now):
    if is_absent(gate_up):  # every layer has experts
        return lambda team, phase, w, gate_up, down, shape, layer, stack, tokens, b, now: now

    def run(team, phase, w, gate_up, down, shape, layer, stack, tokens, b, now):
        prepare_normed(team, phase, gate_up, w.post_norm, layer, shape, tokens, b)
        now = lap(team, NORM, now)
        pairs = row_tiles(gate_up) // 2
        width = (16 * pairs + 31) // 32 * 32
        sums = np.empty(2 * TILE * 16, np.float32)
        chunk = chunk_of(pairs)
        first = claim(team, phase + 1) * chunk
        while first < pairs:
            for pair in range(first, min(pairs, first + chunk)):
                for t in range(0, tokens, TILE):
                    linear_many(gate_up, stack, 2 * pair, b.acts, t // TILE, sums, 0)
                    linear_many(gate_up, stack, 2 * pair + 1, b.acts, t // TILE, sums, TILE * 16)
                    for i in range(min(TILE, tokens - t)):
                        silu_mul(sums, 16 * i, (TILE + i) * 16, b.ffn, (t + i) * width + 16 * pair)
            first = claim(team, phase + 1) * chunk
        barrier(team)
        now = lap(team, GATE_UP, now)
        prepare_tokens(team, phase + 2, down, tokens, b.ffn, width, b)
        now = lap(team, NORM, now)
        matrix_tokens(team, phase + 3, down, stack, tokens, b.acts, b.x, add_into)
        return lap(team, DOWN, now)

    return run


@helper
def last_logits(team, phase, w, shape, tokens, b):
    """b.logits[0] = logits after the last token."""
    normed = np.zeros(shape.hidden_room, np.float32)
    acts = new_acts(is_quantised(w.lm_head), shape.hidden_room, 1)
    rms_norm(b.x, (tokens - 1) * shape.hidden_room, w.final_norm, 0, shape.hidden, shape.eps, normed, 0)
    prepare(w.lm_head, normed, 0, acts, 1, 0)
    matrix_rows(team, phase, w.lm_head, 0, acts, b.logits, copy_into)


# ---- attention ------------------------------------------------------------------------------------------------------------------
@helper
def store_tokens(team, phase, w, shape, cache, b, layer, tokens, position, cos, sin):
    """q- and k-norm and rotary embedding in place; keys and values into the cache."""
    first = claim(team, phase) * 16  # neighbouring tokens share cache lines of the KV tiles: keep them on one thread
    while first < tokens:
        for t in range(first, min(tokens, first + 16)):
            store_one_token(w, shape, cache, b, layer, t, position, cos, sin)
        first = claim(team, phase) * 16
    barrier(team)


@helper
def store_one_token(w, shape, cache, b, layer, t, position, cos, sin):
    half = shape.head_dim // 2
    row = t * b.qkv.shape[1]
    for head in range(shape.heads + shape.kv_heads):
        at = row + head * shape.head_room
        if shape.qk_norm:
            norm = w.q_norm if head < shape.heads else w.k_norm
            rms_norm(b.qkv, at, norm, layer * shape.head_room, shape.head_dim, shape.eps, b.qkv, at)
        rotate(b.qkv, at, cos, sin, t * half, half)
    for head in range(shape.kv_heads):
        k_at = row + (shape.heads + head) * shape.head_room
        v_at = row + (shape.heads + shape.kv_heads + head) * shape.head_room
        write_kv(cache, layer, head, position + t, b.qkv, k_at, b.qkv, v_at, shape.head_room)


@helper
def attend_tokens(team, phase, shape, cache, b, rows, layer, tokens, position):
    """b.attn = causal attention of every token over the whole context. One piece of work: one kv head, a few tokens."""
    group = shape.heads // shape.kv_heads
    block = max(1, QUERY_ROWS // group)
    blocks = (tokens + block - 1) // block
    width = b.attn.shape[1]
    item = claim(team, phase)
    while item < blocks * shape.kv_heads:
        first = (blocks - 1 - item // shape.kv_heads) * block  # the longest first, so that threads end together
        head = item % shape.kv_heads
        count = min(block, tokens - first)
        for t in range(count):
            for i in range(group):
                row = t * group + i
                source = (first + t) * b.qkv.shape[1] + (head * group + i) * shape.head_room
                scale_into(b.qkv, source, shape.q_scale, rows.q, row * shape.head_room, shape.head_room)
                rows.limit[row] = position + first + t + 1
        used = count * group
        prepare_rows(cache, rows, used)
        begin(rows, used)
        keys = position + first + count
        for page in range((keys + PAGE - 1) // PAGE):
            attend_page(cache, page, layer, head, rows, used, min(PAGE, keys - page * PAGE))
        for row in range(used):
            scale = np.float32(1.0) / rows.total[row]
            out = (first + row // group) * width + (head * group + row % group) * shape.head_room
            scale_into(rows.o, row * shape.head_room, scale, b.attn, out, shape.head_room)
        item = claim(team, phase)
    barrier(team)
