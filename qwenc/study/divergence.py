"""How far one model's predictions are from another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

AT_ONCE = 16  # rows of logits in float64 at a time: a vocabulary of 150,000 takes 1.2 MB each


@dataclass(frozen=True, slots=True)
class Divergence:
    """Per position: kl, KL(reference ‖ other) in nats; same_top, whether both have the same likeliest token; nll and reference_nll, −ln of
    the probability of the token that the text has. All of shape [n]."""

    kl: np.ndarray
    same_top: np.ndarray
    nll: np.ndarray
    reference_nll: np.ndarray


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """ln softmax, row by row, in float64. [n, vocab] → [n, vocab]."""
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def diverge(reference: np.ndarray, other: np.ndarray, following: Sequence[int]) -> Divergence:
    """Compare two arrays of logits [n, vocab] position by position; following [n]: the token that comes after each position."""
    parts: list[tuple[np.ndarray, ...]] = []
    targets = np.asarray(following, np.int64)
    for first in range(0, len(reference), AT_ONCE):
        wanted, got = log_probabilities(reference[first : first + AT_ONCE]), log_probabilities(other[first : first + AT_ONCE])
        rows, ids = np.arange(len(wanted)), targets[first : first + AT_ONCE]
        kl = np.maximum((np.exp(wanted) * (wanted - got)).sum(axis=1), 0.0)  # rounding may leave it just below
        parts.append((kl, wanted.argmax(axis=1) == got.argmax(axis=1), -got[rows, ids], -wanted[rows, ids]))
    return Divergence(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def negative_log_likelihood(logits: np.ndarray, following: Sequence[int]) -> np.ndarray:
    """−ln of the probability of each following token. [n, vocab], [n] → [n]."""
    targets = np.asarray(following, np.int64)
    parts = []
    for first in range(0, len(logits), AT_ONCE):
        rows = log_probabilities(logits[first : first + AT_ONCE])
        parts.append(-rows[np.arange(len(rows)), targets[first : first + AT_ONCE]])
    return np.concatenate(parts)
