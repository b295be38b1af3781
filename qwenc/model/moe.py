"""Mixture of experts: a router picks a few small MLPs for each token.

softmax over ALL experts in float32, then the top k, renormalised only if the model says so; equal scores go to the lower index.
In prefill tokens are grouped by expert, so each expert's weights are read once per mini-batch.
"""

from __future__ import annotations

import numpy as np

from qwenc.kernels import simd
from qwenc.kernels.jit import allocating, by_type, helper
from qwenc.kernels.linear import fetch_rows, linear_many, linear_one, make_ready, new_room, prepare, row_tiles
from qwenc.kernels.pointwise import copy_into, dot, rms_norm, silu_mul
from qwenc.kernels.records import TILE
from qwenc.kernels.sync import barrier, claim, lap, next_piece, piece_of
from qwenc.model.overloads import is_absent
from qwenc.model.records import DOWN, GATE_UP, NORM


@helper
def route(gate, gate_at, experts, count, norm_topk, choice, weight, at):
    """From router logits gate[gate_at …] to `count` expert numbers and weights at choice[at …], weight[at …] (both flat)."""
    top = simd.get(gate, gate_at)
    for e in range(1, experts):
        top = max(top, simd.get(gate, gate_at + e))
    total = np.float32(0.0)
    for e in range(experts):
        total += np.exp(simd.get(gate, gate_at + e) - top)
    kept = np.float32(0.0)
    for i in range(count):
        best = -1
        for e in range(experts):
            taken = False
            for j in range(i):
                taken = taken or choice[at + j] == e
            if not taken and (best < 0 or simd.get(gate, gate_at + e) > simd.get(gate, gate_at + best)):
                best = e
        choice[at + i] = best
        weight[at + i] = np.exp(simd.get(gate, gate_at + best) - top) / total
        kept += weight[at + i]
    if norm_topk:
        for i in range(count):
            weight[at + i] /= kept


@helper
def add_scaled(x, x_at, factor, out, out_at):
    """out += factor · x for 16 values."""
    simd.store(out, out_at, simd.fma(simd.splat(factor), simd.load(x, x_at), simd.load(out, out_at)))


# ---- decode -----------------------------------------------------------------------------------------------------------------
def experts_one(team, phase, router, gate_up, down, shape, layer, normed, acts, b, x, now):
    """x += the chosen experts of one token. `layer` counts MoE layers. Returns the time."""
    raise NotImplementedError("runs in compiled code only")


@by_type(experts_one, allocates=True)
def _experts_one(team, phase, router, gate_up, down, shape, layer, normed, acts, b, x, now):
    if is_absent(gate_up):  # a dense model
        return lambda team, phase, router, gate_up, down, shape, layer, normed, acts, b, x, now: now

    def run(team, phase, router, gate_up, down, shape, layer, normed, acts, b, x, now):
        experts, hidden = router.shape[1], router.shape[2]
        count = shape.experts_per_token
        prepare(gate_up, normed, 0, acts, 1, 0)
        first, end = piece_of(team.rank, experts, team.threads)
        while first < end:
            for e in range(first, end):
                b.gate[0, e] = dot(router, (layer * experts + e) * hidden, normed, 0, hidden)
            first, end = next_piece(team, phase, experts)
        barrier(team)
        stacks, weight = np.empty(count, np.int64), np.empty(count, np.float32)
        route(b.gate, 0, experts, count, shape.norm_topk, stacks, weight, 0)
        for slot in range(count):
            stacks[slot] += layer * experts
        pairs, tiles = row_tiles(gate_up) // 2, row_tiles(down)
        fetch_chosen(gate_up, stacks, piece_of(team.rank, pairs * count, team.threads)[0], pairs)
        now = lap(team, NORM, now)

        width = b.expert_ffn.size // count
        sums = np.empty(32, np.float32)
        first, end = piece_of(team.rank, pairs * count, team.threads)
        while first < end:
            following = first, first
            for item in range(first, end):
                following = look_beyond(team, phase + 1, gate_up, stacks, pairs, item, end, following)
                slot, pair = item // pairs, item % pairs
                linear_one(gate_up, stacks[slot], 2 * pair, acts, 0, sums, 0)
                linear_one(gate_up, stacks[slot], 2 * pair + 1, acts, 0, sums, 16)
                silu_mul(sums, 0, 16, b.expert_ffn, slot * width + 16 * pair)
            first, end = following
        barrier(team)
        fetch_chosen(down, stacks, piece_of(team.rank, tiles * count, team.threads)[0], tiles)
        now = lap(team, GATE_UP, now)

        for slot in range(count):
            prepare(down, b.expert_ffn, slot * width, acts, 1, slot)
        first, end = piece_of(team.rank, tiles * count, team.threads)
        while first < end:
            following = first, first
            for item in range(first, end):
                following = look_beyond(team, phase + 2, down, stacks, tiles, item, end, following)
                slot, tile = item // tiles, item % tiles
                linear_one(down, stacks[slot], tile, acts, slot, b.y, slot * b.y.shape[1] + 16 * tile)
            first, end = following
        barrier(team)
        for i in range(0, x.size, 16):
            for slot in range(count):
                add_scaled(b.y, slot * b.y.shape[1] + i, weight[slot], x, i)
        return lap(team, DOWN, now)

    return run


