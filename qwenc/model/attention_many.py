"""Attention in prefill: the tokens of a mini-batch over the whole context, or, a tile of tokens at a time, over the blocks that are chosen
for the tile."""

from __future__ import annotations

import numpy as np

from qwenc.attention.attend import attend_span
from qwenc.attention.cache import UNIT, slot_of
from qwenc.attention.chosen import attend_chosen
from qwenc.attention.look import new_choice
from qwenc.attention.probe import choose_probed
from qwenc.attention.rows import begin, new_rows
from qwenc.attention.scores import prepare_rows
from qwenc.attention.select import PROBE, choose, is_sparse
from qwenc.attention.store import finish_unit, load_stage, save_stage, write_key, write_value
from qwenc.kernels.jit import by_type, helper
from qwenc.kernels.pointwise import rms_norm, rotate, scale_into
from qwenc.kernels.sync import barrier, claim
from qwenc.model.overloads import is_absent

QUERY_ROWS = 32  # rows (tokens × heads of a group) that one piece of attention work holds
SAMPLES = 16  # tokens of a tile whose queries choose for all of it


def new_search(cache, sparse, shape, keys):
    """Room to choose blocks in, for one thread: query rows and a Choice; None where the cache has no plane to choose by."""
    raise NotImplementedError("runs in compiled code only")


def attend_tokens(team, phase, shape, cache, sparse, b, rows, search, layer, tokens, position):
    """b.attn = causal attention of every token of the mini-batch."""
    raise NotImplementedError("runs in compiled code only")


