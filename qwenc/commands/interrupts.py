"""Ctrl-C and SIGTERM for work that is made of items: the first asks to finish those at work, a second one ends it at once."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """A context manager. `runner` (set it once there is one) is told to `stop`; while there is none, or it is `idle`, the first signal
    already raises KeyboardInterrupt. exit_code: 128 + the first signal, or 0."""

    def __init__(self, note: Callable[[str], None]) -> None:
        self.runner: Any = None
        self.exit_code = 0
        self._note = note
        self._told = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        with contextlib.suppress(ValueError):  # not in the main thread: signals are somebody else's
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: Any, *_exc: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, _frame: Any) -> None:
        again = self.exit_code != 0
        self.exit_code = self.exit_code or 128 + number
        if again or self.runner is None or self.runner.idle:
            raise KeyboardInterrupt
        self.runner.stop = True

    def tell(self) -> None:
        """Says what is going on, once. Not done in the handler: it may strike in the middle of another line."""
        if self.exit_code and not self._told:
            self._told = True
            self._note("finishing the items at work; once more stops at once")
