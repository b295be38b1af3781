"""Notes as lines on stderr, and progress bars where stderr is a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from qwenc.commands.screen import is_terminal, say
from qwenc.report import Reporter

SHOW_AFTER_S = 0.4  # a stage that is over sooner needs no bar (importing rich alone takes 0.07 s)
REDRAW_EVERY_S = 0.1


class ScreenReporter(Reporter):
    """Shows what library code reports. quiet: nothing at all. verbose: details too. Close it before anything else uses the terminal."""

    def __init__(self, quiet: bool = False, verbose: bool = False, color: bool = False) -> None:
        self.quiet, self.verbose, self.color = quiet, verbose, color
        self._bars = not quiet and is_terminal(sys.stderr) and os.environ.get("TERM") != "dumb"
        self._stage = ""
        self._started = 0.0
        self._drawn = 0.0
        self._bar: Any = None

    def note(self, text: str) -> None:
        if not self.quiet:
            self.close()
            say(f"qwenc: {text}", dim=self.color)

    def detail(self, text: str) -> None:
        if self.verbose:
            self.note(text)

    def progress(self, stage: str, done: float, total: float, unit: str = "", extra: str = "") -> None:
        """total 0: nobody knows. extra: stands behind the stage's name."""
        if not self._bars:
            return
        now = time.monotonic()
        if stage != self._stage:
            self.close()
            self._stage, self._started = stage, now
        if done >= total > 0:
            self.close()
        elif now - self._started >= SHOW_AFTER_S and now - self._drawn >= REDRAW_EVERY_S:
            self._drawn = now
            self._draw(f"{stage} {extra}".rstrip(), done, total or None, unit)

    def close(self) -> None:
        """Takes the bar off the screen, if there is one."""
        bar, self._bar, self._stage = self._bar, None, ""
        if bar is not None:
            bar.stop()

    def _draw(self, text: str, done: float, total: float | None, unit: str) -> None:
        if self._bar is None:
            self._bar = _new_bar(self.color, unit == "B")
            self._bar.add_task(text, total=total)
            self._bar.start()
        self._bar.update(self._bar.task_ids[0], description=text, completed=done, total=total)
        self._bar.refresh()


def _new_bar(color: bool, in_bytes: bool) -> Any:
    """A bar that is drawn only when told to (no thread beside the compute threads) and leaves no trace."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(file=sys.stderr, no_color=not color, markup=False, highlight=False, emoji=False, soft_wrap=False)
    amount = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    return Progress(*columns, console=console, transient=True, auto_refresh=False)
