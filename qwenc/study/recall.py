"""How much of the attention the chosen blocks hold, beside the most that as many blocks could hold."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Choice(NamedTuple):
    """What sparse attention did for one token. chosen bool [layers, kv_heads, blocks]; mass float [layers, kv_heads, blocks]: share of the
    attention that each block holds when all keys are seen, summing to 1."""

    chosen: np.ndarray
    mass: np.ndarray


def recall(choice: Choice) -> tuple[float, float]:
    """(mass that the chosen blocks hold, mass that the best blocks of the same number hold), means over layers and kv heads, 0 to 1."""
    counts = choice.chosen.sum(axis=-1)
    held = np.where(choice.chosen, choice.mass, 0.0).sum(axis=-1)
    best_first = -np.sort(-choice.mass, axis=-1)
    reach = np.concatenate([np.zeros((*best_first.shape[:-1], 1)), np.cumsum(best_first, axis=-1)], axis=-1)
    most = np.take_along_axis(reach, counts[..., None], axis=-1)[..., 0]
    return float(held.mean()), float(most.mean())
