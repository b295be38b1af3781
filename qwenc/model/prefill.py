"""A mini-batch of tokens through the model: the sibling of decode.py, with weights read once for all of them.

Norms, activations and attention are split by tokens, matrices by rows.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from qwenc.attention.attend import attend_span, prepare_rows
from qwenc.attention.cache import UNIT, slot_of
from qwenc.attention.rows import begin, new_rows
from qwenc.attention.store import finish_unit, load_stage, save_stage, write_key, write_value
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
    rows = new_rows(max(QUERY_ROWS, shape.heads // shape.kv_heads), shape.head_room, position + tokens)
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
    """q- and k-norm and rotary embedding in place; keys and values into the cache. One piece of work: one kv head, one unit of tokens."""
    first_unit = position // UNIT
    units = (position + tokens - 1) // UNIT - first_unit + 1
    item = claim(team, phase)
    while item < units * shape.kv_heads:
        head, unit = item // units, first_unit + item % units
        stage_slot = stage_slot_of(b, head, unit - first_unit)
        tail_slot = (layer * shape.kv_heads + head) * UNIT
        first, end = max(position, unit * UNIT), min(position + tokens, (unit + 1) * UNIT)
        if first > unit * UNIT:
            load_stage(cache.k, b.stage, stage_slot, tail_slot, shape.head_room)
        slot = slot_of(shape.layers, shape.kv_heads, 0, layer, head, unit * UNIT)
        for t in range(first, end):
            row = (t - position) * b.qkv.shape[1]
            turn_heads(w, shape, b, layer, t - position, head, cos, sin)
            k_at = row + (shape.heads + head) * shape.head_room
            v_at = row + (shape.heads + shape.kv_heads + head) * shape.head_room
            write_key(cache.k, slot + t % UNIT, b.stage, stage_slot + t % UNIT, b.qkv, k_at, shape.head_room)
            write_value(cache.v, slot + t % UNIT, b.qkv, v_at, shape.head_room)
        if end == (unit + 1) * UNIT:
            finish_unit(cache.k, cache.plane, slot, b.stage, stage_slot, shape.head_room)
        else:
            save_stage(cache.k, b.stage, stage_slot, tail_slot, shape.head_room)
        item = claim(team, phase)
    barrier(team)


@helper
def stage_slot_of(b, head, unit):
    """Where the stage keeps the keys of a unit of this mini-batch."""
    return (head * b.stage.scale.shape[1] + unit) * UNIT


@helper
def turn_heads(w, shape, b, layer, t, kv_head, cos, sin):
    """q- and k-norm and rotary embedding of the heads that belong to a kv head."""
    half = shape.head_dim // 2
    group = shape.heads // shape.kv_heads
    for i in range(group + 1):
        head = kv_head * group + i if i < group else shape.heads + kv_head
        at = t * b.qkv.shape[1] + head * shape.head_room
        if shape.qk_norm:
            norm = w.q_norm if i < group else w.k_norm
            rms_norm(b.qkv, at, norm, layer * shape.head_room, shape.head_dim, shape.eps, b.qkv, at)
        rotate(b.qkv, at, cos, sin, t * half, half)


@helper
def attend_tokens(team, phase, shape, cache, b, rows, layer, tokens, position):
    """b.attn = causal attention of every token over the whole context. One piece of work: one kv head, a few tokens of one unit."""
    group = shape.heads // shape.kv_heads
    most = max(1, QUERY_ROWS // group)
    pieces = (UNIT + most - 1) // most  # of a unit
    count = (UNIT + pieces - 1) // pieces  # tokens of a piece
    first_unit = position // UNIT
    units = (position + tokens - 1) // UNIT - first_unit + 1
    item = claim(team, phase)
    while item < units * pieces * shape.kv_heads:
        head, piece = item % shape.kv_heads, units * pieces - 1 - item // shape.kv_heads  # the longest first: threads end together
        unit = first_unit + piece // pieces
        first = max(position, unit * UNIT + piece % pieces * count)
        end = min(min(position + tokens, (unit + 1) * UNIT), unit * UNIT + (piece % pieces + 1) * count)
        if first < end:
            used = load_rows(shape, b, rows, head, first - position, end - position, position)
            prepare_rows(cache.k, rows, used)
            begin(rows, used)
            stage_slot = stage_slot_of(b, head, unit - first_unit)
            own = unit * UNIT
            attend_span(cache, b.stage, stage_slot, rows, used, shape.layers, shape.kv_heads, 0, layer, head, 0, own, end)
            store_rows(shape, b, rows, head, first - position, used)
        item = claim(team, phase)
    barrier(team)


@helper
def load_rows(shape, b, rows, head, first, end, position):
    """Query rows of the tokens first … end of the mini-batch, all heads of a group. Returns their number."""
    group = shape.heads // shape.kv_heads
    row = 0
    for t in range(first, end):
        for i in range(group):
            source = t * b.qkv.shape[1] + (head * group + i) * shape.head_room
            scale_into(b.qkv, source, shape.q_scale, rows.q, row * shape.head_room, shape.head_room)
            rows.limit[row] = position + t + 1
            row += 1
    return row


@helper
def store_rows(shape, b, rows, head, first, used):
    """What the rows have seen, divided by their weights, into b.attn."""
    group = shape.heads // shape.kv_heads
    for row in range(used):
        scale = np.float32(1.0) / rows.total[row]
        out = (first + row // group) * b.attn.shape[1] + (head * group + row % group) * shape.head_room
        scale_into(rows.o, row * rows.o.shape[1], scale, b.attn, out, shape.head_room)
