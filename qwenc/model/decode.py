"""One token through the model, as every thread of the team runs it.

What is cheap (norms, quantising activations) each thread does for itself, which saves a barrier; matrices are split by rows, attention
by kv head and part of the context. Residual rows belong to the thread that computed them, so nothing is ever summed in an order that
depends on the threads.
"""

from __future__ import annotations

import numpy as np
from numba.extending import overload

from qwenc.attention.attend import attend_span, prepare_rows, stage_of
from qwenc.attention.cache import PAGE, UNIT, slot_of
from qwenc.attention.rows import NO_SCORE, begin, new_rows
from qwenc.attention.store import finish_unit, write_key, write_value
from qwenc.kernels import simd
from qwenc.kernels.jit import helper, jit
from qwenc.kernels.linear import linear_one, prepare, read_row, row_tiles
from qwenc.kernels.pointwise import add_into, all_finite, copy_into, rms_norm, rotate, scale_into, silu_mul
from qwenc.kernels.records import new_acts
from qwenc.kernels.sync import agree_to_leave, barrier, chunk_of, claim, lap, leaving, now_ns
from qwenc.model.matrices import matrix_rows
from qwenc.model.moe import experts_one
from qwenc.model.overloads import is_absent, is_quantised
from qwenc.model.records import ATTN, DOWN, GATE_UP, KV, LM_HEAD, NORM, OTHER_LOOP, OUT, QKV, ROPE, SPANS


