"""What the settings of sparse attention mean for a step, on the Python side."""

from __future__ import annotations

import math

from qwenc.attention.select import Sparse
from qwenc.settings import SPARSE_SCORES, Settings

DECODE_BREAK_EVEN = 2  # times the kept keys: from there on a choice of blocks pays in decode, measured (docs/benchmarks.md)
PREFILL_BREAK_EVEN = 2  # and in prefill
PREFILL_GROUP = 64  # queries that share a choice
# Units scanned after the first look: at least so many (8,192 keys), so many times those to keep, or one in so many. With half of them KL at
# 8,000 tokens was five times as large: the key to copy from was in the other half (docs/architecture.md).
SCAN_LEAST, SCAN_TIMES, SCAN_SHARE = 256, 4, 3
MASS_LIMIT = 4  # with a target mass, at most this many times k blocks
# A tile of queries wants more blocks than a query: prefill keeps more than k until they hold this share of what its queries want (each
# block counts by the query that wants it most), up to twice k, and only where that is less than a quarter of the context.
PREFILL_MASS, PREFILL_LIMIT, PREFILL_SHARE = 0.93, 2, 4


def make_sparse(settings: Settings, *, prefill: bool) -> Sparse:
    """The record that the kernels read, for prefill or for decode."""
    k = settings.sparse_k
    asked, break_even = settings.sparse_min_ctx, DECODE_BREAK_EVEN
    mass, limit, share = settings.sparse_mass, MASS_LIMIT, 1
    if prefill:
        asked, break_even = settings.sparse_pf_min_ctx, PREFILL_BREAK_EVEN
        mass, limit, share = PREFILL_MASS, PREFILL_LIMIT, PREFILL_SHARE
        if settings.sparse_pf_k is not None:  # just as many
            k, mass = settings.sparse_pf_k, 0.0
    from_keys = break_even * k * settings.sparse_block if asked is None else asked
    return Sparse(
        score=SPARSE_SCORES.index(settings.sparse_score),
        block=settings.sparse_block,
        k=k,
        most=limit * k if mass > 0 else k,
        most_share=share,
        mass=float(mass),
        probe=settings.sparse_probe,
        ratio=float(settings.sparse_ratio),
        group=settings.sparse_pf_group or PREFILL_GROUP,
        from_keys=from_keys,
        scan_least=SCAN_LEAST,
        scan_times=SCAN_TIMES,
        scan_share=SCAN_SHARE,
    )


def why_exact(sparse: Sparse | None, keys: int) -> str:
    """Why a context of `keys` tokens is attended to in full; "" if it is not. The same gate as attention/select.py: is_sparse."""
    if sparse is None:
        return "--sparse-attn is off"
    blocks = -(-keys // sparse.block)
    kept = min(blocks, max(sparse.k, math.ceil(sparse.ratio * blocks)))
    if keys <= 2 * sparse.block:
        return f"{keys} tokens are no more than two blocks"
    if keys < sparse.from_keys:
        return f"{keys} tokens are fewer than {sparse.from_keys}"
    if blocks <= kept:
        return f"all {blocks} blocks would be kept"
    return ""
