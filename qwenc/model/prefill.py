"""A mini-batch of tokens through the model: the sibling of decode.py, with weights read once for all of them.

Norms, activations and attention are split by tokens, matrices by rows.
"""

from __future__ import annotations

import numpy as np

from qwenc.attention.rows import new_rows
from qwenc.kernels.jit import allocating, by_type, jit
from qwenc.kernels.linear import linear_many, make_ready, new_room, prepare, read_row, row_tiles
from qwenc.kernels.pointwise import all_finite, rms_norm, silu_mul
from qwenc.kernels.records import TILE, new_acts
from qwenc.kernels.sync import agree_to_leave, barrier, chunk_of, claim, lap, leaving, now_ns
from qwenc.model.attention_many import QUERY_ROWS, attend_tokens, new_search, store_tokens
from qwenc.model.matrices import matrix_rows, matrix_tokens, prepare_normed, prepare_tokens
from qwenc.model.moe import experts_many
from qwenc.model.overloads import is_absent, is_quantised
from qwenc.model.records import ATTN, DOWN, GATE_UP, LM_HEAD, NORM, OTHER_LOOP, OUT, QKV, ROPE

PHASES_PER_LAYER = 13


@jit
def prefill_step(team, w, shape, cache, sparse, b, ids, position, cos, sin, all_logits):
    """Put the tokens `ids` (int64 [tokens]) at positions from `position` on. Leaves the logits of the last one in b.logits[0], or, with
    all_logits, of each one in b.logits. sparse: how blocks are chosen, where `cache` has a plane for it. cos, sin float32 [tokens,
    head_dim/2]. Work claims must be zero.
    """
    tokens = ids.size
    now = now_ns()
    t = claim(team, 0)
    while t < tokens:
        read_row(w.embed, ids[t], b.x, t * shape.hidden_room)
        t = claim(team, 0)
    rows = new_rows(max(QUERY_ROWS, shape.heads // shape.kv_heads), shape.head_room, position + tokens)
    search = new_search(cache, sparse, shape, position + tokens)
    barrier(team)
    now = lap(team, OTHER_LOOP, now)
    phase = 1
    for layer in range(shape.layers):
        prepare_normed(team, phase, w.qkv, w.input_norm, layer, shape, tokens, b)
        now = lap(team, NORM, now)
        matrix_tokens(team, phase + 1, w.qkv, layer, tokens, b.acts, b.qkv, False)
        now = lap(team, QKV, now)

        store_tokens(team, phase + 2, w, shape, cache, b, rows, layer, tokens, position, cos, sin)
        now = lap(team, ROPE, now)
        attend_tokens(team, phase + 3, shape, cache, sparse, b, rows, search, layer, tokens, position)
        now = lap(team, ATTN, now)

        prepare_tokens(team, phase + 4, w.o, tokens, b.attn, b.attn.shape[1], b)
        now = lap(team, NORM, now)
        agree_to_leave(team)
        matrix_tokens(team, phase + 5, w.o, layer, tokens, b.acts, b.x, True)
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
        matrix_tokens(team, phase + 1, w.lm_head, 0, tokens, b.acts, b.logits, False)
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


@by_type(mlp_many, allocates=True)
def _mlp_many(team, phase, w, gate_up, down, shape, layer, stack, tokens, b, now):
    if is_absent(gate_up):  # every layer has experts
        return lambda team, phase, w, gate_up, down, shape, layer, stack, tokens, b, now: now

    def run(team, phase, w, gate_up, down, shape, layer, stack, tokens, b, now):
        prepare_normed(team, phase, gate_up, w.post_norm, layer, shape, tokens, b)
        now = lap(team, NORM, now)
        pairs = row_tiles(gate_up) // 2
        width = (16 * pairs + 31) // 32 * 32
        sums, gate_room, up_room = np.empty(2 * TILE * 16, np.float32), new_room(gate_up), new_room(gate_up)
        chunk = chunk_of(pairs)
        first = claim(team, phase + 1) * chunk
        while first < pairs:
            for pair in range(first, min(pairs, first + chunk)):
                make_ready(gate_up, stack, 2 * pair, gate_room)
                make_ready(gate_up, stack, 2 * pair + 1, up_room)
                for t in range(0, tokens, TILE):
                    linear_many(gate_up, gate_room, stack, 2 * pair, b.acts, t // TILE, sums, 0)
                    linear_many(gate_up, up_room, stack, 2 * pair + 1, b.acts, t // TILE, sums, TILE * 16)
                    for i in range(min(TILE, tokens - t)):
                        silu_mul(sums, 16 * i, (TILE + i) * 16, b.ffn, (t + i) * width + 16 * pair)
            first = claim(team, phase + 1) * chunk
        barrier(team)
        now = lap(team, GATE_UP, now)
        prepare_tokens(team, phase + 2, down, tokens, b.ffn, width, b)
        now = lap(team, NORM, now)
        matrix_tokens(team, phase + 3, down, stack, tokens, b.acts, b.x, True)
        return lap(team, DOWN, now)

    return run


@allocating
def last_logits(team, phase, w, shape, tokens, b):
    """b.logits[0] = logits after the last token."""
    normed = np.zeros(shape.hidden_room, np.float32)
    acts = new_acts(is_quantised(w.lm_head), shape.hidden_room, 1)
    rms_norm(b.x, (tokens - 1) * shape.hidden_room, w.final_norm, 0, shape.hidden, shape.eps, normed, 0)
    prepare(w.lm_head, normed, 0, acts, 1, 0)
    matrix_rows(team, phase, w.lm_head, 0, acts, b.logits)
