"""Lists and ranges of numbers, as the command line spells them."""

from __future__ import annotations

import re

from qwenc.errors import UsageError

MOST = 1000  # values of one list: more is a mistake in a range
RANGE = re.compile(r"(\d+)(?:\.\.|-)(\d+)(?:([*+])(\d+))?")


def whole_numbers(text: str, least: int = 0) -> list[int]:
    """The numbers of "506,2046", "512..16384*2" or "0..4096+1024", in order, each once. A dash is as good as two dots, and without a step
    a range counts by one, both as in llama-bench. Raises UsageError, also for a number below `least`."""
    found: dict[int, None] = {}
    for part in text.split(","):
        for number in _one(part.strip()):
            if number < least:
                raise UsageError(f"must be at least {least}, not {number}")
            if number >= 1 << 31:
                raise UsageError(f"must be at most 2^31-1, not {number}")
            found[number] = None
    return list(found)


def _one(part: str) -> list[int]:
    if part.isascii() and part.isdigit() and len(part) < 20:
        return [int(part)]
    range_ = RANGE.fullmatch(part) if part.isascii() and len(part) < 60 else None
    if range_ is None:
        raise UsageError(f"{part!r:.60} is neither a number nor a range such as 512..16384*2 or 0..4096+1024")
    first, last, step = int(range_[1]), int(range_[2]), int(range_[4] or 1)
    times = range_[3] == "*"
    if first > last or step < (2 if times else 1) or (times and first == 0):
        raise UsageError(f"{part!r} is a range that never ends or never begins")
    numbers = []
    while first <= last:
        numbers.append(first)
        if len(numbers) > MOST:
            raise UsageError(f"{part!r} has more than {MOST} values: give a step, such as *2 or +1024")
        first = first * step if times else first + step
    return numbers
