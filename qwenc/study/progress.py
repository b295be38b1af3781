"""What an engine reports while a study drives it."""

from __future__ import annotations

from collections.abc import Callable

from qwenc.report import Reporter


class Inner(Reporter):
    """Passes notes and stages on to the study's reporter, but a prefill, which is part of a longer bar, to `prefill(tokens done)`."""

    def __init__(self, outer: Reporter, prefill: Callable[[float], None] = lambda _done: None):
        self.outer = outer
        self.prefill = prefill

    def note(self, text: str) -> None:
        self.outer.note(text)

    def detail(self, text: str) -> None:
        self.outer.detail(text)

    def progress(self, stage: str, done: float, total: float, unit: str = "") -> None:
        if stage == "prefill":
            self.prefill(done if done < total else 0)  # when it is over, whoever asked for it counts it
        else:
            self.outer.progress(stage, done, total, unit)
