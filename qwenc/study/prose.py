"""A long English text out of nothing: sentences about invented places, the same on every machine, never quite the same twice."""

from __future__ import annotations

import random
from collections.abc import Iterator

# fmt: off
PEOPLE = (
    "Ada", "Bruno", "Clara", "Dimitri", "Edith", "Farid", "Greta", "Henrik", "Irena", "Jonas", "Katya", "Leopold", "Mira", "Nikolai",
    "Olga", "Pavel", "Rosa", "Stefan", "Tilda", "Viktor",
)
PLACES = (
    "Aldermoor", "Brackwater", "Castleford", "Dunmere", "Elmstead", "Farrow", "Greyhaven", "Holloway", "Ironbridge", "Kettering",
    "Larkfield", "Millbrook",
)
THINGS = (
    "the old mill", "the harbour wall", "a stone bridge", "the market square", "the village school", "a narrow lane",
    "the railway station", "a walled garden", "the ferry house", "the north tower", "a row of lime trees", "the public library",
)
DEEDS = (
    "repaired", "painted", "measured", "described", "bought", "sold", "visited", "drew", "photographed", "abandoned", "inherited",
    "rebuilt",
)
REASONS = (
    "because the winter had been long", "although nobody had asked for it", "before the first snow fell",
    "while the council was still debating", "so that the children could pass safely", "after three years of patient work",
    "since the river had changed its course", "when the letters stopped coming", "in spite of the weather",
    "for the sake of an old promise",
)
OPENINGS = (
    "In the spring of {year}", "By {year}", "Late in {year}", "Some time before {year}", "In {year}",
)
# fmt: on
ASIDES = (
    "It was said that {person} had never seen anything like it.",
    "{person} kept a record of the costs, which came to {count} crowns in all.",
    "The people of {place} still tell the story in {count} different ways.",
    "A traveller from {place} wrote {count} pages about it, and {person} read every one of them.",
    "Nothing of this is mentioned in the archives of {place}, where {count} boxes remain unopened.",
    "For {count} days the road to {place} was closed, and {person} walked instead.",
)


def paragraphs(seed: int = 0) -> Iterator[str]:
    """Paragraphs without end."""
    draw = random.Random(seed).random  # the one method whose sequence Python promises to keep

    def pick(choices: tuple[str, ...]) -> str:
        return choices[int(draw() * len(choices))]

    def words() -> dict[str, object]:
        return {"year": 1700 + int(draw() * 220), "person": pick(PEOPLE), "place": pick(PLACES), "count": 3 + int(draw() * 900)}

    while True:
        sentences = []
        for _ in range(3 + int(draw() * 4)):
            opening, deed = pick(OPENINGS).format(**words()), pick(DEEDS)
            sentences.append(f"{opening} {pick(PEOPLE)} {deed} {pick(THINGS)} of {pick(PLACES)} {pick(REASONS)}.")
            if draw() < 0.6:
                sentences.append(pick(ASIDES).format(**words()))
        yield " ".join(sentences)


def long_text(characters: int, seed: int = 0) -> str:
    """At least `characters` characters of it, in whole paragraphs."""
    parts: list[str] = []
    length = 0
    for paragraph in paragraphs(seed):
        parts.append(paragraph)
        length += len(paragraph) + 2
        if length >= characters:
            return "\n\n".join(parts)
    raise AssertionError("paragraphs never end")
