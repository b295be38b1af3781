"""How a team shares the work of one matrix: rows for one token, rows × tokens for a mini-batch. Each ends at a barrier.

`add` says what becomes of the products of a mini-batch: added to `out` (the residual stream), or put there. It is no function to call,
which would be shorter: Numba takes the address of a function that it is given, and what holds an address cannot be cached.
"""

from __future__ import annotations

import numpy as np

from qwenc.kernels.jit import allocating, helper
from qwenc.kernels.linear import fetch_rows, linear_many, linear_one, make_ready, new_room, prepare, row_tiles
from qwenc.kernels.pointwise import add_into, copy_into, rms_norm
from qwenc.kernels.records import TILE
from qwenc.kernels.sync import barrier, chunk_of, claim, next_piece, piece_of


@allocating
def matrix_rows(team, phase, w, stack, acts, out):
    """out [rows] = matrix · one prepared activation row."""
    tiles = row_tiles(w)
    first, end = piece_of(team.rank, tiles, team.threads)
    while first < end:
        following = first, first
        for tile in range(first, end):
            if tile == end - 1:
                following = next_piece(team, phase, tiles)
                fetch_rows(w, stack, following[0])
            linear_one(w, stack, tile, acts, 0, out, 16 * tile)
        first, end = following
    barrier(team)


@helper
def fetch_first(team, w, stack):
    """Ask for what this thread will read first of a matrix, while it still prepares the activations."""
    fetch_rows(w, stack, piece_of(team.rank, row_tiles(w), team.threads)[0])


@allocating
def matrix_tokens(team, phase, w, stack, tokens, acts, out, add):
    """out [tokens, width] = or += matrix · activations of a mini-batch."""
    tiles, width = row_tiles(w), out.shape[1]
    chunk = chunk_of(tiles)
    sums, room = np.empty(TILE * 16, np.float32), new_room(w)
    first = claim(team, phase) * chunk
    while first < tiles:
        for tile in range(first, min(tiles, first + chunk)):
            make_ready(w, stack, tile, room)
            for t in range(0, tokens, TILE):
                linear_many(w, room, stack, tile, acts, t // TILE, sums, 0)
                for i in range(min(TILE, tokens - t)):
                    deliver(sums, 16 * i, out, (t + i) * width + 16 * tile, add)
        first = claim(team, phase) * chunk
    barrier(team)


@helper
def deliver(sums, at, out, out_at, add):
    if add:
        add_into(sums, at, out, out_at)
    else:
        copy_into(sums, at, out, out_at)


@allocating
def prepare_normed(team, phase, matrix, norm, norm_row, shape, tokens, b):
    """b.acts = RMS norm of the residual stream, as `matrix` reads it."""
    normed = np.zeros(shape.hidden_room, np.float32)
    token_tile = claim(team, phase)
    while token_tile * TILE < tokens:
        for t in range(token_tile * TILE, min(tokens, (token_tile + 1) * TILE)):
            rms_norm(b.x, t * shape.hidden_room, norm, norm_row * shape.hidden_room, shape.hidden, shape.eps, normed, 0)
            prepare(matrix, normed, 0, b.acts, TILE, t)
        token_tile = claim(team, phase)
    barrier(team)


@helper
def prepare_tokens(team, phase, matrix, tokens, x, width, b):
    """b.acts = the rows of x (`width` values apart), as `matrix` reads them."""
    token_tile = claim(team, phase)
    while token_tile * TILE < tokens:
        for t in range(token_tile * TILE, min(tokens, (token_tile + 1) * TILE)):
            prepare(matrix, x, t * width, b.acts, TILE, t)
        token_tile = claim(team, phase)
    barrier(team)
