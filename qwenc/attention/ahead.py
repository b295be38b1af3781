"""Asking for the keys and values of a tile list before they are read: chosen blocks lie apart, so the hardware does not see them coming."""

from __future__ import annotations

from qwenc.attention.cache import Q4K, Q4V, TILE, UNIT, FloatKV
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
    four = is_record(k, Q4K)

    def run(k, r, tiles):
        codes, lower = key_arrays(k)
        head_dim = r.q.shape[1]
        step = TILE * head_dim // (4 if four else 1)
        for i in range(min(tiles, SEGMENT)):
            ask_key_ranges(k, r.at[i], head_dim)
        for i in range(min(tiles, FIRST)):
            for byte in range(0, step, LINE):
                simd.ask_ahead(codes, r.at[i] // TILE * step + byte)
                if four:
                    simd.ask_ahead(lower, r.at[i] // TILE * step + byte)

    return run


def ask_key_ranges(k, slot, head_dim):
    """Ask for the scales of the keys of the tile at `slot`: in 4 bits, with the first tile of a unit for both."""
    raise NotImplementedError("runs in compiled code only")


@by_type(ask_key_ranges, inline=True)
def _ask_key_ranges(k, slot, head_dim):
    if not is_record(k, Q4K):
        return lambda k, slot, head_dim: simd.ask_ahead(k.scale, slot)

    def run(k, slot, head_dim):
        if slot % UNIT == 0:
            for d in range(0, head_dim, 32):  # a cache line
                simd.ask_ahead(k.low, slot // UNIT * head_dim + d)
                simd.ask_ahead(k.step, slot // UNIT * head_dim + d)

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
        for d in range(0, ranges, 32):
            simd.ask_ahead(v.low, slot // TILE * ranges + d)
            simd.ask_ahead(v.step, slot // TILE * ranges + d)

    return run


def key_arrays(k):
    """The one or two arrays of codes."""
    raise NotImplementedError("runs in compiled code only")


@by_type(key_arrays, inline=True)
def _key_arrays(k):
    if is_record(k, Q4K):
        return lambda k: (k.upper, k.lower)
    return lambda k: (k.codes, k.codes)
