"""Logits in, token id out: a few pure filters, composed.

Order, as in transformers: repeat penalty, temperature, top-k, top-p, min-p, draw. (A temperature keeps the order of logits, so top-k
runs before it and leaves it less to do.) Where logits tie, the lower id wins, so every filter keeps exactly as many as it says.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwenc.errors import QwencError, UsageError

GREEDY_BELOW = 1e-5  # a smaller temperature is argmax


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose a token. Raises UsageError for a value out of range.

    temp: 0 is greedy. top_k: 0 is off. top_p: 1 is off, 0 keeps one token. min_p: least share of the best token's probability, 0 is
    off. repeat_penalty: divides the positive and multiplies the negative logits of tokens seen before; 1 is off. seed: None draws afresh.
    """

    temp: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    seed: int | None = None

    def __post_init__(self) -> None:
        _check("temp", self.temp, "at least 0", lambda value: value >= 0)
        _check("top_k", self.top_k, "a whole number of at least 0", lambda value: value >= 0, int)
        _check("top_p", self.top_p, "between 0 and 1", lambda value: 0 <= value <= 1)
        _check("min_p", self.min_p, "between 0 and 1", lambda value: 0 <= value <= 1)
        _check("repeat_penalty", self.repeat_penalty, "above 0", lambda value: value > 0)
        if self.seed is not None:
            _check("seed", self.seed, "a whole number from 0 to 2^64-1", lambda value: 0 <= value < 1 << 64, int)


class Sampler:
    """Picks token ids below `vocab_limit` (the tokenizer's size; None = all rows of the logits). The same seed picks the same tokens."""

    def __init__(self, params: SamplingParams, vocab_limit: int | None = None) -> None:
        self.params = params
        self._limit = vocab_limit
        self._random = np.random.Generator(np.random.PCG64(params.seed))

    def pick(self, logits: np.ndarray, history: Iterable[int] = ()) -> int:
        """The next id from logits, float32 [vocab], which stay as they are. `history`: all ids so far, for the repeat penalty."""
        params = self.params
        logits = penalise(logits[: self._limit], history, params.repeat_penalty)
        best = int(logits.argmax())  # NaN, if there is one
        if not math.isfinite(logits[best]):
            raise QwencError("the model's logits are not finite")
        if params.temp < GREEDY_BELOW:
            return best
        ids = keep_top_k(logits, params.top_k)
        probs = probabilities(logits[ids], params.temp)
        kept = keep_top_p(probs, params.top_p)
        ids, probs = ids[kept], probs[kept]
        kept = keep_min_p(probs, params.min_p)
        ids, probs = ids[kept], probs[kept]
        return int(ids[draw(probs, self._random.random())])


def penalise(logits: np.ndarray, history: Iterable[int], penalty: float) -> np.ndarray:
    """Logits [n] with those of the ids in `history` made less likely (penalty > 1) or more (< 1); a copy unless the penalty is 1."""
    if penalty == 1.0:
        return logits
    seen = np.unique(np.fromiter(history, dtype=np.int64))
    seen = seen[(seen >= 0) & (seen < len(logits))]
    values = logits[seen].astype(np.float64)
    largest = float(np.finfo(np.float32).max)  # a tiny penalty must not make an infinite logit
    out = logits.copy()
    with np.errstate(over="ignore"):
        out[seen] = np.clip(np.where(values > 0, values / penalty, values * penalty), -largest, largest)
    return out


def keep_top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices, ascending, of the k largest of scores [n]; all of them if k is 0 or more than n."""
    n = len(scores)
    if k <= 0 or k >= n:
        return np.arange(n)
    least = np.partition(scores, n - k)[n - k]
    above = np.flatnonzero(scores > least)
    ties = np.flatnonzero(scores == least)[: k - len(above)]
    return np.sort(np.concatenate((above, ties)))


def probabilities(logits: np.ndarray, temp: float) -> np.ndarray:
    """softmax(logits / temp), float64 [n]. The maximum is taken off first, so that no temperature overflows."""
    shifted = logits.astype(np.float64) - float(logits.max())
    with np.errstate(over="ignore"):
        weights = np.exp(shifted / temp)
    return weights / weights.sum()


def keep_top_p(probs: np.ndarray, p: float) -> np.ndarray:
    """Indices, ascending, of the fewest most probable entries of probs [n] whose sum reaches p; at least one."""
    n = len(probs)
    if p >= 1.0:
        return np.arange(n)
    count = 256  # sorting a whole vocabulary is slow, and the answer is nearly always in its head
    while True:
        head = keep_top_k(probs, count)
        head = head[np.argsort(-probs[head], kind="stable")]
        reached = np.cumsum(probs[head])
        if reached[-1] >= p or count >= n:
            return np.sort(head[: int(np.searchsorted(reached, p)) + 1])
        count *= 8


def keep_min_p(probs: np.ndarray, min_p: float) -> np.ndarray:
    """Indices of the entries of probs [n] with at least min_p times the largest."""
    return np.flatnonzero(probs >= min_p * probs.max())


def draw(weights: np.ndarray, uniform: float) -> int:
    """The index where the running sum of weights [n] passes the share `uniform` (0 ≤ uniform < 1) of the whole; never one of weight 0."""
    running = np.cumsum(weights)
    mark = min(uniform * running[-1], np.nextafter(running[-1], 0.0))
    return int(np.searchsorted(running, mark, side="right"))


def _check(name: str, value: Any, range_text: str, holds: Callable[[Any], bool], kind: type | tuple[type, ...] = (int, float)) -> None:
    right_kind = isinstance(value, kind) and not isinstance(value, bool)
    if not right_kind or not holds(value) or (isinstance(value, float) and not math.isfinite(value)):
        raise UsageError(f"{name} must be {range_text}, not {value!r}")
