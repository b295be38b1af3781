"""One token through the model, as every thread of the team runs it.

What is cheap (the residual stream, norms, quantising activations) each thread does for itself, which saves a barrier; matrices are split
by rows, attention by kv head and part of the context. So nothing is ever summed in an order that depends on the threads.
"""

from __future__ import annotations

import numpy as np

from qwenc.attention.rows import new_rows
from qwenc.kernels.jit import by_type, helper, jit
from qwenc.kernels.linear import fetch_rows, linear_one, prepare, read_row, row_tiles
from qwenc.kernels.pointwise import add_into, all_finite, rms_norm, silu_mul
from qwenc.kernels.records import new_acts
from qwenc.kernels.sync import agree_to_leave, barrier, lap, leaving, next_piece, now_ns, piece_of
from qwenc.model.attention_one import attend, new_choice_for
from qwenc.model.matrices import fetch_first, matrix_rows
from qwenc.model.moe import experts_one
from qwenc.model.overloads import is_absent, is_quantised
from qwenc.model.records import DOWN, GATE_UP, LM_HEAD, NORM, OTHER_LOOP, OUT, QKV


@jit
def decode_step(team, w, shape, cache, sparse, b, token, position, cos, sin):
    """Put `token` at `position` and leave the logits of the next one in b.logits[0].

    sparse: how blocks are chosen, where `cache` has a plane for it. cos, sin float32 [1, head_dim/2] of this position. Work claims must be
    zero. Leaves early, in a layer, when the team is stopped.
    """
    now = now_ns()
    x = np.zeros(shape.hidden_room, np.float32)  # the residual stream
    read_row(w.embed, token, x, 0)
    normed = np.zeros(shape.hidden_room, np.float32)
    acts = new_acts(is_quantised(w.qkv), max(max(shape.hidden_room, b.attn.shape[1]), max(b.ffn.size, b.expert_ffn.size)), 1)
    rows = new_rows(shape.heads // shape.kv_heads, shape.head_room, position + 1)
    choice = new_choice_for(cache, sparse, shape, position + 1)
    now = lap(team, OTHER_LOOP, now)
    phase = 0
    for layer in range(shape.layers):
        fetch_first(team, w.qkv, layer)
        rms_norm(x, 0, w.input_norm, layer * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
        prepare(w.qkv, normed, 0, acts, 1, 0)
        now = lap(team, NORM, now)
        matrix_rows(team, phase, w.qkv, layer, acts, b.qkv)
        now = lap(team, QKV, now)

        now = attend(team, phase + 1, w, shape, cache, sparse, b, rows, choice, layer, position, cos, sin, now)

        fetch_first(team, w.o, layer)
        prepare(w.o, b.attn, 0, acts, 1, 0)
        agree_to_leave(team)
        matrix_rows(team, phase + 3, w.o, layer, acts, b.y)
        add_row(b.y, x)
        now = lap(team, OUT, now)
        if leaving(team):
            break

        rms_norm(x, 0, w.post_norm, layer * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
        dense = w.mlp[layer]
        if dense >= 0:
            now = mlp_one(team, phase + 4, w.gate_up, w.down, dense, normed, acts, b, x, now)
        else:
            now = experts_one(team, phase + 4, w.router, w.expert_gate_up, w.expert_down, shape, -1 - dense, normed, acts, b, x, now)
        phase += 7
        if team.rank == 0 and team.health[0] < 0 and not all_finite(x, 0, shape.hidden_room):
            team.health[0] = layer
    fetch_first(team, w.lm_head, 0)
    rms_norm(x, 0, w.final_norm, 0, shape.hidden, shape.eps, normed, 0)
    prepare(w.lm_head, normed, 0, acts, 1, 0)
    now = lap(team, NORM, now)
    matrix_rows(team, phase, w.lm_head, 0, acts, b.logits)
    lap(team, LM_HEAD, now)


def decode_phases(layers):
    """Work counters that a step needs."""
    return 7 * layers + 1


@helper
def add_row(y, x):
    """x += y, which every thread does for its own residual stream."""
    for i in range(0, x.size, 16):
        add_into(y, i, x, i)


# ---- MLP -------------------------------------------------------------------------------------------------------------------
def mlp_one(team, phase, gate_up, down, stack, normed, acts, b, x, now):
    """x += down(silu(gate(x)) · up(x)) of a dense layer. Returns the time."""
    raise NotImplementedError("runs in compiled code only")


@by_type(mlp_one, allocates=True)
def _mlp_one(team, phase, gate_up, down, stack, normed, acts, b, x, now):
    if is_absent(gate_up):  # every layer has experts
        return lambda team, phase, gate_up, down, stack, normed, acts, b, x, now: now

    def run(team, phase, gate_up, down, stack, normed, acts, b, x, now):
        pairs = row_tiles(gate_up) // 2
        fetch_rows(gate_up, stack, 2 * piece_of(team.rank, pairs, team.threads)[0])
        prepare(gate_up, normed, 0, acts, 1, 0)
        now = lap(team, NORM, now)
        sums = np.empty(32, np.float32)
        first, end = piece_of(team.rank, pairs, team.threads)
        while first < end:
            following = first, first
            for pair in range(first, end):
                if pair == end - 1:
                    following = next_piece(team, phase, pairs)
                    fetch_rows(gate_up, stack, 2 * following[0])
                linear_one(gate_up, stack, 2 * pair, acts, 0, sums, 0)
                linear_one(gate_up, stack, 2 * pair + 1, acts, 0, sums, 16)
                silu_mul(sums, 0, 16, b.ffn, 16 * pair)
            first, end = following
        barrier(team)
        fetch_first(team, down, stack)
        now = lap(team, GATE_UP, now)
        prepare(down, b.ffn, 0, acts, 1, 0)
        matrix_rows(team, phase + 1, down, stack, acts, b.y)
        add_row(b.y, x)
        return lap(team, DOWN, now)

    return run
