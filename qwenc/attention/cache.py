"""The KV cache: one copy of every key and value, in pages of 256 tokens, given memory only as it fills.

A page holds all layers and kv heads of its tokens, so the cache grows in one direction and a page can be saved, shared or dropped whole.
"""

from __future__ import annotations

import contextlib
import mmap
from typing import NamedTuple

import numpy as np
from numba import types
from numba.extending import overload

from qwenc.errors import UsageError
from qwenc.kernels import simd
from qwenc.kernels.jit import helper

PAGE = 256  # tokens
PAGE_CELLS = PAGE // 4


class Int8KV(NamedTuple):
    """int8 keys and values, one float32 scale per token and kv head: 2·(head_dim + 4) bytes per token, layer and kv head.

    k int8 [pages, layers, kv_heads, 256·head_dim]: [tile of 16 tokens][head_dim/4][16 tokens][4 dims], as the score tiles read it.
    v int8 [pages, layers, kv_heads, 256·head_dim]: [head_dim/16][64 cells][16 dims][4 tokens], as the value tiles read it.
    ks, vs float32 [pages, layers, kv_heads, 256].
    """

    k: np.ndarray
    ks: np.ndarray
    v: np.ndarray
    vs: np.ndarray


class FloatKV(NamedTuple):
    """float32 keys and values, k and v [pages, layers, kv_heads, 256·head_dim], a row of head_dim values per token."""

    k: np.ndarray
    v: np.ndarray


def new_cache(kv: str, tokens: int, layers: int, kv_heads: int, head_dim: int) -> Int8KV | FloatKV:
    """An empty cache with room for `tokens` tokens; kv is "q8" or "f32". Memory is reserved, not yet taken."""
    if kv not in ("q8", "f32"):
        raise UsageError(f"the KV cache {kv} is not there yet")
    shape = (-(-tokens // PAGE), layers, kv_heads, PAGE * head_dim)
    if kv == "f32":
        return FloatKV(_reserve(shape, np.float32), _reserve(shape, np.float32))
    scales = (*shape[:3], PAGE)
    return Int8KV(_reserve(shape, np.int8), _reserve(scales, np.float32), _reserve(shape, np.int8), _reserve(scales, np.float32))


def bytes_per_token(kv: str, layers: int, kv_heads: int, head_dim: int) -> int:
    """What one token takes in the cache."""
    each = 8 * head_dim if kv == "f32" else 2 * (head_dim + 4)
    return layers * kv_heads * each


def _reserve(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """A zero array whose pages the system hands out when they are first written. Larger than memory is fine until then."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0)
    buffer = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses on long scans
    return np.frombuffer(buffer, dtype, count=int(np.prod(shape))).reshape(shape)


# ---- writing --------------------------------------------------------------------------------------------------------------
def write_kv(cache, layer, head, position, k, k_at, v, v_at, head_dim):
    """Store the key k[k_at …] and the value v[v_at …] (float32, head_dim values) of the token at `position`."""
    raise NotImplementedError("runs in compiled code only")


@overload(write_kv)
def _write_kv(cache, layer, head, position, k, k_at, v, v_at, head_dim):
    if isinstance(cache, types.BaseNamedTuple) and cache.instance_class is FloatKV:

        def write_float(cache, layer, head, position, k, k_at, v, v_at, head_dim):
            page, slot = position // PAGE, position % PAGE
            k_row, v_row = cache.k[page, layer, head], cache.v[page, layer, head]
            for d in range(head_dim):
                k_row[slot * head_dim + d] = simd.get(k, k_at + d)
                v_row[slot * head_dim + d] = simd.get(v, v_at + d)

        return write_float

    def write_int8(cache, layer, head, position, k, k_at, v, v_at, head_dim):
        page, slot = position // PAGE, position % PAGE
        k_codes, v_codes = cache.k[page, layer, head], cache.v[page, layer, head]
        k_scale, k_inverse = scale_of(k, k_at, head_dim)
        v_scale, v_inverse = scale_of(v, v_at, head_dim)
        cache.ks[page, layer, head, slot] = k_scale
        cache.vs[page, layer, head, slot] = v_scale
        k_first = (slot // 16) * 16 * head_dim + 4 * (slot % 16)
        v_first = (slot // 4) * 64 + slot % 4
        for d in range(head_dim):
            k_codes[k_first + (d // 4) * 64 + d % 4] = np.int8(np.rint(simd.get(k, k_at + d) * k_inverse))
            v_codes[v_first + (d // 16) * PAGE_CELLS * 64 + 4 * (d % 16)] = np.int8(np.rint(simd.get(v, v_at + d) * v_inverse))

    return write_int8


@helper
def scale_of(x, x_at, count):
    """(max|x|/127, 127/max|x|) of `count` values, a multiple of 16; a NaN makes the scale NaN."""
    largest = simd.absolute(simd.load(x, x_at))
    for i in range(16, count, 16):
        largest = simd.maximum(largest, simd.absolute(simd.load(x, x_at + i)))
    top = simd.lane_max(largest)
    return top * np.float32(1 / 127), np.float32(127.0) / top if top > 0 else np.float32(0.0)