@by_type(new_search, allocates=True)
def _new_search(cache, sparse, shape, keys):
    if is_absent(cache[cache.fields.index("plane")]):
        return lambda cache, sparse, shape, keys: None

    def run(cache, sparse, shape, keys):
        rows = SAMPLES * (shape.heads // shape.kv_heads)
        return new_rows(rows, shape.head_room, UNIT), new_choice(rows, shape.head_room, keys, sparse.block)

    return run


@by_type(attend_tokens)
def _attend_tokens(team, phase, shape, cache, sparse, b, rows, search, layer, tokens, position):
    if is_absent(search):

        def run_all(team, phase, shape, cache, sparse, b, rows, search, layer, tokens, position):
            attend_all(team, phase, shape, cache, b, rows, layer, tokens, position)

        return run_all

    def run(team, phase, shape, cache, sparse, b, rows, search, layer, tokens, position):
        attend_some(team, phase, shape, cache, sparse, b, rows, search[0], search[1], layer, tokens, position)

    return run


# ---- keys and values --------------------------------------------------------------------------------------------------------
@helper
def store_tokens(team, phase, w, shape, cache, b, rows, layer, tokens, position, cos, sin):
    """q- and k-norm and rotary embedding in place; keys and values into the cache. One piece of work: one kv head, one unit of tokens."""
    first_unit = position // UNIT
    units = (position + tokens - 1) // UNIT - first_unit + 1
    item = claim(team, phase)
    while item < units * shape.kv_heads:
        head, unit = item // units, first_unit + units - 1 - item % units  # in an order that shows what wrongly depends on it
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
            write_value(cache.v, slot + t % UNIT, b.qkv, v_at, shape.head_room, rows)
        if end == (unit + 1) * UNIT:
            finish_unit(cache.k, cache.plane, slot, b.stage, stage_slot, shape.head_room, rows)
        item = claim(team, phase)
    barrier(team)
    # only now has the first unit been fetched from where the last one is kept
    if (position + tokens) % UNIT > 0:
        for head in range(team.rank, shape.kv_heads, team.threads):
            stage_slot = stage_slot_of(b, head, units - 1)
            save_stage(cache.k, b.stage, stage_slot, (layer * shape.kv_heads + head) * UNIT, shape.head_room)


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


# ---- the chosen blocks ------------------------------------------------------------------------------------------------------
@helper
def attend_some(team, phase, shape, cache, sparse, b, rows, sampled, choice, layer, tokens, position):
    """Attention over chosen blocks, or over the whole context where that is short. One piece of work: one kv head, a tile of tokens that
    shares a choice."""
    first_tile = position // sparse.group
    tiles = (position + tokens - 1) // sparse.group - first_tile + 1
    item = claim(team, phase)
    while item < tiles * shape.kv_heads:
        head, tile = item % shape.kv_heads, first_tile + tiles - 1 - item // shape.kv_heads  # the longest first
        first = max(position, tile * sparse.group)
        end = min(position + tokens, (tile + 1) * sparse.group)
        if not is_sparse(sparse, end):
            attend_tile(shape, cache, sparse, b, rows, choice, layer, head, 0, 0, first, end, position)
        elif sparse.score == PROBE:
            own = first // UNIT * UNIT
            for i in range(shape.heads // shape.kv_heads):
                scale_into(b.qkv, query_at(shape, b, end - 1 - position, head, i), shape.q_scale, sampled.q, 0, shape.head_room)
                choose_probed(cache, sparse, choice, sampled, shape.layers, shape.kv_heads, 0, layer, head, own, end)
                attend_tile(shape, cache, sparse, b, rows, choice, layer, head, i, 1, first, end, position)
        else:
            step = (end - first + SAMPLES - 1) // SAMPLES
            used = load_rows(shape, cache, b, sampled, head, 0, 0, first, end, step, position)
            own, group = first // UNIT * UNIT, shape.heads // shape.kv_heads
            slot = stage_slot_of(b, head, own // UNIT - position // UNIT)
            choose(cache, b.stage, slot, sparse, choice, sampled, used, group, shape.layers, shape.kv_heads, 0, layer, head, own, end)
            attend_tile(shape, cache, sparse, b, rows, choice, layer, head, 0, group, first, end, position)
        item = claim(team, phase)
    barrier(team)


@helper
def attend_tile(shape, cache, sparse, b, rows, choice, layer, head, first_head, count, first, end, position):
    """Attention of the tokens at positions first … end, `count` heads of a group from first_head on, over the kept blocks; over the whole
    context, all heads, if count is 0."""
    pieces, size = pieces_of_unit(shape)
    for unit in range(first // UNIT, (end - 1) // UNIT + 1):
        own = unit * UNIT
        stage_slot = stage_slot_of(b, head, unit - position // UNIT)
        for piece in range(pieces):
            begin_at, end_at = max(first, own + piece * size), min(min(end, own + UNIT), own + (piece + 1) * size)
            if begin_at < end_at:
                used = load_rows(shape, cache, b, rows, head, first_head, count, begin_at, end_at, 1, position)
                layers, kv_heads = shape.layers, shape.kv_heads
                if count == 0:
                    attend_span(cache, b.stage, stage_slot, rows, used, layers, kv_heads, 0, layer, head, 0, own, end_at)
                else:
                    attend_chosen(
                        cache, b.stage, stage_slot, choice, sparse.block, rows, used, layers, kv_heads, 0, layer, head, own, end_at
                    )
                store_rows(shape, b, rows, head, first_head, count, begin_at - position, used)


# ---- the whole context ------------------------------------------------------------------------------------------------------
@helper
def attend_all(team, phase, shape, cache, b, rows, layer, tokens, position):
    """Attention over the whole context. One piece of work: one kv head, a few tokens of one unit."""
    pieces, count = pieces_of_unit(shape)
    first_unit = position // UNIT
    units = (position + tokens - 1) // UNIT - first_unit + 1
    item = claim(team, phase)
    while item < units * pieces * shape.kv_heads:
        head, piece = item % shape.kv_heads, units * pieces - 1 - item // shape.kv_heads  # the longest first: threads end together
        unit = first_unit + piece // pieces
        first = max(position, unit * UNIT + piece % pieces * count)
        end = min(min(position + tokens, (unit + 1) * UNIT), unit * UNIT + (piece % pieces + 1) * count)
        if first < end:
            used = load_rows(shape, cache, b, rows, head, 0, 0, first, end, 1, position)
            stage_slot = stage_slot_of(b, head, unit - first_unit)
            own = unit * UNIT
            attend_span(cache, b.stage, stage_slot, rows, used, shape.layers, shape.kv_heads, 0, layer, head, 0, own, end)
            store_rows(shape, b, rows, head, 0, 0, first - position, used)
        item = claim(team, phase)
    barrier(team)


@helper
def pieces_of_unit(shape):
    """Into how many pieces of work a unit of tokens falls, and the tokens of one."""
    most = max(1, QUERY_ROWS // (shape.heads // shape.kv_heads))
    pieces = (UNIT + most - 1) // most
    return pieces, (UNIT + pieces - 1) // pieces


@helper
def load_rows(shape, cache, b, rows, head, first_head, count, first, end, step, position):
    """Query rows of every step-th of the tokens at positions first … end, the last one among them, ready to attend: `count` heads of a
    group from first_head on, all if count is 0. Returns their number."""
    count = count if count > 0 else shape.heads // shape.kv_heads
    row = 0
    for t in range(first + (end - 1 - first) % step, end, step):
        for i in range(first_head, first_head + count):
            scale_into(b.qkv, query_at(shape, b, t - position, head, i), shape.q_scale, rows.q, row * shape.head_room, shape.head_room)
            rows.limit[row] = t + 1
            row += 1
    prepare_rows(cache.k, rows, row)
    begin(rows, row)
    return row


@helper
def query_at(shape, b, t, kv_head, i):
    """Where b.qkv holds head i of a group of token t of the mini-batch."""
    return t * b.qkv.shape[1] + (kv_head * (shape.heads // shape.kv_heads) + i) * shape.head_room


@helper
def store_rows(shape, b, rows, kv_head, first_head, count, first, used):
    """What the rows have seen, divided by their weights, into b.attn; rows as load_rows made them, from token `first` of the mini-batch
    on."""
    group = shape.heads // shape.kv_heads
    count = count if count > 0 else group
    for row in range(used):
        scale = np.float32(1.0) / rows.total[row]
        head = kv_head * group + first_head + row % count
        scale_into(
            rows.o, row * rows.o.shape[1], scale, b.attn, (first + row // count) * b.attn.shape[1] + head * shape.head_room, shape.head_room
        )
