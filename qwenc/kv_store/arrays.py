"""The state of a context as plain arrays, whatever kind of cache holds it: pages first, the rest as it stands.

An array of a cache has one entry per page of 256 tokens along its first axis; one that has not (keys of 5 bits that wait for their codes)
belongs to the end of the context and is copied whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from qwenc.attention.cache import PAGE, UNIT, KVCache, cache_arrays, is_paged


def pages_of(tokens: int) -> int:
    return -(-tokens // PAGE)


def used_arrays(cache: KVCache, tokens: int) -> dict[str, np.ndarray]:
    """Views of what the first `tokens` tokens take up of each array, by name."""
    return {name: array[: pages_of(tokens)] if is_paged(name) else array for name, array in cache_arrays(cache).items()}


def grain_of(cache: KVCache, sparse_batch: int | None) -> int:
    """A context can be cut, bit for bit, where a multiple of so many tokens ends. 1 where each token is stored by itself; a unit where
    tokens share scales. sparse_batch: the mini-batch of sparse prefill, whose queries choose blocks together; None if it is exact."""
    grain = 1 if not hasattr(cache.k, "tail") and cache.plane is None else UNIT
    return grain if sparse_batch is None else math.lcm(grain, sparse_batch)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """How many leading elements of two integer arrays agree."""
    count = min(len(a), len(b))
    differing = np.flatnonzero(a[:count] != b[:count])
    return int(differing[0]) if len(differing) else count


def usable(shared: int, held: int, wanted: int, grain: int) -> int:
    """How much of a saved prompt of `held` tokens serves one of `wanted`, of which `shared` agree: at least one token is left to compute,
    since the logits come from it, and the cut falls on a multiple of the grain (or on the end of what was saved)."""
    most = min(shared, wanted - 1)
    return most if most == held else most - most % grain


def pieces(arrays: dict[str, Any], size: int = 4 << 20) -> Iterator[tuple[str, int, int]]:
    """(name, first, end) of page ranges of about `size` bytes, to work on in parallel. An array that is not paged is one piece."""
    for name, array in arrays.items():
        count = array.shape[0]
        step = max(1, size // max(1, array.nbytes // max(1, count)))
        for first in range(0, count, step):
            yield name, first, min(count, first + step)