@jit
def decode_step(team, w, shape, cache, b, token, position, cos, sin):
    """Put `token` at `position` and leave the logits of the next one in b.logits[0].

    cos, sin float32 [1, head_dim/2] of this position. Work claims must be zero. Leaves early, in a layer, when the team is stopped.
    """
    now = now_ns()
    if team.rank == 0:
        read_row(w.embed, token, b.x, 0)
    normed = np.zeros(shape.hidden_room, np.float32)
    acts = new_acts(is_quantised(w.qkv), max(max(shape.hidden_room, b.attn.shape[1]), max(b.ffn.size, b.expert_ffn.size)), 1)
    rows = new_rows(shape.heads // shape.kv_heads, shape.head_room, position + 1)
    barrier(team)
    now = lap(team, OTHER_LOOP, now)
    phase = 0
    for layer in range(shape.layers):
        rms_norm(b.x, 0, w.input_norm, layer * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
        prepare(w.qkv, normed, 0, acts, 1, 0)
        now = lap(team, NORM, now)
        matrix_rows(team, phase, w.qkv, layer, acts, b.qkv, copy_into)
        now = lap(team, QKV, now)

        now = attend(team, phase + 1, w, shape, cache, b, rows, layer, position, cos, sin, now)

        prepare(w.o, b.attn, 0, acts, 1, 0)
        agree_to_leave(team)
        matrix_rows(team, phase + 3, w.o, layer, acts, b.x, add_into)
        now = lap(team, OUT, now)
        if leaving(team):
            break

        rms_norm(b.x, 0, w.post_norm, layer * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
        dense = w.mlp[layer]
        if dense >= 0:
            now = mlp_one(team, phase + 4, w.gate_up, w.down, dense, normed, acts, b, now)
        else:
            now = experts_one(team, phase + 4, w.router, w.expert_gate_up, w.expert_down, shape, -1 - dense, normed, acts, b, now)
        phase += 7
        if team.rank == 0 and team.health[0] < 0 and not all_finite(b.x, 0, shape.hidden_room):
            team.health[0] = layer
    rms_norm(b.x, 0, w.final_norm, 0, shape.hidden, shape.eps, normed, 0)
    prepare(w.lm_head, normed, 0, acts, 1, 0)
    now = lap(team, NORM, now)
    matrix_rows(team, phase, w.lm_head, 0, acts, b.logits, copy_into)
    lap(team, LM_HEAD, now)


def decode_phases(layers):
    """Work counters that a step needs."""
    return 7 * layers + 1


# ---- MLP -------------------------------------------------------------------------------------------------------------------
def mlp_one(team, phase, gate_up, down, stack, normed, acts, b, now):
    """x += down(silu(gate(x)) · up(x)) of a dense layer. Returns the time."""
    raise NotImplementedError("runs in compiled code only")


@overload(mlp_one)
def _mlp_one(team, phase, gate_up, down, stack, normed, acts, b, now):
    if is_absent(gate_up):  # every layer has experts
        return lambda team, phase, gate_up, down, stack, normed, acts, b, now: now

    def run(team, phase, gate_up, down, stack, normed, acts, b, now):
        prepare(gate_up, normed, 0, acts, 1, 0)
        now = lap(team, NORM, now)
        pairs = row_tiles(gate_up) // 2
        chunk = chunk_of(pairs)
        sums = np.empty(32, np.float32)
        first = claim(team, phase) * chunk
        while first < pairs:
            for pair in range(first, min(pairs, first + chunk)):
                linear_one(gate_up, stack, 2 * pair, acts, 0, sums, 0)
                linear_one(gate_up, stack, 2 * pair + 1, acts, 0, sums, 16)
                silu_mul(sums, 0, 16, b.ffn, 16 * pair)
            first = claim(team, phase) * chunk
        barrier(team)
        now = lap(team, GATE_UP, now)
        prepare(down, b.ffn, 0, acts, 1, 0)
        matrix_rows(team, phase + 1, down, stack, acts, b.x, add_into)
        return lap(team, DOWN, now)

    return run


# ---- attention --------------------------------------------------------------------------------------------------------------
@helper
def attend(team, phase, w, shape, cache, b, rows, layer, position, cos, sin, now):
    """b.attn = attention of the token at `position`, whose q, k and v are in b.qkv; its key and value join the cache. Returns the time."""
    keys = position + 1
    pages = (keys + PAGE - 1) // PAGE
    span = (pages + SPANS - 1) // SPANS  # pages per part: depends on the context alone, so the sums do too
    spans = (pages + span - 1) // span
    group = shape.heads // shape.kv_heads
    loaded = -1
    item = claim(team, phase)
    while item < shape.kv_heads * spans:
        head, part = item // spans, item % spans
        if head != loaded:
            load_queries(w, shape, b, rows, layer, head, cos, sin)
            prepare_rows(cache.k, rows, group)
            now = lap(team, ROPE, now)
            loaded = head
        if part == spans - 1:
            store_token(w, shape, cache, b, layer, head, position, cos, sin)
            now = lap(team, KV, now)
        begin(rows, group)
        for i in range(group):
            rows.limit[i] = keys
        stage, stage_slot = stage_of(cache.k), (layer * shape.kv_heads + head) * UNIT
        first, own, end = part * span * PAGE, position // UNIT * UNIT, min(keys, (part + 1) * span * PAGE)
        attend_span(cache, stage, stage_slot, rows, group, shape.layers, shape.kv_heads, 0, layer, head, first, own, end)
        for i in range(group):
            o_at = i * rows.o.shape[1]
            if spans == 1:
                scale = np.float32(1.0) / rows.total[i]
                scale_into(rows.o, o_at, scale, b.attn, (head * group + i) * shape.head_room, shape.head_room)
            else:
                b.part_m[item, i] = rows.m[i]
                b.part_l[item, i] = rows.total[i]
                scale_into(rows.o, o_at, np.float32(1.0), b.part_o, (item * group + i) * shape.head_room, shape.head_room)
        now = lap(team, ATTN, now)
        item = claim(team, phase)
    barrier(team)
    if spans > 1:
        head = claim(team, phase + 1)
        while head < shape.heads:
            merge_parts(b, head // group, head % group, spans, group, shape.head_room)
            head = claim(team, phase + 1)
        barrier(team)
    return lap(team, ATTN, now)


@helper
def load_queries(w, shape, b, rows, layer, kv_head, cos, sin):
    """The q rows of a group: q-norm, rotary embedding, 1/√head_dim."""
    group = shape.heads // shape.kv_heads
    room = shape.head_room
    for i in range(group):
        at = i * room
        source = (kv_head * group + i) * room
        if shape.qk_norm:
            rms_norm(b.qkv, source, w.q_norm, layer * room, shape.head_dim, shape.eps, rows.q, at)
        else:
            scale_into(b.qkv, source, np.float32(1.0), rows.q, at, room)
        rotate(rows.q, at, cos, sin, 0, shape.head_dim // 2)
        scale_into(rows.q, at, shape.q_scale, rows.q, at, room)


@helper
def store_token(w, shape, cache, b, layer, kv_head, position, cos, sin):
    """k-norm and rotary embedding in place, then key and value into the cache."""
    k_at = (shape.heads + kv_head) * shape.head_room
    v_at = (shape.heads + shape.kv_heads + kv_head) * shape.head_room
    if shape.qk_norm:
        rms_norm(b.qkv, k_at, w.k_norm, layer * shape.head_room, shape.head_dim, shape.eps, b.qkv, k_at)
    rotate(b.qkv, k_at, cos, sin, 0, shape.head_dim // 2)
    slot = slot_of(shape.layers, shape.kv_heads, 0, layer, kv_head, position)
    stage, own = stage_of(cache.k), (layer * shape.kv_heads + kv_head) * UNIT
    write_key(cache.k, slot, stage, own + position % UNIT, b.qkv, k_at, shape.head_room)
    write_value(cache.v, slot, b.qkv, v_at, shape.head_room)
    if position % UNIT == UNIT - 1:
        finish_unit(cache.k, cache.plane, slot - (UNIT - 1), stage, own, shape.head_room)


@helper
def merge_parts(b, kv_head, i, spans, group, head_room):
    """Attention over the whole context from that over its parts, in their order."""
    first = kv_head * spans
    top = NO_SCORE
    bad = np.float32(0.0)
    for part in range(first, first + spans):
        m = b.part_m[part, i]
        bad += m - m
        top = max(top, m)
    top += bad  # a NaN in any part is a NaN in all
    total = np.float32(0.0)
    out = (kv_head * group + i) * head_room
    for d in range(0, head_room, 16):
        simd.store(b.attn, out + d, simd.splat(np.float32(0.0)))
    for part in range(first, first + spans):
        weight = simd.lane(simd.exp(simd.splat(b.part_m[part, i] - top)), 0)
        total += weight * b.part_l[part, i]
        for d in range(0, head_room, 16):
            o = simd.load(b.part_o, (part * group + i) * head_room + d)
            simd.store(b.attn, out + d, simd.fma(o, simd.splat(weight), simd.load(b.attn, out + d)))
    scale_into(b.attn, out, np.float32(1.0) / total, b.attn, out, head_room)
