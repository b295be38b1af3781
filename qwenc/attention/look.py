"""The first look at every unit of 32 keys of a context, through the ranges of its channels; and the room in which blocks are chosen."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qwenc.attention.cache import PAGE, UNITS
from qwenc.attention.rows import rows_at_once
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import LINE
from qwenc.kernels.jit import allocating, helper, inlined
from qwenc.kernels.level import LEVEL
from qwenc.kernels.summary_tiles import make_look

BIAS = np.float32(-LEVEL.signed_bias)
Q16_TOP = np.float32(32767.0)
AHEAD = 8  # units between asking for their codes and reading them
LOOK_AHEAD = 4  # pages between asking for what the first look reads and reading it

look_1, look_2, look_4, look_8 = (make_look(rows) for rows in (1, 2, 4, 8))


class Choice(NamedTuple):
    """Room for one choice, for one thread. q8, a8 int8 [rows·head_dim], sums float32 [rows, 3], q16 int16 [rows, head_dim], qs float32
    [rows], q16s: scales: the queries in the forms that the kernels read. mid, spread, tilt float32 [rows, units]: first look. folded int8
    [rows·head_dim·8], folded_scale, folded_bias float32 [8·rows]: the queries times the steps of the 8 units of a page. m, total float32
    [rows, blocks]: Σ e^(score − m) of a block, m being its largest score or somewhat more; score, best, share float32 [units or blocks];
    kept uint8 [units or blocks]. scanned uint8 [units]: which were looked at key by key; order int64: their numbers. missed float32 [1]:
    estimated share of the attention that the last choice left out, the mean over rows.
    """

    q8: np.ndarray
    a8: np.ndarray
    sums: np.ndarray
    qs: np.ndarray
    q16: np.ndarray
    q16s: np.ndarray
    mid: np.ndarray
    spread: np.ndarray
    tilt: np.ndarray
    folded: np.ndarray
    folded_scale: np.ndarray
    folded_bias: np.ndarray
    m: np.ndarray
    total: np.ndarray
    score: np.ndarray
    best: np.ndarray
    share: np.ndarray
    kept: np.ndarray
    scanned: np.ndarray
    order: np.ndarray
    missed: np.ndarray


@allocating
def new_choice(rows, head_dim, keys, block):
    """Room for contexts of up to `keys` keys."""
    units = (keys + PAGE - 1) // PAGE * UNITS
    blocks = (keys + block - 1) // block
    most = max(units, blocks)
    return Choice(
        np.zeros(rows * head_dim, np.int8),
        np.zeros(rows * head_dim, np.int8),
        np.zeros((rows, 3), np.float32),
        np.zeros(rows, np.float32),
        np.zeros((rows, head_dim), np.int16),
        np.zeros(rows, np.float32),
        np.zeros((rows, units), np.float32),
        np.zeros((rows, units), np.float32),
        np.zeros((rows, units), np.float32),
        np.zeros(UNITS * rows * head_dim, np.int8),
        np.zeros(UNITS * rows, np.float32),
        np.zeros(UNITS * rows, np.float32),
        np.zeros((rows, blocks + 16), np.float32),
        np.zeros((rows, blocks + 16), np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most + 16, np.float32),
        np.zeros(most, np.uint8),
        np.zeros(units, np.uint8),
        np.zeros(units + AHEAD, np.int64),
        np.zeros(1, np.float32),
    )


@helper
def prepare_look(r, rows, c):
    """The queries in 8 bits for the first look and in 16 for the scan."""
    head_dim = r.q.shape[1]
    first = 0
    while first < rows:
        width = rows_at_once(rows, first)
        for lane in range(width):
            row = first + lane
            top = simd.splat(np.float32(0.0))
            for d in range(0, head_dim, 16):
                top = simd.larger(simd.absolute(simd.load(r.q, row * head_dim + d)), top)
            largest = simd.lane_max(top)
            c.qs[row] = largest * np.float32(1 / 127)
            c.q16s[row] = largest / Q16_TOP
            to_8 = np.float32(127.0) / largest if largest > 0 else np.float32(0.0)
            to_16 = Q16_TOP / largest if largest > 0 else np.float32(0.0)
            factor_8, factor_16 = simd.splat(to_8), simd.splat(to_16)
            total = magnitude = simd.splat(np.float32(0.0))
            for d in range(0, head_dim, 16):
                q = simd.load(r.q, row * head_dim + d)
                code = simd.nearest(simd.mul(q, factor_8))
                at = first * head_dim + d * width + 8 * lane
                simd.store_eights(c.q8, at, 8 * width, code)
                simd.store_eights(c.a8, at, 8 * width, simd.absolute(code))
                simd.store_shorts(c.q16, row * head_dim + d, simd.mul(q, factor_16))
                total, magnitude = simd.add(total, code), simd.add(magnitude, simd.absolute(code))
            of_codes = simd.lane_sum(total)
            c.sums[row, 0] = BIAS * of_codes
            c.sums[row, 1] = np.float32(0.5) * simd.lane_sum(magnitude)
            c.sums[row, 2] = np.float32(0.5) * of_codes
        first += width


@helper
def look(plane, c, rows, first_slot, page_step, units):
    """c.mid, c.spread, c.tilt of all units, and of those that fill up the last page."""
    head_dim = c.q16.shape[1]
    chunks = head_dim // 8
    step = c.mid.shape[1]
    for page in range(LOOK_AHEAD):
        ask_for_page(plane, head_dim, (first_slot + page * page_step) // PAGE)
    for page in range((units + UNITS - 1) // UNITS):
        at = (first_slot + page * page_step) // PAGE
        ask_for_page(plane, head_dim, (first_slot + (page + LOOK_AHEAD) * page_step) // PAGE)
        first = 0
        while first < rows:
            width = rows_at_once(rows, first)
            out = first * step + page * UNITS
            a, b, s = plane.centre, plane.step, plane.scale
            if width == 8:
                look_8(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            elif width == 4:
                look_4(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            elif width == 2:
                look_2(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            else:
                look_1(a, b, s, at, chunks, c.q8, c.a8, c.sums, c.qs, first, c.mid, c.spread, c.tilt, out, step)
            first += width


@inlined
def ask_for_page(plane, head_dim, page):
    """Ask for what the first look reads of a page, for soon."""
    for line in range(0, UNITS * head_dim, LINE):
        simd.ask_ahead(plane.centre, page * UNITS * head_dim + line)
    for line in range(0, UNITS * head_dim // 2, LINE):
        simd.ask_ahead(plane.step, page * UNITS * head_dim // 2 + line)
    simd.ask_ahead(plane.scale, page * 2 * UNITS)
