"""Running a compiled step on every thread of a team, and compiling it beforehand."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np

from qwenc.errors import QwencError
from qwenc.kernels.apart import Apart, Job, can_compile_apart
from qwenc.kernels.jit import CAN_KEEP, compiling, is_cached
from qwenc.kernels.sync import BROKEN, STOP, begin_step, new_sync
from qwenc.machine.later import Later
from qwenc.machine.team import ThreadTeam
from qwenc.model.records import TIMER_SLOTS, Team
from qwenc.report import Reporter

KEPT = ", once: about a minute, with sparse attention two; stopped early, it begins anew"
NOT_KEPT = ": about a minute, in every run, as the cache folder cannot be written (QWENC_CACHE names another)"


class Steps:
    """What the threads of a team share during a step. `phases`: most work counters that a step needs."""

    def __init__(self, team: ThreadTeam, phases: int) -> None:
        self.timer = np.zeros(TIMER_SLOTS, np.int64)  # nanoseconds of the last step, by slot
        self.step_ns = 0
        self._team = team
        self._sync = new_sync()
        self._claims = np.zeros(phases, np.int64)
        self._health = np.full(1, -1, np.int64)

    def run(self, step: Callable[[Team], Any]) -> None:
        """Calls step(team record) on every thread."""
        self._claims[:] = 0
        self.timer[:] = 0
        begin_step(self._sync)
        self._health[0] = -1
        began = time.perf_counter_ns()
        self._team.run(
            lambda rank: step(self.team(rank)),
            on_interrupt=lambda: self._signal(STOP),
            on_error=lambda: self._signal(BROKEN),
        )
        self.step_ns = time.perf_counter_ns() - began

    def team(self, rank: int) -> Team:
        return Team(rank, self._team.size, self._sync, self._claims, self.timer, self._health)

    @property
    def bad_layer(self) -> int | None:
        """The first layer of the last step whose output was not finite."""
        return int(self._health[0]) if self._health[0] >= 0 else None

    def _signal(self, slot: int) -> None:
        self._sync[slot] = 1


def compile_steps(jobs: Sequence[tuple[Any, tuple]], reporter: Reporter) -> None:
    """Compiles each (step, arguments), or loads it from the cache. All but the first that has to be compiled are, where that can be, in
    another process meanwhile."""
    typed = [(step, tuple(numba.typeof(argument) for argument in arguments)) for step, arguments in jobs]
    missing = [(step, types) for step, types in typed if not is_cached(step, types)]
    others = Apart(missing[1:]) if len(missing) > 1 and can_compile_apart() else None
    try:
        _compile_all(typed, others, missing[:1], reporter)
    finally:
        if others is not None:
            others.stop()


def _compile_all(jobs: Sequence[Job], others: Apart | None, here: Sequence[Job], reporter: Reporter) -> None:
    told: list[bool] = []

    def tell() -> None:
        if not told:
            reporter.note(f"compiling the kernels for these settings{KEPT if CAN_KEEP else NOT_KEPT}")
            told.append(True)

    with compiling(tell):
        for done, (step, types) in enumerate(jobs):
            if told:
                reporter.progress("compile", done, len(jobs), "steps")
            if others is not None and (step, types) not in here:
                Later(others.wait).result()
            # in a thread of its own: LLVM's callbacks swallow a KeyboardInterrupt that comes while they run
            Later(partial(step.compile, types)).result()
    if told:
        reporter.progress("compile", len(jobs), len(jobs), "steps")


def check_finite(logits: np.ndarray) -> np.ndarray:
    """`logits`, float32. Raises QwencError for a NaN or an infinity among them."""
    if np.isfinite(logits.sum(dtype=np.float64)):  # cheap, and no float32 values can overflow a float64
        return logits
    raise QwencError("the model's logits are not finite (NaN or infinity): damaged weights or an overflow")
