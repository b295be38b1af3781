"""The token ids that a study runs on: the same for every arm."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from qwenc.errors import UsageError
from qwenc.study.prose import long_text

CHARACTERS_PER_TOKEN = 8  # more than any tokenizer of ours packs into one on average: one try suffices nearly always


@dataclass(frozen=True, slots=True)
class Text:
    """ids: tokens of the text; source: where they come from, for people."""

    ids: tuple[int, ...]
    source: str

    @property
    def digest(self) -> str:
        return hashlib.sha256(np.asarray(self.ids, np.int64).tobytes()).hexdigest()[:16]


def text_ids(engine: Any, tokens: int, text: str | None = None, name: str = "") -> Text:
    """The first `tokens` tokens of `text` (called `name`), of a built-in text where that is None, of random ids for a model without a
    tokenizer. Raises UsageError for a text that is too short."""
    if engine.tokenizer is None:
        if text is not None:
            raise UsageError("this checkpoint has no tokenizer, so it cannot read a text: leave -f away for random tokens")
        ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, tokens).tolist()
        return Text(tuple(ids), "random tokens")
    if text is None:
        return Text(tuple(_built_in(engine, tokens)), "built-in text")
    ids = engine.encode_prompt(text, raw=True)
    if len(ids) < tokens:
        raise UsageError(f"{name or 'the text'} has {len(ids)} tokens, {tokens} are needed")
    return Text(tuple(ids[:tokens]), name or "text")


def _built_in(engine: Any, tokens: int) -> list[int]:
    characters = CHARACTERS_PER_TOKEN * tokens
    while True:
        ids = engine.encode_prompt(long_text(characters), raw=True)
        if len(ids) >= tokens:
            return ids[:tokens]
        characters *= 2
