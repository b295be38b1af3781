"""What a batch shows on stderr: a bar on a terminal, a line every few items where asked for, a summary in the end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from qwenc.commands.outcome import show_bytes
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.screen import one_line, say
from qwenc.machine.cpus import show_cores
from qwenc.machine.memory import peak_rss_bytes


class BatchProgress:
    """`show` takes the tally after every step. total: items, None if unknown; every: items between two lines, 0 for none."""

    def __init__(self, reporter: ScreenReporter, total: int | None, every: int, before: Callable[[], None]) -> None:
        self._reporter, self._total, self._every, self._before = reporter, total, every, before
        self._logged = 0

    def show(self, tally: Any) -> None:
        self._before()
        over = tally.done + tally.failed + tally.skipped
        rate = tally.completion_tokens / tally.seconds if tally.seconds else 0.0
        self._reporter.progress("items", over, self._total or 0, extra=f"{rate:.1f} tok/s")
        if self._every and over >= self._logged + self._every:
            self._logged = over - over % self._every
            left = self._left(tally, over)
            of = f"/{self._total}" if self._total else ""
            failed = f", {tally.failed} failed" if tally.failed else ""
            self._reporter.note(f"{over}{of} items{failed}, {rate:.1f} tok/s{left}")

    def _left(self, tally: Any, over: int) -> str:
        """Time left, by the pace so far."""
        fresh = over - tally.skipped
        if not self._total or not fresh or over >= self._total:
            return ""
        return f", {show_seconds(tally.seconds / fresh * (self._total - over))} left"


def show_seconds(seconds: float) -> str:
    """1:02:03, 2:03 or 3 s."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def report(tally: Any, engine: Any, color: bool) -> None:
    """The timing lines, summed over the items, and the summary."""
    if tally.done:
        for line in (*tally.timings.prefill.lines(), *tally.timings.decode.lines()):
            say(line)
    say(summary(tally, engine), dim=color)


def summary(tally: Any, engine: Any) -> str:
    parts = [f"{tally.done} answered"]
    if tally.skipped:
        parts.append(f"{tally.skipped} answered before")
    if tally.failed:
        parts.append(f"{tally.failed} failed ({'first ' if tally.failed > 1 else ''}{one_line(tally.first_error)})")
    cached = f" ({tally.cached_tokens} cached)" if tally.cached_tokens else ""
    parts.append(f"prompts {tally.prompt_tokens} tok{cached}")
    rate = f" ({tally.completion_tokens / tally.seconds:.1f} tok/s in all)" if tally.seconds and tally.completion_tokens else ""
    parts.append(f"answers {tally.completion_tokens} tok{rate}")
    parts.append(f"{tally.seconds:.1f} s")
    peak = peak_rss_bytes()
    if peak is not None:
        parts.append(f"peak RSS {show_bytes(peak)}")
    threads = f"{engine.threads} thread{'' if engine.threads == 1 else 's'}"
    parts.append(threads + (f" on cores {show_cores(engine.cores)}" if engine.cores else ", not pinned"))
    return f"qwenc: {', '.join(parts)}"
