"""Asking for the keys and values of a tile list before they are read: chosen blocks lie apart, so the hardware does not see them coming."""

from __future__ import annotations

from qwenc.attention.cache import PAGE, Q4V, Q5K, TILE, UNITS, FloatKV
from qwenc.attention.overloads import is_record
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import LINE, SEGMENT
from qwenc.kernels.jit import by_type

FIRST = 8  # tiles asked for before the first is read


def ask_for_keys(k, r, tiles):
    """Ask for the keys of the first tiles of the list, and for the scales of the first segment: nobody has."""
    raise NotImplementedError("runs in compiled code only")


@by_type(ask_for_keys)
def _ask_for_keys(k, r, tiles):
    if is_record(k, FloatKV):
        return lambda k, r, tiles: None
    five = is_record(k, Q5K)

    def run(k, r, tiles):
        codes = key_arrays(k)
        head_dim = r.q.shape[1]
        step = TILE * head_dim // (4 if five else 1)
        for i in range(min(tiles, SEGMENT)):
            ask_key_ranges(k, r.at[i], head_dim)
        for i in range(min(tiles, FIRST)):
            for byte in range(0, step, LINE):
                simd.ask_ahead(codes[0], r.at[i] // TILE * step + byte)
                if five:
                    simd.ask_ahead(codes[1], r.at[i] // TILE * step + byte)
                    simd.ask_ahead(codes[2], (r.at[i] // TILE * step + byte) // 2)

    return run


def ask_key_ranges(k, slot, head_dim):
    """Ask for the scales of the keys of the tile at `slot`: the ranges of channels with the first tile of a page for all of them. Where
    blocks are chosen the choice has read these."""
    raise NotImplementedError("runs in compiled code only")


@by_type(ask_key_ranges, inline=True)
def _ask_key_ranges(k, slot, head_dim):
    if not is_record(k, Q5K):
        return lambda k, slot, head_dim: simd.ask_ahead(k.scale, slot)

    def run(k, slot, head_dim):
        if slot % PAGE == 0:
            size = UNITS * head_dim
            for line in range(0, size, LINE):
                simd.ask_ahead(k.centre, slot // PAGE * size + line)
            for line in range(0, size // 2, LINE):
                simd.ask_ahead(k.step, slot // PAGE * size // 2 + line)
            simd.ask_ahead(k.scale, slot // PAGE * 2 * UNITS)

    return run


def ask_value_ranges(v, slot, width):
    """Ask for the scales of the values of the tile at `slot`. width: dimensions, in whole groups of 32."""
    raise NotImplementedError("runs in compiled code only")


@by_type(ask_value_ranges, inline=True)
def _ask_value_ranges(v, slot, width):
    if not is_record(v, Q4V):
        return lambda v, slot, width: simd.ask_ahead(v.scale, slot)

    def run(v, slot, width):
        ranges = width // 2  # of a tile
        for d in range(0, ranges, LINE):
            simd.ask_ahead(v.centre, slot // TILE * ranges + d)
            simd.ask_ahead(v.step, slot // TILE * ranges + d)

    return run


def ask_first_lines(k, v, slot, head_dim):
    """Ask for one line of the keys and of the values of the tile at `slot`, where a page of memory begins, long before the rest: the first
    line of a page waits until the core knows where that page is."""
    raise NotImplementedError("runs in compiled code only")


@by_type(ask_first_lines, inline=True)
def _ask_first_lines(k, v, slot, head_dim):
    if is_record(k, FloatKV):
        return lambda k, v, slot, head_dim: None
    five, value_bits = is_record(k, Q5K), 4 if is_record(v, Q4V) else 8
    tokens = 128 if five else 32  # whose codes take about 4 KiB in an array

    def run(k, v, slot, head_dim):
        if slot % tokens == 0:
            codes = key_arrays(k)
            if five:
                simd.ask_ahead(codes[0], slot * head_dim // 4)
                simd.ask_ahead(codes[1], slot * head_dim // 4)
                simd.ask_ahead(codes[2], slot * head_dim // 8)
            else:
                simd.ask_ahead(codes[0], slot * head_dim)
            simd.ask_ahead(v.codes, slot * head_dim * value_bits // 8)

    return run


def key_arrays(k):
    """The arrays of codes: three planes, or one array."""
    raise NotImplementedError("runs in compiled code only")


@by_type(key_arrays, inline=True)
def _key_arrays(k):
    if is_record(k, Q5K):
        return lambda k: (k.upper, k.lower, k.last)
    return lambda k: (k.codes,)
