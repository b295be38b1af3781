"""A function that runs in a thread of its own while this one does something else, or waits for Ctrl-C."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Later:
    """Runs `function` at once in a daemon thread. `result` waits for it, passes its error on, and can be interrupted."""

    def __init__(self, function: Callable[[], Any]):
        self._value: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(function,), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], Any]) -> None:
        try:
            self._value = function()
        except BaseException as error:
            self._error = error

    def result(self) -> Any:
        while self._thread.is_alive():
            self._thread.join(timeout=0.1)
        if self._error is not None:
            raise self._error
        return self._value
