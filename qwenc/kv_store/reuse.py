"""Prefill that computes only what nobody has computed before: the longest beginning of a prompt that is saved somewhere is copied."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwenc.kv_store.arrays import common_prefix, usable
from qwenc.kv_store.saved import Damaged
from qwenc.kv_store.stores import PromptFile, PromptFolder
from qwenc.report import Reporter
from qwenc.settings import Settings

if TYPE_CHECKING:
    from qwenc.session import Session


class Reuse:
    """Prefills sessions out of stores and of other sessions. identity() tells what the bits of a prompt depend on."""

    def __init__(self, settings: Settings, identity: Any, reporter: Reporter) -> None:
        self._reporter = reporter
        self._stores: list[PromptFile | PromptFolder] = []
        if settings.prompt_cache:
            self._stores.append(PromptFile(Path(settings.prompt_cache), identity(), reporter.note))
        if settings.disk_kv:
            limit = int(settings.disk_kv_gb * 1e9)
            self._stores.append(PromptFolder(Path(settings.disk_kv), limit, identity(), reporter.note))

    def prefill(self, session: Session, ids: list[int], beside: Iterable[Session] = ()) -> np.ndarray:
        """Session.prefill for an empty session, with the same logits. beside: sessions whose prompts may begin alike."""
        wanted = np.array(ids, np.int64)
        done = self._copy(session, wanted, beside)
        loaded = self._load(session, wanted, done)
        done = 0 if loaded < 0 else max(done, loaded)
        logits = session.prefill(ids[done:])
        for store in self._stores:
            store.keep(wanted, session.cache, len(ids) - done)
        return logits

    def _copy(self, session: Session, ids: np.ndarray, beside: Iterable[Session]) -> int:
        """Takes the longest beginning out of memory. Returns its length."""
        best, most = None, 0
        for other in beside:
            tokens = usable(common_prefix(other.prompt, ids), other.prompt_end, len(ids), session.grain)
            if tokens > most:
                best, most = other, tokens
        if best is not None:
            session.restore(best, most)
        return most

    def _load(self, session: Session, ids: np.ndarray, done: int) -> int:
        """Takes a longer beginning than `done` out of a store. Returns its length; 0 if there is none, −1 if the session is left empty by
        one that was damaged."""
        for store in self._stores:
            saved = store.find(ids)
            if saved is None:
                continue
            with saved:
                held = len(saved.ids) if session.grain_at_end else -1
                tokens = usable(common_prefix(saved.ids, ids), held, len(ids), session.grain)
                if tokens <= done:
                    continue
                try:
                    session.restore(saved, tokens)
                except Damaged as error:
                    self._reporter.note(f"{error}; the prompt is computed")
                    store.drop(saved)
                    session.truncate(0)
                    return -1
                self._reporter.detail(f"{tokens} of {len(ids)} prompt tokens from {saved.path}")
                return tokens
        return 0
