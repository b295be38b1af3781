"""The only place that writes to stdout and stderr. stdout is data, whole and flushed; stderr is for people, one line at a time."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import traceback
from collections.abc import Mapping
from typing import IO, Any

from qwenc.errors import QwencError

_line_is_open = False  # the text on stdout, seen on the same terminal as stderr, has not come to its line end
WIDE_SPACES = "\u00a0\u3000"  # harmless, though Python calls them unprintable
DIM, PLAIN = "\x1b[2m", "\x1b[0m"


class ClosedPipe(Exception):
    """Whoever read stdout has gone: nothing more can be wanted."""


def write_out(data: str | bytes) -> None:
    """All of `data` (text as UTF-8) to stdout, flushed. Raises ClosedPipe, or QwencError when it cannot be written (a full disk)."""
    if isinstance(data, str):
        data = _to_bytes(data)
    stream: Any = getattr(sys.stdout, "buffer", None)
    if stream is None:
        raise QwencError("cannot write the output: stdout is closed")
    global _line_is_open
    try:
        sys.stdout.flush()
        _write_all(stream, data)
        stream.flush()
        if data:
            _line_is_open = not data.endswith(b"\n")
    except BrokenPipeError:
        silence(sys.stdout)
        raise ClosedPipe from None
    except OSError as error:
        silence(sys.stdout)
        raise QwencError(f"cannot write the output: {error.strerror}") from None


def say(text: str, dim: bool = False) -> None:
    """One line to stderr; control characters in `text` are spelled out. Never raises: where nobody listens, nothing is said.

    Where the model's text stands on the same terminal, unfinished, the line begins a new one.
    """
    global _line_is_open
    if sys.stderr is None:
        return
    line = one_line(text)
    if _line_is_open and is_terminal(sys.stdout) and is_terminal(sys.stderr):
        sys.stderr.write("\n")
        _line_is_open = False
    try:
        sys.stderr.write(f"{DIM}{line}{PLAIN}\n" if dim else f"{line}\n")
        sys.stderr.flush()
    except (OSError, ValueError):
        silence(sys.stderr)


def say_traceback() -> None:
    """The traceback of the exception that is being handled, line by line."""
    for line in traceback.format_exc().splitlines():
        say(line)


def one_line(text: str) -> str:
    """`text` without control characters: a path or a model's name must not break the line or steer the terminal."""
    lines = " ".join(part.strip() for part in text.splitlines() if part.strip()) if "\n" in text else text
    return "".join(char if char.isprintable() or char in WIDE_SPACES else char.encode("unicode_escape").decode() for char in lines)


def silence(stream: IO[str] | None) -> None:
    """Points a broken stream's descriptor at nothing, so that the interpreter's last flush cannot fail (it would exit with 120)."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())  # type: ignore[union-attr]
        os.close(nowhere)


def is_terminal(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def wants_color(choice: str, stream: IO[str] | None, env: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour `stream`: --color first, then NO_COLOR, FORCE_COLOR, TERM=dumb, then whether it is a terminal."""
    if choice != "auto":
        return choice == "always"
    if env.get("NO_COLOR"):
        return False
    if env.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return env.get("TERM") != "dumb" and is_terminal(stream)


def _to_bytes(text: str) -> bytes:
    """UTF-8. The bytes of a file name are as they were; a surrogate that is none of those becomes a question mark."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return text.encode("utf-8", "replace")


def _write_all(stream: Any, data: bytes) -> None:
    """Python's stdout may be unbuffered (a write can be partial) or not block (a write can be refused for now)."""
    view = memoryview(data)
    while view:
        try:
            written = stream.write(view)
        except BlockingIOError as error:
            written = error.characters_written
        if not written:
            select.select([], [stream], [], 1.0)
        view = view[written or 0 :]
