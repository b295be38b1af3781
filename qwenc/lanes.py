"""Several completions at a time on one model, each in a lane of its own: what `qwenc batch` is driven by."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import TYPE_CHECKING, Any

from qwenc.errors import QwencError
from qwenc.generation import Generation, Step
from qwenc.session import Session
from qwenc.timing import Timings

if TYPE_CHECKING:
    from qwenc.engine import Engine


class Lane:
    """One completion at work, or none (generation is None). token: the last one picked, which the next step feeds."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.key: Any = None
        self.generation: Generation | None = None
        self.token = 0


class Lanes:
    """`start` completions while one is `free`, `step` them together until each has ended. `key` is the caller's name for one."""

    def __init__(self, engine: Engine, count: int) -> None:
        self._engine = engine
        self._lanes = [Lane(engine.session()) for _ in range(count)]
        self.compile_s = engine.compile(self._lanes[0].session)

    @property
    def free(self) -> int:
        """Completions that can be started now."""
        return sum(lane.generation is None for lane in self._lanes)

    @property
    def working(self) -> int:
        return len(self._lanes) - self.free

    def start(self, key: Any, prompt: Ids[int], **arguments: Any) -> Step:
        """Prefill the token ids `prompt` and pick a token. arguments: of Engine.prepare. A QwencError concerns this prompt alone."""
        generation = self._engine.prepare(prompt, **arguments)
        lane = next(lane for lane in self._lanes if lane.generation is None)
        lane.session.truncate(0)
        lane.session.timings = Timings()
        logits = lane.session.prefill(generation.ids)
        lane.key, lane.generation = key, generation
        return self._take(lane, logits)

    def step(self) -> list[tuple[Any, Step | QwencError]]:
        """One token more for every completion at work: (key, step), or (key, error) of one that failed and is over."""
        taken: list[tuple[Any, Step | QwencError]] = []
        for lane in self._lanes:
            if lane.generation is None:
                continue
            try:
                taken.append((lane.key, self._take(lane, lane.session.step(lane.token))))
            except QwencError as error:
                lane.generation = None
                taken.append((lane.key, error))
        return taken

    def _take(self, lane: Lane, logits: Any) -> Step:
        generation, lane.generation = lane.generation, None
        assert generation is not None
        step = generation.take(logits, lane.session.timings)
        if not step.finish_reason and step.id is not None:
            lane.generation, lane.token = generation, step.id
        return step
