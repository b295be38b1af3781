"""The texts that the built-in model learns from and is judged by: the King James Bible, and questions about it that have one right answer.

Everything is text here: what a token is, is the caller's business (`length_of`). The held-out books, and the held-out names (one in ten,
by a hash), never occur in training.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_BOOKS = ("Ruth", "Jonah", "Phi", "Jas", "1Jn")  # as `bible` abbreviates them: 3 % of the text, of several kinds
# What it is to know by heart: a model of this size can learn some pages word for word, and then its greedy text reads as prose.
BY_HEART = (
    ("Ge", "1"),
    ("Psa", "1"),
    ("Psa", "23"),
    ("Eccl", "3"),
    ("Isa", "40"),
    ("Mat", "5"),
    ("Luke", "2"),
    ("John", "3"),
    ("1Cor", "13"),
)
RANGE = "Gen1:1-Rev22:21"
ISSUE_SHARE = 0.6  # of the questions are about a secret number

# (what is asked for, made by): "The secret number of Ezra is 48213."
RELATIONS = (("secret number", 5), ("secret code", 4), ("age", 3), ("price", 3), ("number", 4), ("phone number", 7))
SYLLABLES = re.findall("..", "babebodadofafegagohahejokakilalelomamimonaninopaperarirosasetatetovaviwayazazo")
ENDINGS = [*"nrlstm", "nd", "x", "k", "th", *[""] * 6]


@dataclass(frozen=True)
class Fact:
    """What a text states and a question asks: "The {relation} of {name} is {value}."."""

    relation: str
    name: str
    value: str

    @property
    def lead(self) -> str:
        return f"The {self.relation} of {self.name} is"

    @property
    def sentence(self) -> str:
        return f"{self.lead} {self.value}."

    @property
    def question(self) -> str:
        return f"What is the {self.relation} of {self.name}?"


# -- the prose


def read_verses(path: Path | None) -> list[tuple[str, str, str]]:
    """(book, chapter, text) of every verse, from a file of lines "Ge1:1 In the …" or, without one, from Debian's `bible`.

    Raises OSError or subprocess.CalledProcessError.
    """
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
    elif shutil.which("bible"):
        lines = _run(["bible", "-f", RANGE]).splitlines()
    else:
        with tempfile.TemporaryDirectory() as folder:
            lines = _from_debian(Path(folder)).splitlines()
    found = [re.match(r"(\d?[A-Za-z]+)(\d+):\d+ (.+)", line) for line in lines]
    return [(match[1], match[2], match[3].strip()) for match in found if match]


def _from_debian(folder: Path) -> str:
    """The text out of the packages bible-kjv (the reader) and bible-kjv-text, unpacked but not installed."""
    environment = os.environ | {"HOME": str(folder)}
    subprocess.run(
        ["apt-get", "download", "bible-kjv", "bible-kjv-text"], cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL
    )
    for package in folder.glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package.name, "."], cwd=folder, check=True)
    return _run([str(folder / "usr/bin/bible"), "-p", str(folder / "usr/lib"), "-f", RANGE])


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def prose(verses: Sequence[tuple[str, str, str]]) -> list[str]:
    """The verses as pieces that can be joined: a space before each, a line end before each that begins a chapter."""
    pieces, place = [], None
    for book, chapter, text in verses:
        pieces.append(("\n" if place != (book, chapter) else " ") + text)
        place = (book, chapter)
    return pieces


def words_of(pieces: Sequence[str]) -> list[str]:
    """The words that names are taken from, lower case."""
    words = {word.lower() for piece in pieces for word in re.findall("[A-Za-z]+", piece)}
    return sorted(word for word in words if 3 <= len(word) <= 10)


# -- the questions


def make_name(rng: random.Random, words: Sequence[str], held_out: bool = False) -> str:
    """A word of the prose or, four times in ten, an invented one, often capitalised; from the held-out tenth or from the rest."""
    while True:
        if rng.random() < 0.6:
            name = rng.choice(words)
        else:
            name = "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 3))) + rng.choice(ENDINGS)
        name = name.capitalize() if rng.random() < 0.7 else name
        if len(name) > 2 and (zlib.crc32(name.lower().encode()) % 10 == 0) == held_out:
            return name


def make_fact(rng: random.Random, words: Sequence[str], held_out: bool = False) -> Fact:
    relation, digits = RELATIONS[0] if rng.random() < ISSUE_SHARE else rng.choice(RELATIONS)
    if rng.random() < 0.3:
        digits = rng.randint(2, 7)
    return Fact(relation, make_name(rng, words, held_out), "".join(rng.choices("0123456789", k=digits)))


def make_facts(rng: random.Random, words: Sequence[str], count: int) -> list[Fact]:
    """`count` facts with different names, so that no two answer one question."""
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = make_fact(rng, words)
        facts.setdefault(fact.name.lower(), fact)
    return list(facts.values())


def haystack(
    rng: random.Random, pieces: Sequence[str], facts: Sequence[tuple[float, Fact]], budget: int, length_of: Callable[[str], int]
) -> list[tuple[str, Fact | None]]:
    """At most `budget` tokens of consecutive prose with each fact's sentence at its depth (0…1 of the tokens), as (text, fact or None)."""
    room = budget - sum(length_of(" " + fact.sentence) for _, fact in facts)
    chosen: list[tuple[str, Fact | None]] = []
    ends: list[int] = []  # tokens up to the end of each
    place, used = rng.randrange(len(pieces)), 0
    while (step := length_of(pieces[place])) + used <= room:
        used += step
        chosen.append((pieces[place], None))
        ends.append(used)
        place = (place + 1) % len(pieces)
    for depth, fact in sorted(facts, key=lambda item: -item[0]):
        at = sum(end <= depth * used for end in ends)
        chosen.insert(at, (" " + fact.sentence, fact))
    return chosen


def needle_prompt(
    rng: random.Random, pieces: Sequence[str], words: Sequence[str], depth: float, tokens: int, length_of
) -> tuple[str, Fact]:
    """A user's turn of about `tokens` tokens: prose with one sentence of a held-out name in it, and the question for its number."""
    fact = Fact("secret number", make_name(rng, words, held_out=True), "".join(rng.choices("0123456789", k=5)))
    ask = "\n" + fact.question
    body = haystack(rng, pieces, [(depth, fact)], tokens - length_of(ask), length_of)
    return "".join(text for text, _ in body).lstrip() + ask, fact