@helper
def look_beyond(team, phase, w, stacks, tiles, item, end, following):
    """The run after the one that ends before `end`, once `item` is the last of it, else `following`. What is read after `item` is asked for
    where it lies elsewhere."""
    if item == end - 1:
        following = next_piece(team, phase, tiles * stacks.size)
        fetch_chosen(w, stacks, following[0], tiles)
    elif item % tiles == tiles - 1:
        fetch_chosen(w, stacks, item + 1, tiles)
    return following


@helper
def fetch_chosen(w, stacks, item, tiles):
    """Ask for the beginning of what work item `item` reads: the chosen experts one after the other, `tiles` items each."""
    slot = item // tiles
    if slot < stacks.size:
        fetch_rows(w, stacks[slot], item % tiles * (row_tiles(w) // tiles))


# ---- prefill ----------------------------------------------------------------------------------------------------------------
def experts_many(team, phase, w, router, gate_up, down, shape, block, layer, tokens, acts, b, now):
    """x += the chosen experts of each token of a mini-batch. `block` is the layer's number, `layer` counts MoE layers. Returns the time."""
    raise NotImplementedError("runs in compiled code only")


@by_type(experts_many, allocates=True)
def _experts_many(team, phase, w, router, gate_up, down, shape, block, layer, tokens, acts, b, now):
    if is_absent(gate_up):
        return lambda team, phase, w, router, gate_up, down, shape, block, layer, tokens, acts, b, now: now

    def run(team, phase, w, router, gate_up, down, shape, block, layer, tokens, acts, b, now):
        experts = router.shape[1]
        choose_experts(team, phase, w, router, shape, block, layer, tokens, b)
        if team.rank == 0:
            place_by_expert(b, tokens, shape.experts_per_token, experts)
        barrier(team)
        normed = np.zeros(shape.hidden_room, np.float32)
        t = claim(team, phase + 1)
        while t < tokens:
            rms_norm(b.x, t * shape.hidden_room, w.post_norm, block * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
            for slot in range(shape.experts_per_token):
                prepare(gate_up, normed, 0, acts, TILE, b.place[t, slot])
            t = claim(team, phase + 1)
        barrier(team)
        now = lap(team, NORM, now)

        width = expert_gate_up(team, phase + 2, gate_up, down, layer, experts, acts, b)
        now = lap(team, GATE_UP, now)
        token_tile = claim(team, phase + 3)
        while token_tile < b.expert_tile[experts]:
            for place in range(token_tile * TILE, (token_tile + 1) * TILE):
                prepare(down, b.expert_ffn, place * width, acts, TILE, place)
            token_tile = claim(team, phase + 3)
        barrier(team)
        now = lap(team, NORM, now)

        expert_down(team, phase + 4, down, layer, experts, acts, b)
        t = claim(team, phase + 5)
        while t < tokens:
            for slot in range(shape.experts_per_token):
                for i in range(0, shape.hidden_room, 16):
                    y_at = b.place[t, slot] * shape.hidden_room + i
                    add_scaled(b.y, y_at, b.choice_weight[t, slot], b.x, t * shape.hidden_room + i)
            t = claim(team, phase + 5)
        barrier(team)
        return lap(team, DOWN, now)

    return run


@allocating
def choose_experts(team, phase, w, router, shape, block, layer, tokens, b):
    """b.choice and b.choice_weight of every token."""
    experts, hidden = router.shape[1], router.shape[2]
    normed = np.zeros(shape.hidden_room, np.float32)
    t = claim(team, phase)
    while t < tokens:
        rms_norm(b.x, t * shape.hidden_room, w.post_norm, block * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
        for e in range(experts):
            b.gate[t, e] = dot(router, (layer * experts + e) * hidden, normed, 0, hidden)
        at = t * shape.experts_per_token
        choice, weight = b.choice.reshape(-1), b.choice_weight.reshape(-1)
        route(b.gate, t * experts, experts, shape.experts_per_token, shape.norm_topk, choice, weight, at)
        t = claim(team, phase)
    barrier(team)


@allocating
def place_by_expert(b, tokens, count, experts):
    """Order the (token, expert) pairs by expert; every expert begins at a token tile of its own."""
    sizes = np.zeros(experts, np.int64)
    for t in range(tokens):
        for slot in range(count):
            b.place[t, slot] = sizes[b.choice[t, slot]]
            sizes[b.choice[t, slot]] += 1
    b.expert_tile[0] = 0
    for e in range(experts):
        b.expert_tile[e + 1] = b.expert_tile[e] + (sizes[e] + TILE - 1) // TILE
    for t in range(tokens):
        for slot in range(count):
            b.place[t, slot] += TILE * b.expert_tile[b.choice[t, slot]]


@allocating
def expert_gate_up(team, phase, gate_up, down, layer, experts, acts, b):
    """b.expert_ffn [place, width] = silu(gate) · up; returns the width of a row."""
    pairs = row_tiles(gate_up) // 2
    width = (pairs * 16 + 31) // 32 * 32
    parts = 4  # of an expert's rows per claim
    sums, gate_room, up_room = np.empty(2 * TILE * 16, np.float32), new_room(gate_up), new_room(gate_up)
    item = claim(team, phase)
    while item < experts * parts:
        e, part = item // parts, item % parts
        if b.expert_tile[e] < b.expert_tile[e + 1]:
            stack = layer * experts + e
            for pair in range(part * pairs // parts, (part + 1) * pairs // parts):
                make_ready(gate_up, stack, 2 * pair, gate_room)
                make_ready(gate_up, stack, 2 * pair + 1, up_room)
                for token_tile in range(b.expert_tile[e], b.expert_tile[e + 1]):
                    linear_many(gate_up, gate_room, stack, 2 * pair, acts, token_tile, sums, 0)
                    linear_many(gate_up, up_room, stack, 2 * pair + 1, acts, token_tile, sums, TILE * 16)
                    for i in range(TILE):
                        silu_mul(sums, 16 * i, (TILE + i) * 16, b.expert_ffn, (token_tile * TILE + i) * width + 16 * pair)
        item = claim(team, phase)
    barrier(team)
    return width


@allocating
def expert_down(team, phase, down, layer, experts, acts, b):
    """b.y [place, hidden_room] = down(ffn)."""
    tiles = row_tiles(down)
    parts = 4
    sums, room = np.empty(TILE * 16, np.float32), new_room(down)
    item = claim(team, phase)
    while item < experts * parts:
        e, part = item // parts, item % parts
        if b.expert_tile[e] < b.expert_tile[e + 1]:
            for tile in range(part * tiles // parts, (part + 1) * tiles // parts):
                make_ready(down, layer * experts + e, tile, room)
                for token_tile in range(b.expert_tile[e], b.expert_tile[e + 1]):
                    linear_many(down, room, layer * experts + e, tile, acts, token_tile, sums, 0)
                    for i in range(TILE):
                        copy_into(sums, 16 * i, b.y, (token_tile * TILE + i) * b.y.shape[1] + 16 * tile)
        item = claim(team, phase)
    barrier(team)
