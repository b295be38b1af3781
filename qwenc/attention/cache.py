"""The KV cache: one copy of every key and value, in pages of 256 tokens, given memory only as it fills.

A page holds all layers and kv heads of its tokens, so the cache grows in one direction and a page can be saved, shared or dropped whole.
Every array begins with [pages, layers, kv_heads]; a token's place in it is one number, its `slot`:
((page·layers + layer)·kv_heads + head)·256 + position % 256.

Tokens lie in tiles of 16, as the kernels read them (kernels/attention_tiles.py). Keys of 5 bits, and the 2-bit plane that sparse attention
looks through, have one range per channel in each unit of 32 tokens; a unit gets its codes when it is full.

"q4" is 4 bits a number and their ranges in float16 by size: 160 bytes for a key and a value of 128 dimensions. Ranges in single bytes make
room for a fifth bit of the keys, whose error costs more: two thirds to four fifths of the KL of 4 bits for both.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from qwenc.kernels.jit import inlined
from qwenc.machine.reserve import reserve

PAGE = 256  # tokens
TILE = 16  # tokens that a kernel takes at once
UNIT = 32  # tokens that share the scale of a channel
UNITS = PAGE // UNIT


class Int8K(NamedTuple):
    """Keys: codes int8 [pages, layers, kv_heads, 256·head_dim] as [tile][head_dim/4][16 tokens][4 dims]; scale float32 […, 256]."""

    codes: np.ndarray
    scale: np.ndarray


class Int8V(NamedTuple):
    """Values: codes int8 [pages, layers, kv_heads, 256·head_dim] as [tile][head_dim/16][4 cells][16 dims][4 tokens]; scale float32 […,
    256]."""

    codes: np.ndarray
    scale: np.ndarray


class Q5K(NamedTuple):
    """Keys of 5 bits per channel and unit, centre + step·15/31·(code − 15.5).

    upper, lower: the upper two bits of each code and the two after them, uint8 […, 256·head_dim/4] as [tile][head_dim/16][16 tokens][4
    bytes], byte b holding dimensions b, b + 4, b + 8, b + 12 of a strip of 16: `upper` in bits 0, 2, 4, 6, `lower` in 6, 0, 2, 4.
    last: the last bits, uint8 [tile][head_dim/32][16 tokens][4 bytes], those of a first strip in bits 2, 0, 1, 3, of a second 4 bits up
    (LOWER_AT, LAST_AT of kernels/attention_tiles.py).
    centre, step, scale: as in Plane, but that a scale is NaN where a key was not finite.
    tail, tail_scale: the unit that is not full yet, as Int8K holds it, [1, layers, kv_heads, …].
    """

    upper: np.ndarray
    lower: np.ndarray
    last: np.ndarray
    centre: np.ndarray
    step: np.ndarray
    scale: np.ndarray
    tail: np.ndarray
    tail_scale: np.ndarray


class Q4V(NamedTuple):
    """Values of 4 bits, step·(centre/2 + code − 7.5): codes uint8 […, 256·16·groups] as [tile][group][4 cells][16][4 tokens], a group being
    32 dimensions, d in the lower and d + 16 in the upper half of a byte; centre int8, step uint8 […, 256·groups] as [tile][group][16
    tokens]. A step is a float of 5 bits of exponent and 3 of mantissa, (1 + mantissa/8)·2^(exponent − 18); 255 is NaN."""

    codes: np.ndarray
    centre: np.ndarray
    step: np.ndarray


class FloatKV(NamedTuple):
    """float32 keys or values [pages, layers, kv_heads, 256·head_dim], a row of head_dim values per token."""

    values: np.ndarray


class Plane(NamedTuple):
    """What sparse attention ranks blocks by; codes, centre and step are those of Q5K where that exists.

    codes: the upper two bits of every key's code of 5 bits. The range of each channel of a unit by its centre, int8 […, 8·head_dim] as
    [head_dim/8][8 units][8 dims], and a fifteenth of its width in 4 bits, step uint8 […, 4·head_dim] as [head_dim/16][8 units][8], dims
    16j … 16j + 7 in the lower halves of the bytes, the next 8 in the upper; scale float32 […, 16]: of the centres of the 8 units of a page,
    then of their steps. centre = code·scale, step = (code + ½)·scale, no less than it is; a key is about centre + step·15/31·(8·code − 12).
    """

    codes: np.ndarray
    centre: np.ndarray
    step: np.ndarray
    scale: np.ndarray


class KVCache(NamedTuple):
    """k: Int8K, Q5K or FloatKV; v: Int8V, Q4V or FloatKV; plane: Plane, or None where attention is always exact."""

    k: Any
    v: Any
    plane: Any


def groups_of(head_dim: int) -> int:
    """Groups of 32 dimensions."""
    return -(-head_dim // 32)


def new_cache(kv: str, tokens: int, layers: int, kv_heads: int, head_dim: int, *, sparse: bool = False) -> KVCache:
    """An empty cache with room for `tokens` tokens. kv: "q8", "k8v4", "q4" or "f32"; sparse: with what sparse attention needs.
    Memory is reserved, not yet taken."""
    pages = -(-tokens // PAGE)

    def room(per_page: int, dtype: type, count: int = pages) -> np.ndarray:
        return reserve((count, layers, kv_heads, per_page), dtype)

    def ranges() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return room(UNITS * head_dim, np.int8), room(UNITS * head_dim // 2, np.uint8), room(2 * UNITS, np.float32)

    groups, values = groups_of(head_dim), PAGE * head_dim
    k: Any
    v: Any
    if kv == "f32":
        k, v = FloatKV(room(values, np.float32)), FloatKV(room(values, np.float32))
    elif kv == "q4":
        codes = (room(values // 4, np.uint8), room(values // 4, np.uint8), room(PAGE * 4 * groups, np.uint8))
        k = Q5K(*codes, *ranges(), room(UNIT * head_dim, np.int8, 1), room(UNIT, np.float32, 1))
    else:
        k = Int8K(room(values, np.int8), room(PAGE, np.float32))
    if kv in ("q4", "k8v4"):
        v = Q4V(room(PAGE * 16 * groups, np.uint8), room(PAGE * groups, np.int8), room(PAGE * groups, np.uint8))
    elif kv == "q8":
        v = Int8V(room(values, np.int8), room(PAGE, np.float32))
    plane = None
    if sparse and kv == "q4":
        plane = Plane(k.upper, k.centre, k.step, room(2 * UNITS, np.float32))
    elif sparse:
        plane = Plane(room(values // 4, np.uint8), *ranges())
    return KVCache(k, v, plane)


def cache_arrays(cache: KVCache) -> dict[str, np.ndarray]:
    """The arrays of a cache by name ("k.codes"), none of them twice. All but k.tail… have one entry per page."""
    arrays: dict[str, np.ndarray] = {}
    for part_name, part in zip(cache._fields, cache, strict=True):
        for name, array in zip(part._fields, part, strict=True) if part is not None else ():
            if not any(array is known for known in arrays.values()):
                arrays[f"{part_name}.{name}"] = array
    return arrays


def is_paged(name: str) -> bool:
    """Whether an array of cache_arrays has an entry per page; keys that wait for their codes have none."""
    return not name.startswith("k.tail")


def bytes_per_token(kv: str, layers: int, kv_heads: int, head_dim: int, *, sparse: bool = False) -> int:
    """What one token takes in the cache, rounded up."""
    arrays = cache_arrays(new_cache(kv, PAGE, layers, kv_heads, head_dim, sparse=sparse))
    return -(-sum(array.nbytes for name, array in arrays.items() if is_paged(name)) // PAGE)


@inlined
def slot_of(layers, kv_heads, first_page, layer, head, position):
    """Where the token at `position` lies in every array of the cache. first_page: where the sequence begins."""
    return (((first_page + position // PAGE) * layers + layer) * kv_heads + head) * PAGE + position % PAGE


@inlined
def scales_at(unit):
    """Where the scale of a unit's centres lies in Plane.scale and Q5K.scale; that of its steps is 8 further."""
    return unit // UNITS * 2 * UNITS + unit % UNITS
