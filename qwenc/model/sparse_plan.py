"""What the settings of sparse attention mean for a step, on the Python side."""

from __future__ import annotations

import math

from qwenc.attention.select import Sparse
from qwenc.settings import SPARSE_SCORES, Settings

PREFILL_BREAK_EVEN = 2048  # tokens from which a choice of blocks pays in prefill, measured (docs/benchmarks.md)
PREFILL_GROUP = 64  # queries that share a choice
LOOK_LEAST, LOOK_SHARE = 4, 3  # scanned after the first look: this many times the keys to keep, or one unit in so many
MASS_LIMIT = 4  # with a target mass, at most this many times k blocks


def make_sparse(settings: Settings, *, prefill: bool) -> Sparse:
    """The record that the kernels read, for prefill or for decode."""
    k = settings.sparse_k
    from_keys = settings.sparse_min_ctx
    mass = settings.sparse_mass
    if prefill:
        k = settings.sparse_pf_k or k
        least = PREFILL_BREAK_EVEN if settings.sparse_pf_min_ctx is None else settings.sparse_pf_min_ctx
        from_keys, mass = max(from_keys, least), 0.0
    return Sparse(
        score=SPARSE_SCORES.index(settings.sparse_score),
        block=settings.sparse_block,
        k=k,
        most=MASS_LIMIT * k if mass > 0 else k,
        mass=float(mass),
        probe=settings.sparse_probe,
        ratio=float(settings.sparse_ratio),
        group=settings.sparse_pf_group or PREFILL_GROUP,
        from_keys=from_keys,
        look_least=LOOK_LEAST,
        look_share=LOOK_SHARE,
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
