"""Several completions at a time on one model, each in a lane of its own: what `qwenc batch` is driven by."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

import numpy as np

from qwenc.errors import QwencError
from qwenc.generation import Generation, Step
from qwenc.machine.memory import available_bytes
from qwenc.session import Session, step_together

if TYPE_CHECKING:
    from qwenc.engine import Engine


KEPT = 4  # ended completions whose prompts are remembered
MOST = 8  # completions at a time unless the caller says otherwise: more gain little
SHARE = 0.5  # of the memory that is free at the start, for keys and values


class Lane:
    """One completion at work. key: the caller's name for it; token: the last one picked, which the next step feeds."""

    def __init__(self, key: Any, generation: Generation, session: Session) -> None:
        self.key, self.generation, self.session = key, generation, session
        self.token = 0


class Lanes:
    """`start` completions while one is `free`, `step` them together until each has ended.

    A completion has the same tokens whoever is beside it. Where several step together, each is charged its share of the time. Prompts that
    begin alike are computed once, from there on.
    """

    def __init__(self, engine: Engine, count: int | None = None) -> None:
        """count: most completions at a time. None: MOST, or 1 where they cannot share steps."""
        self._engine = engine
        free = available_bytes()
        self._budget = None if free is None else SHARE * free
        self._lanes: list[Lane] = []
        self._kept: list[Session] = []  # of completions that have ended, the last one last: the next prompts may begin as theirs did
        self._first = engine.session(1)  # its buffers serve all
        self.count = count or (MOST if self._first.can_share else 1)
        self._together = self._first.together(self.count)
        engine.compile(self._first)
        if self._together is not None:
            self._together.compile(engine.reporter)

    @property
    def working(self) -> int:
        """Completions at work."""
        return len(self._lanes)

    @property
    def free(self) -> int:
        """Completions that can be started now."""
        return self.count - len(self._lanes)

    def fits(self, tokens: int) -> bool:
        """Whether there is memory for another completion of so many tokens of prompt and answer. Always, when there is no other one."""
        if self._budget is None or not self._lanes:
            return True
        each = self._engine.bytes_per_token
        room = self._budget - each * (min(tokens, self._engine.context_size) + sum(lane.session.capacity for lane in self._lanes))
        while self._kept and sum(session.capacity for session in self._kept) * each > room:
            self._kept.pop(0)
        return room >= 0

    def start(self, key: Any, prompt: Ids[int], **arguments: Any) -> Step:
        """Prefill the token ids `prompt` and pick a token. arguments: of Engine.prepare. A QwencError concerns this prompt alone."""
        generation = self._engine.prepare(prompt, **arguments)
        session = self._engine.session(len(generation.ids) + generation.room, beside=self._first)
        lane = Lane(key, generation, session)
        beside = [*self._kept, *(other.session for other in self._lanes)]
        step = self._take(lane, self._engine.prefill(session, generation.ids, beside))
        self._go_on(lane, step)
        return step

    def step(self) -> list[tuple[Any, Step | QwencError]]:
        """One token more for every completion at work: (key, step), or (key, error) of one that failed and is over."""
        lanes, self._lanes = self._lanes, []
        found = step_together(self._together, [lane.session for lane in lanes], [lane.token for lane in lanes])
        taken: list[tuple[Any, Step | QwencError]] = []
        for lane, logits in zip(lanes, found, strict=True):
            try:
                if isinstance(logits, QwencError):
                    raise logits
                step = self._take(lane, logits)
                self._go_on(lane, step)
                taken.append((lane.key, step))
            except QwencError as error:
                taken.append((lane.key, error))
        return taken

    def _go_on(self, lane: Lane, step: Step) -> None:
        if step.finish_reason:
            self._kept = [*self._kept, lane.session][-KEPT:]
        else:
            self._lanes.append(lane)

    def _take(self, lane: Lane, logits: np.ndarray) -> Step:
        step = lane.generation.take(logits, lane.session.timings)
        if step.id is not None:
            lane.token = step.id
        return step
