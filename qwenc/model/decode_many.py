"""One token each of several contexts through the model: the sibling of decode.py, with weights read once for all of them.

Norms and activations are split by contexts, matrices by rows; attention is decode's own, one context after the other. A token's sums are
made in the same order as alone, so its bits do not depend on who runs beside it. (Not so for float32 weights, whose sums for one token
are made otherwise than for many: those run one after the other, see model/together.py.)
"""

from __future__ import annotations

import numpy as np
from numba.extending import register_jitable

from qwenc.attention.rows import new_rows
from qwenc.kernels.jit import allocating, by_type, helper, jit
from qwenc.kernels.linear import prepare, read_row, row_tiles
from qwenc.kernels.linear_lanes import linear_lanes
from qwenc.kernels.pointwise import add_into, all_finite, copy_into, rms_norm, silu_mul
from qwenc.kernels.sync import agree_to_leave, barrier, chunk_of, claim, lap, leaving, now_ns
from qwenc.model.attention_one import attend, new_choice_for
from qwenc.model.contexts import cache_at, row_of
from qwenc.model.moe import experts_many
from qwenc.model.overloads import is_absent
from qwenc.model.records import DOWN, GATE_UP, LM_HEAD, NORM, OTHER_LOOP, OUT, QKV


@jit
def decode_many_step(team, w, shape, like, arrays, sparse, b, width, tokens, positions, cos, sin):
    """Put tokens[i] at positions[i] of context i (int64 [contexts]) and leave the logits of the next ones in b.logits.

    like: the cache of one of the contexts; arrays int64 [contexts, arrays of a cache, 2]: where each array of a context's cache lies and
    how long its first axis is. sparse: as in decode_step. width: lane_width of the contexts. cos, sin float32 [contexts, head_dim/2]. Work
    claims must be zero.
    """
    count = tokens.size
    now = now_ns()
    i = claim(team, 0)
    while i < count:
        read_row(w.embed, tokens[i], b.x, i * shape.hidden_room)
        i = claim(team, 0)
    most = positions.max() + 1
    rows = new_rows(shape.heads // shape.kv_heads, shape.head_room, most)
    choice = new_choice_for(like, sparse, shape, most)
    normed = np.zeros(shape.hidden_room, np.float32)
    barrier(team)
    now = lap(team, OTHER_LOOP, now)
    phase = 1
    for layer in range(shape.layers):
        prepare_normed_lanes(team, phase, w.qkv, w.input_norm, layer, shape, count, width, normed, b)
        now = lap(team, NORM, now)
        matrix_lanes(team, phase + 1, w.qkv, layer, count, width, b.acts, b.qkv, False)
        now = lap(team, QKV, now)

        for i in range(count):
            cache, own, own_cos, own_sin = cache_at(like, arrays[i]), row_of(b, i), cos[i : i + 1], sin[i : i + 1]
            counters = phase + 10 + 2 * i
            now = attend(team, counters, w, shape, cache, sparse, own, rows, choice, layer, positions[i], own_cos, own_sin, now)

        prepare_lanes(team, phase + 2, w.o, count, width, b.attn, b.attn.shape[1], b)
        now = lap(team, NORM, now)
        agree_to_leave(team)
        matrix_lanes(team, phase + 3, w.o, layer, count, width, b.acts, b.x, True)
        now = lap(team, OUT, now)
        if leaving(team):
            break

        dense = w.mlp[layer]
        if dense >= 0:
            now = mlp_lanes(team, phase + 4, w, w.gate_up, w.down, shape, layer, dense, count, width, normed, b, now)
        else:
            router, gate_up, down = w.router, w.expert_gate_up, w.expert_down
            now = experts_many(team, phase + 4, w, router, gate_up, down, shape, layer, -1 - dense, count, b.acts, b, now)
        phase += phases_per_layer(count)
        if team.rank == 0 and team.health[0] < 0 and not all_finite(b.x, 0, count * shape.hidden_room):
            team.health[0] = layer
    prepare_normed_lanes(team, phase, w.lm_head, w.final_norm, 0, shape, count, width, normed, b)
    now = lap(team, NORM, now)
    matrix_lanes(team, phase + 1, w.lm_head, 0, count, width, b.acts, b.logits, False)
    lap(team, LM_HEAD, now)


@register_jitable
def phases_per_layer(contexts):
    """Work counters that a layer needs: 4 for its matrices, at most 6 for its MLP, 2 for each context."""
    return 10 + 2 * contexts


def decode_many_phases(layers, contexts):
    """Work counters that a step needs."""
    return 1 + phases_per_layer(contexts) * layers + 2


# ---- the work of one matrix -------------------------------------------------------------------------------------------------
@helper
def prepare_normed_lanes(team, phase, matrix, norm, norm_row, shape, count, width, normed, b):
    """b.acts = RMS norm of the residual stream, as `matrix` reads it."""
    i = claim(team, phase)
    while i < count:
        rms_norm(b.x, i * shape.hidden_room, norm, norm_row * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
        prepare(matrix, normed, 0, b.acts, width, i)
        i = claim(team, phase)
    barrier(team)


@helper
def prepare_lanes(team, phase, matrix, count, width, x, x_width, b):
    """b.acts = the rows of x (`x_width` values apart), as `matrix` reads them."""
    i = claim(team, phase)
    while i < count:
        prepare(matrix, x, i * x_width, b.acts, width, i)
        i = claim(team, phase)
    barrier(team)


@allocating
def matrix_lanes(team, phase, w, stack, count, width, acts, out, add):
    """out [contexts, …] = (or, to `add`, +=) matrix · activations."""
    tiles, out_width = row_tiles(w), out.shape[1]
    chunk = chunk_of(tiles)
    sums = np.empty(8 * 16, np.float32)
    first = claim(team, phase) * chunk
    while first < tiles:
        for tile in range(first, min(tiles, first + chunk)):
            for lane in range(0, count, width):
                linear_lanes(w, width, stack, tile, acts, lane // width, sums, 0)
                for i in range(min(width, count - lane)):
                    if add:
                        add_into(sums, 16 * i, out, (lane + i) * out_width + 16 * tile)
                    else:
                        copy_into(sums, 16 * i, out, (lane + i) * out_width + 16 * tile)
        first = claim(team, phase) * chunk
    barrier(team)


def mlp_lanes(team, phase, w, gate_up, down, shape, layer, stack, count, width, normed, b, now):
    """x += down(silu(gate(x)) · up(x)) of a dense layer. Returns the time."""
    raise NotImplementedError("runs in compiled code only")


@by_type(mlp_lanes, allocates=True)
def _mlp_lanes(team, phase, w, gate_up, down, shape, layer, stack, count, width, normed, b, now):
    if is_absent(gate_up):  # every layer has experts
        return lambda team, phase, w, gate_up, down, shape, layer, stack, count, width, normed, b, now: now

    def run(team, phase, w, gate_up, down, shape, layer, stack, count, width, normed, b, now):
        prepare_normed_lanes(team, phase, gate_up, w.post_norm, layer, shape, count, width, normed, b)
        now = lap(team, NORM, now)
        pairs = row_tiles(gate_up) // 2
        ffn_width = (16 * pairs + 31) // 32 * 32
        sums = np.empty(2 * 8 * 16, np.float32)
        chunk = chunk_of(pairs)
        first = claim(team, phase + 1) * chunk
        while first < pairs:
            for pair in range(first, min(pairs, first + chunk)):
                for lane in range(0, count, width):
                    linear_lanes(gate_up, width, stack, 2 * pair, b.acts, lane // width, sums, 0)
                    linear_lanes(gate_up, width, stack, 2 * pair + 1, b.acts, lane // width, sums, 16 * width)
                    for i in range(min(width, count - lane)):
                        silu_mul(sums, 16 * i, 16 * (width + i), b.ffn, (lane + i) * ffn_width + 16 * pair)
            first = claim(team, phase + 1) * chunk
        barrier(team)
        now = lap(team, GATE_UP, now)
        prepare_lanes(team, phase + 2, down, count, width, b.ffn, ffn_width, b)
        now = lap(team, NORM, now)
        matrix_lanes(team, phase + 3, down, stack, count, width, b.acts, b.x, True)
        return lap(team, DOWN, now)

    return run
