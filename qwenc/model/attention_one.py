"""Attention in decode: one token's query heads over the whole context, or over the blocks that are chosen for it."""

from __future__ import annotations

import numpy as np

from qwenc.attention.attend import attend_span, stage_of
from qwenc.attention.cache import PAGE, UNIT, slot_of
from qwenc.attention.chosen import attend_chosen, block_masses, estimate_missed
from qwenc.attention.look import new_choice
from qwenc.attention.probe import choose_probed
from qwenc.attention.rows import NO_SCORE, begin
from qwenc.attention.scores import prepare_rows
from qwenc.attention.select import PROBE, choose, is_sparse
from qwenc.attention.store import finish_unit, write_key, write_value
from qwenc.kernels import simd
from qwenc.kernels.jit import by_type, helper
from qwenc.kernels.pointwise import rms_norm, rotate, scale_into
from qwenc.kernels.sync import barrier, claim, lap
from qwenc.model.overloads import is_absent
from qwenc.model.records import ATTN, KV, ROPE, SPANS


def new_choice_for(cache, sparse, shape, keys):
    """Room to choose blocks in, for one thread; None where the cache has no plane to choose by."""
    raise NotImplementedError("runs in compiled code only")


def attend(team, phase, w, shape, cache, sparse, b, rows, choice, layer, position, cos, sin, now):
    """b.attn = attention of the token at `position`, whose q, k and v are in b.qkv; its key and value join the cache. Returns the time."""
    raise NotImplementedError("runs in compiled code only")


