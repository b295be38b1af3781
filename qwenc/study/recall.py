"""How much of the attention the chosen blocks hold, beside the most that as many blocks could hold."""

from __future__ import annotations

import numpy as np


def recall(chosen: np.ndarray, mass: np.ndarray) -> tuple[float, float]:
    """(mass that the chosen blocks hold, mass that the best blocks of the same number hold), means over layers and kv heads, 0 to 1.

    chosen bool [layers, kv_heads, blocks]; mass float32 of the same shape: share of the attention that each block holds, summing to 1.
    """
    counts = chosen.sum(axis=-1)
    held = np.where(chosen, mass, 0.0).sum(axis=-1)
    best_first = -np.sort(-mass, axis=-1)
    reach = np.concatenate([np.zeros((*best_first.shape[:-1], 1)), np.cumsum(best_first, axis=-1)], axis=-1)
    most = np.take_along_axis(reach, counts[..., None], axis=-1)[..., 0]
    return float(held.mean()), float(most.mean())
