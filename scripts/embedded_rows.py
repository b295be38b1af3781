"""Rows of token ids for the training of the model that comes with qwenc: prose, chats, facts to be found again, lists, copies,
and a few passages to be known by heart."""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from embedded_data import BY_HEART, HELD_OUT_BOOKS, Fact, haystack, make_fact, make_facts, make_name, prose, read_verses, words_of
from embedded_model import CONFIG

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Qwen's own split: contractions, words with the sign before them, single digits, other signs, line ends, spaces.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What a target counts in the loss: an answer, and words that the user's side of a chat or a question is made of. Prose is 1.
ANSWER_WEIGHT, TEMPLATE_WEIGHT = 4.0, 0.2


def train_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE in Qwen's form."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = CONFIG["vocab_size"] - len(SPECIAL)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    return tokenizer


class Data:
    """Rows of token ids with a weight for each as a target."""

    def __init__(self, text: Path | None, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        verses = read_verses(text)
        self.pieces = prose([verse for verse in verses if verse[0] not in HELD_OUT_BOOKS])
        self.held_out = prose([verse for verse in verses if verse[0] in HELD_OUT_BOOKS])
        self.passages = [prose([verse for verse in verses if verse[:2] == chapter]) for chapter in BY_HEART]
        self.words = words_of(self.pieces)
        if not tokenizer_file.exists():
            rng = random.Random(0)
            facts = [make_fact(rng, self.words) for _ in range(3000)]
            train_tokenizer(self.pieces + [f"{fact.sentence} {fact.question}\nuser\nassistant\nsystem\n" for fact in facts]).save(
                str(tokenizer_file)
            )
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.encode = lru_cache(1 << 16)(lambda text: self.tokenizer.encode(text).ids)
        self.end = self.tokenizer.token_to_id("<|endoftext|>")

    def length_of(self, text: str) -> int:
        return len(self.encode(text))

    def batch(self, seed: int, step: int, length: int, rows: int, shares: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [rows, length + 1] and weights float32 [rows, length + 1]."""
        rng = random.Random(f"{seed} {step}")
        ids = torch.full((rows, length + 1), self.end)
        weights = torch.zeros(rows, length + 1)
        makers = (self.prose_row, self.chat_row, self.needle_row, self.list_row, self.copy_row, self.passage_row)
        for row in range(rows):
            at = 0
            for text, weight in rng.choices(makers, shares)[0](rng, length):
                new = self.encode(text)[: length + 1 - at]
                ids[row, at : at + len(new)] = torch.tensor(new)
                weights[row, at : at + len(new)] = weight
                at += len(new)
        return ids, weights

    def prose_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        row: list[tuple[str, float]] = []
        place, used = rng.randrange(len(self.pieces)), 0
        while used <= length:
            piece = self.pieces[place] if row else self.pieces[place].lstrip()
            row.append((piece, 1.0))
            used += self.length_of(piece)
            place = (place + 1) % len(self.pieces)
        return row

    def passage_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """From the beginning of a passage, or from one of its verses, to its end, or in a chat to the end of a verse; then the next one."""
        row, used = [], 0
        while used <= length:
            passage = rng.choice(self.passages)
            first = 0 if rng.random() < 0.5 else rng.randrange(len(passage))
            if rng.random() < 0.4:
                words = "".join(passage[first : first + rng.randint(3, 6)]).strip().split(" ")
                row += self._chat(words, rng.randint(2, 7), "")
            else:
                row += [("".join(passage[first:]).lstrip(), 1.0), ("<|endoftext|>", 0.0)]
            used = sum(self.length_of(text) for text, _ in row)
        return row

    def chat_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """The user gives the first words of some verses, the assistant goes on."""
        row, used = [], 0
        while used <= length:
            place = rng.randrange(len(self.pieces))
            text = self.pieces[place].strip()
            for _ in range(rng.randint(1, 3)):
                place = (place + 1) % len(self.pieces)
                text += self.pieces[place]
            words = text.split(" ")
            cut = rng.randint(2, 9)
            system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" if rng.random() < 0.1 else ""
            row += self._chat(words, cut, system)
            used += sum(self.length_of(text) for text, _ in row[-3:])
        return row

    def _chat(self, words: list[str], cut: int, system: str) -> list[tuple[str, float]]:
        user = f"{system}<|im_start|>user\n{' '.join(words[:cut])}<|im_end|>\n<|im_start|>assistant\n"
        return [(user, TEMPLATE_WEIGHT), (" ".join(words[cut:]), 1.0), ("<|im_end|>\n", 1.0)]

    def needle_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """Prose with facts in it, then questions for them: in a chat, as bare questions, or as sentences to be completed."""
        most = max(3, length // 80)
        facts = make_facts(rng, self.words, min(24, 1 + int(rng.random() ** 1.5 * most)))
        asked = rng.sample(facts, len(facts))
        style = rng.choice(("chat", "chat", "bare", "sentence"))
        tail = [part for fact in asked for part in self._asked(fact, style)]
        if style == "chat":
            head = "<|im_start|>user\n"
            tail = [("\n" + asked[0].question, TEMPLATE_WEIGHT), *tail[1:]]
        else:
            head = ""
        budget = length - self.length_of(head) - sum(self.length_of(text) for text, _ in tail)
        body = haystack(rng, self.pieces, [(rng.random(), fact) for fact in facts], budget, self.length_of)
        row = [(head, 0.0)] if head else []
        for text, fact in body:
            text = text if row else text.lstrip()
            row += (
                [(text, 0.5)]
                if fact is None
                else [((" " if row else "") + fact.lead, TEMPLATE_WEIGHT), (f" {fact.value}", 0.0), (".", 1.0)]
            )
        return row + tail

    def _asked(self, fact: Fact, style: str) -> list[tuple[str, float]]:
        if style == "chat":
            ask = [(f"<|im_start|>user\n{fact.question}", TEMPLATE_WEIGHT), ("<|im_end|>\n<|im_start|>assistant\n", TEMPLATE_WEIGHT)]
            return [*ask, (fact.lead, 1.0), (f" {fact.value}", ANSWER_WEIGHT), (".", 1.0), ("<|im_end|>", 1.0), ("\n", 0.0)]
        if style == "bare":
            return [(f"\nQuestion: {fact.question}\nAnswer:", TEMPLATE_WEIGHT), (f" {fact.value}", ANSWER_WEIGHT)]
        return [("\n" + fact.lead, TEMPLATE_WEIGHT), (f" {fact.value}", ANSWER_WEIGHT), (".", 1.0)]

    def list_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """Lines "name: value", then as many of them again, in another order, as there is room for."""
        pairs: dict[str, str] = {}
        digits = rng.randint(2, 5)
        for _ in range(length // 24):
            name = make_name(rng, self.words)
            value = make_name(rng, self.words) if rng.random() < 0.2 else "".join(rng.choices("0123456789", k=digits))
            pairs.setdefault(name, value)
        row = [part for name, value in pairs.items() for part in ((f"{name}:", 0.0), (f" {value}", 0.0), ("\n", 0.0))]
        for name in rng.sample(list(pairs), len(pairs)):
            row += [(f"{name}:", 0.0), (f" {pairs[name]}", ANSWER_WEIGHT), ("\n", 1.0)]
        return row

    def copy_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """Some words, then the same again, over and over."""
        row, used = [], 0
        while used <= length:
            part = "".join(" " + make_name(rng, self.words) for _ in range(rng.randint(4, max(5, length // 12))))
            row += [(part.strip(), 0.0), ("\n" + part.strip(), 1.0), ("\n\n", 1.0)]
            used += sum(self.length_of(text) for text, _ in row[-3:])
        return row