@by_type(new_choice_for, allocates=True)
def _new_choice_for(cache, sparse, shape, keys):
    if is_absent(cache[cache.fields.index("plane")]):
        return lambda cache, sparse, shape, keys: None

    def run(cache, sparse, shape, keys):
        return new_choice(shape.heads // shape.kv_heads, shape.head_room, keys, sparse.block)

    return run


@by_type(attend)
def _attend(team, phase, w, shape, cache, sparse, b, rows, choice, layer, position, cos, sin, now):
    if is_absent(choice):

        def run_all(team, phase, w, shape, cache, sparse, b, rows, choice, layer, position, cos, sin, now):
            return attend_all(team, phase, w, shape, cache, b, rows, layer, position, cos, sin, now)

        return run_all

    def run(team, phase, w, shape, cache, sparse, b, rows, choice, layer, position, cos, sin, now):
        if is_sparse(sparse, position + 1):
            return attend_some(team, phase, w, shape, cache, sparse, b, rows, choice, layer, position, cos, sin, now)
        return attend_all(team, phase, w, shape, cache, b, rows, layer, position, cos, sin, now)

    return run


# ---- the chosen blocks ------------------------------------------------------------------------------------------------------
@helper
def attend_some(team, phase, w, shape, cache, sparse, b, rows, choice, layer, position, cos, sin, now):
    """Attention over chosen blocks. One piece of work: a kv head."""
    group = shape.heads // shape.kv_heads
    head = claim(team, phase)
    while head < shape.kv_heads:
        store_token(w, shape, cache, b, rows, layer, head, position, cos, sin)
        now = lap(team, KV, now)
        if sparse.score == PROBE:
            for i in range(group):
                load_queries(w, shape, b, rows, layer, head, i, 1, cos, sin)
                attend_blocks(shape, cache, sparse, b, rows, choice, layer, head, i, 1, position)
        else:
            load_queries(w, shape, b, rows, layer, head, 0, group, cos, sin)
            attend_blocks(shape, cache, sparse, b, rows, choice, layer, head, 0, group, position)
        now = lap(team, ATTN, now)
        head = claim(team, phase)
    barrier(team)
    return lap(team, ATTN, now)


@helper
def attend_blocks(shape, cache, sparse, b, rows, choice, layer, head, first, count, position):
    """Choose blocks for `count` query heads of a kv head and attend to them."""
    layers, kv_heads = shape.layers, shape.kv_heads
    keys, own = position + 1, position // UNIT * UNIT
    stage, stage_slot = stage_of(cache.k), (layer * kv_heads + head) * UNIT
    prepare_rows(cache.k, rows, count)
    if sparse.score == PROBE:
        choose_probed(cache, sparse, choice, rows, layers, kv_heads, 0, layer, head, own, keys)
    else:
        choose(cache, stage, stage_slot, sparse, choice, rows, count, count, layers, kv_heads, 0, layer, head, own, keys)
    begin(rows, count)
    for i in range(count):
        rows.limit[i] = keys
    attend_chosen(cache, stage, stage_slot, choice, sparse.block, rows, count, layers, kv_heads, 0, layer, head, own, keys)
    store_rows(shape, b, rows, head * (shape.heads // kv_heads) + first, count)
    if sparse.score != PROBE:
        estimate_missed(choice, sparse, rows, count, own, (keys + sparse.block - 1) // sparse.block)
        b.missed[layer * kv_heads + head] = choice.missed[0]
        if b.mass.shape[1] > 0:
            block_masses(choice, sparse.block, rows, count, keys, b.mass, layer * kv_heads + head)
    if b.kept.shape[1] > 0:
        for i in range((keys + sparse.block - 1) // sparse.block):
            b.kept[layer * kv_heads + head, i] = choice.kept[i]


@helper
def store_rows(shape, b, rows, first_head, count):
    """What the rows have seen, divided by their weights, into b.attn."""
    for i in range(count):
        scale = np.float32(1.0) / rows.total[i]
        scale_into(rows.o, i * rows.o.shape[1], scale, b.attn, (first_head + i) * shape.head_room, shape.head_room)


# ---- the whole context ------------------------------------------------------------------------------------------------------
@helper
def attend_all(team, phase, w, shape, cache, b, rows, layer, position, cos, sin, now):
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
            load_queries(w, shape, b, rows, layer, head, 0, group, cos, sin)
            prepare_rows(cache.k, rows, group)
            now = lap(team, ROPE, now)
            loaded = head
        if part == spans - 1:
            store_token(w, shape, cache, b, rows, layer, head, position, cos, sin)
            now = lap(team, KV, now)
        begin(rows, group)
        for i in range(group):
            rows.limit[i] = keys
        stage, stage_slot = stage_of(cache.k), (layer * shape.kv_heads + head) * UNIT
        first, own, end = part * span * PAGE, position // UNIT * UNIT, min(keys, (part + 1) * span * PAGE)
        attend_span(cache, stage, stage_slot, rows, group, shape.layers, shape.kv_heads, 0, layer, head, first, own, end)
        if spans == 1:
            store_rows(shape, b, rows, head * group, group)
        else:
            for i in range(group):
                o_at = i * rows.o.shape[1]
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
def load_queries(w, shape, b, rows, layer, kv_head, first, count, cos, sin):
    """The q rows of `count` heads of a group: q-norm, rotary embedding, 1/√head_dim."""
    group = shape.heads // shape.kv_heads
    room = shape.head_room
    for i in range(count):
        at = i * room
        source = (kv_head * group + first + i) * room
        if shape.qk_norm:
            rms_norm(b.qkv, source, w.q_norm, layer * room, shape.head_dim, shape.eps, rows.q, at)
        else:
            scale_into(b.qkv, source, np.float32(1.0), rows.q, at, room)
        rotate(rows.q, at, cos, sin, 0, shape.head_dim // 2)
        scale_into(rows.q, at, shape.q_scale, rows.q, at, room)


@helper
def store_token(w, shape, cache, b, rows, layer, kv_head, position, cos, sin):
    """k-norm and rotary embedding in place, then key and value into the cache."""
    k_at = (shape.heads + kv_head) * shape.head_room
    v_at = (shape.heads + shape.kv_heads + kv_head) * shape.head_room
    if shape.qk_norm:
        rms_norm(b.qkv, k_at, w.k_norm, layer * shape.head_room, shape.head_dim, shape.eps, b.qkv, k_at)
    rotate(b.qkv, k_at, cos, sin, 0, shape.head_dim // 2)
    slot = slot_of(shape.layers, shape.kv_heads, 0, layer, kv_head, position)
    stage, own = stage_of(cache.k), (layer * shape.kv_heads + kv_head) * UNIT
    write_key(cache.k, slot, stage, own + position % UNIT, b.qkv, k_at, shape.head_room)
    write_value(cache.v, slot, b.qkv, v_at, shape.head_room, rows)
    if position % UNIT == UNIT - 1:
        finish_unit(cache.k, cache.plane, slot - (UNIT - 1), stage, own, shape.head_room, rows)


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
