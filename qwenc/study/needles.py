"""Needles: one fact in a long text, asked for at the end. By depth of the fact and length of the text."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from qwenc.errors import UsageError
from qwenc.report import Reporter
from qwenc.study.arms import Arm, prefill_key
from qwenc.study.measure import Filled, fill, share
from qwenc.study.progress import Inner
from qwenc.study.prose import PLACES
from qwenc.study.quality import exact_prefill
from qwenc.study.sweep import OneEngine, grouped
from qwenc.study.texts import text_ids

NEEDLE = " The secret number of {place} is {number}."
QUESTION = "\nThe secret number of {place} is"
ANSWER_TOKENS = 10


@dataclass(frozen=True, slots=True)
class Plan:
    """arms: the first has exact attention. lengths: tokens of text and needle; depths: 0 (the beginning) to 1; tries: needles per cell;
    method: `decode` (the text read by exact attention, question and answer under the setting) or `all`."""

    arms: Sequence[Arm]
    lengths: Sequence[int]
    depths: Sequence[float]
    tries: int
    method: str
    text: str | None = None
    text_name: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """found[depth][length]: needles found, of plan.tries; None where it was not tried."""

    arm: str
    found: tuple[tuple[int | None, ...], ...]
    kept: int  # of the needles that exact attention finds, those that this arm finds
    exact: int  # needles that exact attention finds

    @property
    def total(self) -> int:
        return sum(cell for row in self.found for cell in row if cell is not None)


@dataclass(slots=True)
class Needles:
    """Runs a plan; `grids` says what is known, also after it was cut short."""

    plan: Plan
    open_engine: Callable[[Any, Reporter], Any]
    reporter: Reporter
    hits: dict[tuple[Arm, int, float, int], bool] = field(default_factory=dict)
    source: str = ""
    _done: float = 0

    def run(self) -> None:
        engines = OneEngine(self.open_engine, Inner(self.reporter, self._tell))
        haystack: Sequence[int] = ()
        try:
            for arms in grouped(self.plan.arms, lambda arm: arm.engine_key):
                engine = engines.get(arms[0])
                if not haystack:
                    haystack = self._begin(engine)
                for length in self.plan.lengths:
                    for depth in self.plan.depths:
                        for number in range(self.plan.tries):
                            self._cell(engine, arms, haystack, length, depth, number)
        finally:
            engines.close()
            self.reporter.progress("needles", 1, 1)

    def grids(self) -> list[Grid]:
        plan = self.plan
        found = []
        for arm in plan.arms:
            cells = tuple(tuple(self._count(arm, length, depth) for length in plan.lengths) for depth in plan.depths)
            if all(cell is None for row in cells for cell in row):
                continue
            tried = [place for place in self.hits if place[0] == arm and (plan.arms[0], place[1], place[2], place[3]) in self.hits]
            right = [place for place in tried if self.hits[plan.arms[0], place[1], place[2], place[3]]]
            found.append(Grid(arm.label, cells, sum(self.hits[place] for place in right), len(right)))
        return found

    def _count(self, arm: Arm, length: int, depth: float) -> int | None:
        tried = [self.hits.get((arm, length, depth, number)) for number in range(self.plan.tries)]
        known = [hit for hit in tried if hit is not None]
        return sum(known) if known else None

    def _begin(self, engine: Any) -> Sequence[int]:
        if engine.tokenizer is None:
            raise UsageError("this checkpoint has no tokenizer, so nothing can be asked of it")
        longest = max(self.plan.lengths) + 100  # the question and the answer
        if longest > engine.context_size:
            raise UsageError(
                f"{max(self.plan.lengths)} tokens with a question need a context of {longest}, "
                f"this model has {engine.context_size} (--ctx-size)"
            )
        text = text_ids(engine, max(self.plan.lengths), self.plan.text, self.plan.text_name)
        self.source = text.source
        return text.ids

    def _cell(self, engine: Any, arms: Sequence[Arm], haystack: Sequence[int], length: int, depth: float, number: int) -> None:
        place, secret = needle_of(length, depth, number)
        needle = engine.tokenizer.encode(NEEDLE.format(place=place, number=secret), special=False)
        question = engine.tokenizer.encode(QUESTION.format(place=place), special=False)
        context = hide(haystack, needle, length, depth)
        filled: dict[tuple, Filled] = {}
        for arm in arms:
            settings = exact_prefill(arm.settings) if self.plan.method == "decode" else arm.settings
            key = prefill_key(settings, length)
            room = len(question) + ANSWER_TOKENS
            if key not in filled:
                filled[key] = fill(engine, settings, context, room)
            answer = ask(engine, share(engine, arm.settings, filled[key], room), question)
            self.hits[arm, length, depth, number] = secret in answer
            self._done += length
            self._tell(0)

    def _tell(self, more: float) -> None:
        plan = self.plan
        total = len(plan.arms) * len(plan.depths) * plan.tries * sum(plan.lengths)
        self.reporter.progress("needles", min(self._done + more, total - 1), total, "tokens")


def needle_of(length: int, depth: float, number: int) -> tuple[str, str]:
    """(place, five digits) of one needle: the same for every arm and on every machine."""
    draw = random.Random(f"{length} {depth} {number}").random
    return PLACES[int(draw() * len(PLACES))], str(10000 + int(draw() * 90000))


def hide(haystack: Sequence[int], needle: Sequence[int], length: int, depth: float) -> list[int]:
    """`length` tokens of the haystack with the needle in it, at `depth` of the way."""
    if len(needle) >= length:
        raise UsageError(f"{length} tokens are too few to hide {len(needle)} in")
    straw = list(haystack[: length - len(needle)])
    place = max(1, round(depth * len(straw)))  # after a token that begins every text, if there is one
    return [*straw[:place], *needle, *straw[place:]]


def ask(engine: Any, ready: Filled, question: Sequence[int]) -> str:
    """The answer to the question, decoded token by token, greedily."""
    for token in question:
        logits = ready.session.step(token)
    answer: list[int] = []
    for place in range(ANSWER_TOKENS):
        answer.append(int(logits.argmax()))
        if answer[-1] in engine.eos_ids or place == ANSWER_TOKENS - 1:
            break
        logits = ready.session.step(answer[-1])
    return engine.tokenizer.decode(answer)
