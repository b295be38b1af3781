"""One measurement: a prefill of n tokens, then decode steps on the tokens that follow in the text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwenc.machine.memory import peak_rss_bytes, reset_peak
from qwenc.settings import Settings
from qwenc.timing import PrefillTiming, Timings

WARM_TOKENS, WARM_STEPS = 64, 2


@dataclass(frozen=True, slots=True)
class Decoded:
    """attn_ms, total_ms: medians over the decoded tokens. kv_bytes after the last one; rss_bytes: peak of the process meanwhile. cores: CPU
    seconds per second; far fewer than there are threads means that something else ran."""

    tokens: int
    attn_ms: float
    total_ms: float
    kv_bytes: int
    rss_bytes: int | None
    cores: float


@dataclass(frozen=True, slots=True)
class Filled:
    """A session with n tokens in it, the point after them, and what the prefill took."""

    session: Any
    mark: Any
    timing: PrefillTiming


def warm_up(engine: Any, settings: Settings, ids: Sequence[int]) -> None:
    """Compile what `settings` need and touch the weights, so that no measurement pays for it."""
    few = list(ids[: WARM_TOKENS + WARM_STEPS])
    session = engine.session(len(few), settings=settings)
    session.compile()
    if len(few) > WARM_STEPS:
        session.prefill(few[:-WARM_STEPS])
    for token in few[-WARM_STEPS:]:
        session.step(token)


def fill(engine: Any, settings: Settings, ids: Sequence[int], room: int) -> Filled:
    """Prefill `ids` in a new session with room for `room` more tokens."""
    reset_peak()
    session = engine.session(len(ids) + room, settings=settings)
    session.timings = Timings()
    session.prefill(list(ids))
    return Filled(session, session.mark(), session.timings.prefill)


def share(engine: Any, settings: Settings, filled: Filled, room: int, *, watch: bool = False) -> Filled:
    """A session with other decode settings on the prefill that `filled` has done."""
    reset_peak()
    session = engine.session(filled.mark.length + room, settings=settings, watch=watch)
    session.take_over(filled.session, filled.mark)
    return Filled(session, filled.mark, filled.timing)


def decode(filled: Filled, following: Sequence[int], keep: bool, seen: list | None = None) -> tuple[Decoded, np.ndarray | None]:
    """Decode `following` (at least one token) after the prefill. With `keep` also the logits float32 [n, vocab] after each of them. `seen`
    is given what a watched session tells of every step."""
    session = filled.session
    session.timings = Timings()
    attn, total, rows = [], [], []
    cpu, wall = time.process_time(), time.perf_counter()
    for token in following:
        logits = session.step(token)
        attn.append(session.last.ms["attn"])
        total.append(session.last.total_ms)
        if keep:
            rows.append(logits.copy())
        if seen is not None:
            seen.append(session.watched())
    cores = (time.process_time() - cpu) / max(time.perf_counter() - wall, 1e-9)
    result = Decoded(len(attn), statistics.median(attn), statistics.median(total), session.kv_bytes(), peak_rss_bytes(), cores)
    return result, np.stack(rows) if keep else None
