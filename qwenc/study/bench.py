"""Rates of prompt processing and generation, as llama-bench measures them: random tokens, a fixed depth of context before them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

import numpy as np

from qwenc.errors import UsageError
from qwenc.report import Reporter
from qwenc.study.arms import Arm
from qwenc.study.measure import warm_up
from qwenc.study.progress import Inner
from qwenc.study.sweep import grouped


@dataclass(frozen=True, slots=True)
class Test:
    """`prompt` tokens of prefill or `generate` decode steps (the other is 0), after `depth` tokens of context."""

    prompt: int
    generate: int
    depth: int

    @property
    def name(self) -> str:
        what = f"pp{self.prompt}" if self.prompt else f"tg{self.generate}"
        return f"{what} @ d{self.depth}" if self.depth else what

    @property
    def tokens(self) -> int:
        return self.prompt + self.generate


@dataclass(frozen=True, slots=True)
class Result:
    """One test under one arm. samples_ns: wall time of each repetition, Python's share of every step included."""

    model: str
    arm: Arm
    test: Test
    threads: int
    test_time: str
    samples_ns: tuple[int, ...]
    file_bytes: int
    parameters: int

    @property
    def samples_ts(self) -> list[float]:
        return [1e9 * self.test.tokens / ns for ns in self.samples_ns]

    @property
    def avg_ts(self) -> float:
        return statistics.fmean(self.samples_ts)

    @property
    def stddev_ts(self) -> float:
        return statistics.stdev(self.samples_ts) if len(self.samples_ns) > 1 else 0.0


def tests_of(prompts: Sequence[int], generations: Sequence[int], depths: Sequence[int]) -> list[Test]:
    """In llama-bench's order: by depth, prompts before generations; a 0 leaves that half away. Raises UsageError if nothing is left."""
    tests = []
    for depth in depths:
        tests += [Test(tokens, 0, depth) for tokens in prompts if tokens]
        tests += [Test(0, tokens, depth) for tokens in generations if tokens]
    if not tests:
        raise UsageError("-p 0 and -n 0 leave nothing to measure")
    return tests


@dataclass(slots=True)
class Bench:
    """open_engine(settings, reporter): loads an engine. `run` yields each result as it is known."""

    arms: Sequence[Arm]
    tests: Sequence[Test]
    repetitions: int
    open_engine: Callable[[Any, Reporter], Any]
    reporter: Reporter
    _done: int = field(default=0)

    def run(self) -> Iterator[Result]:
        total = len(self.arms) * sum(test.depth + self.repetitions * test.tokens for test in self.tests)
        for arms in grouped(self.arms, lambda arm: arm.engine_key):
            with self.open_engine(arms[0].settings, Inner(self.reporter)) as engine:
                ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, self._check_room(engine)).tolist()
                for arm in arms:
                    warm_up(engine, arm.settings, ids)
                    for test in self.tests:
                        yield self._measure(engine, arm, test, ids, total)
        self.reporter.progress("bench", total, total)

    def _measure(self, engine: Any, arm: Arm, test: Test, ids: Sequence[int], total: int) -> Result:
        began = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        session = engine.session(test.depth + test.tokens, settings=arm.settings)
        if test.depth:
            session.prefill(ids[: test.depth])
        mark = session.mark()
        self._tell(test.depth, total)
        todo = ids[test.depth : test.depth + test.tokens]
        samples = []
        for _ in range(self.repetitions):
            session.rewind(mark)
            start = time.perf_counter_ns()
            if test.prompt:
                session.prefill(todo)
            else:
                for token in todo:
                    session.step(token)
            samples.append(time.perf_counter_ns() - start)
            self._tell(test.tokens, total)
        name = f"{engine.config.model_type} {engine.wmode}"
        return Result(name, arm, test, engine.threads, began, tuple(samples), engine.packed.file_bytes, _parameters(engine))

    def _tell(self, tokens: int, total: int) -> None:
        self._done += tokens
        self.reporter.progress("bench", min(self._done, total - 1), total, "tokens")

    def _check_room(self, engine: Any) -> int:
        needed = max(test.depth + test.tokens for test in self.tests)
        if needed > engine.context_size:
            raise UsageError(f"a test of {needed} tokens does not fit into this model's context of {engine.context_size} (--ctx-size)")
        return max(needed, 66)


def _parameters(engine: Any) -> int:
    import math

    from qwenc.checkpoint.layout import matrices

    return sum(math.prod((*matrix.stack, matrix.rows, matrix.inputs)) for matrix in matrices(engine.config))
