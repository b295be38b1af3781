"""The machine: which CPUs, how many threads, which folders."""

from __future__ import annotations

from typing import Any


def describe(threads: int | None = None) -> dict[str, Any]:
    """See qwenc.machine.description.describe."""
    from qwenc.machine.description import describe as tell

    return tell(threads)
