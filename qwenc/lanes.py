"""Several completions at a time on one model, each in a lane of its own: what `qwenc batch` is driven by."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

import numpy as np

from qwenc.errors import QwencError
from qwenc.generation import Generation, Step
from qwenc.session import Session, step_together

if TYPE_CHECKING:
    from qwenc.engine import Engine


class Lane:
    """One completion at work. key: the caller's name for it; token: the last one picked, which the next step feeds."""

    def __init__(self, key: Any, generation: Generation, session: Session) -> None:
        self.key, self.generation, self.session = key, generation, session
        self.token = 0


class Lanes:
    """`start` completions while one is `free`, `step` them together until each has ended.

    A completion has the same tokens whoever is beside it. Where several step together, each is charged its share of the time.
    """

    def __init__(self, engine: Engine, count: int) -> None:
        self.count = count
        self._engine = engine
        self._lanes: list[Lane] = []
        self._first = engine.session(1)  # its buffers serve all
        self._together = self._first.together(count)
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

    def start(self, key: Any, prompt: Ids[int], **arguments: Any) -> Step:
        """Prefill the token ids `prompt` and pick a token. arguments: of Engine.prepare. A QwencError concerns this prompt alone."""
        generation = self._engine.prepare(prompt, **arguments)
        session = self._engine.session(len(generation.ids) + generation.room, beside=self._first)
        lane = Lane(key, generation, session)
        step = self._take(lane, session.prefill(generation.ids))
        if not step.finish_reason:
            self._lanes.append(lane)
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
                if not step.finish_reason:
                    self._lanes.append(lane)
                taken.append((lane.key, step))
            except QwencError as error:
                taken.append((lane.key, error))
        return taken

    def _take(self, lane: Lane, logits: np.ndarray) -> Step:
        step = lane.generation.take(logits, lane.session.timings)
        if step.id is not None:
            lane.token = step.id
        return step
