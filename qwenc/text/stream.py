"""Streaming text: bytes in, whole characters out; stop strings cut exactly, wherever the tokens split them."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from qwenc.errors import UsageError
from qwenc.text.tokenizer import Tokenizer


class Utf8Stream:
    """Bytes to text. Holds the at most 3 bytes of an unfinished character; a byte that can be none becomes U+FFFD at once."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, data: bytes) -> str:
        """The text that `data` completes."""
        return self._decoder.decode(data)

    def flush(self) -> str:
        """U+FFFD for what is held, if anything."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Passes text on up to the stop string that is complete first (of those that end together, the longest).

    Holds back the longest ending that may still grow into a stop, so the result does not depend on how the text is chopped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise UsageError("a stop string must be text of at least one character")
        self._stops = tuple(stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is certain now, whether a stop was reached). Nothing may follow a stop."""
        text = self._held + text
        self._held = ""
        cut = self._first_stop(text)
        if cut is not None:
            return text[:cut], True
        keep = len(text) - self._held_length(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """What was held: no stop came of it."""
        text, self._held = self._held, ""
        return text

    def _first_stop(self, text: str) -> int | None:
        """Where the stop that ends first begins."""
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _held_length(self, text: str) -> int:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            ending = text[-length:]
            if any(stop.startswith(ending) for stop in self._stops):
                return length
        return 0


class TextOutput:
    """Token ids in, printable text out: the tokens' bytes through Utf8Stream and StopStrings."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()) -> None:
        self._bytes_of = tokenizer.token_bytes
        self._characters = Utf8Stream()
        self._stops = StopStrings(stops)

    def push(self, id: int) -> tuple[str, bool]:
        """(text now complete, whether a stop string was reached)."""
        return self._stops.push(self._characters.push(self._bytes_of(id)))

    def flush(self) -> str:
        """The rest, at the end of a generation that no stop string ended."""
        text, stopped = self._stops.push(self._characters.flush())
        return text if stopped else text + self._stops.flush()
