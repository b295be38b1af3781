"""Lines of a file or a pipe, as bytes: no line is read before it is asked for, and none holds up those who have other work."""

from __future__ import annotations

import codecs
import os
import select
import stat
from enum import Enum
from typing import NamedTuple

from qwenc.errors import QwencError

LONGEST = 1 << 28  # bytes of a line; a longer one is skipped and never held in memory
CHUNK = 1 << 20


class Line(NamedTuple):
    """number: counted from 1, blank lines too. data: without its line end (LF or CRLF), or None for a line beyond LONGEST."""

    number: int
    data: bytes | None


class No(Enum):
    """Why there is no line: the input ENDed, or a pipe has none YET."""

    END = "end"
    YET = "yet"


class LineReader:
    """Reads an open descriptor, from where it stands.

    A regular file is read up to the size that it has now: what is appended later is left to a later run. A byte order mark in front is
    dropped. A last line needs no line end.
    """

    def __init__(self, fd: int, name: str) -> None:
        self.name = name
        self._fd = fd
        self._buffer = bytearray()
        self._seen = 0  # bytes of the buffer that hold no line end
        self._number = 0
        self._skipping = False  # inside a line that is too long
        self._begun = self._ended = False
        status = os.fstat(fd)
        self._regular = stat.S_ISREG(status.st_mode)
        self._left = max(0, status.st_size - os.lseek(fd, 0, os.SEEK_CUR)) if self._regular else 0

    def next(self, wait: bool = True) -> Line | No:
        """The next line that is not blank. Without `wait`, No.YET instead of waiting for a pipe. Raises QwencError."""
        while True:
            line = self._cut()
            if line is None:
                if self._ended:
                    return No.END
                if not wait and not self._readable():
                    return No.YET
                self._read()
            elif line.data is None or line.data.strip():
                return line

    def _cut(self) -> Line | None:
        """The first line in the buffer, if it is complete."""
        end = self._buffer.find(b"\n", self._seen)
        if end < 0 and not (self._ended and (self._buffer or self._skipping)):
            self._seen = len(self._buffer)
            if self._seen > LONGEST:
                self._skipping, self._seen = True, 0
                self._buffer.clear()
            return None
        self._number += 1
        data: bytes | None = None
        if not self._skipping and end <= LONGEST:
            data = bytes(self._buffer if end < 0 else self._buffer[:end]).removesuffix(b"\r")
        del self._buffer[: len(self._buffer) if end < 0 else end + 1]
        self._seen, self._skipping = 0, False
        return Line(self._number, data)

    def _read(self) -> None:
        try:
            data = os.read(self._fd, min(CHUNK, self._left) if self._regular else CHUNK)
        except BlockingIOError:  # a pipe that does not block: wait for it here
            select.select([self._fd], [], [])
            return
        except OSError as error:
            raise QwencError(f"cannot read {self.name}: {error.strerror}") from None
        self._left -= len(data)
        self._ended = not data
        self._buffer += data
        if not self._begun and (len(self._buffer) >= len(codecs.BOM_UTF8) or self._ended or b"\n" in data):
            self._begun = True
            if self._buffer.startswith(codecs.BOM_UTF8):
                del self._buffer[: len(codecs.BOM_UTF8)]

    def _readable(self) -> bool:
        """Whether reading would return at once."""
        return self._regular or bool(select.select([self._fd], [], [], 0)[0])


def count_lines(path: str | os.PathLike[str]) -> int:
    """How many lines of a file are not blank."""
    fd = os.open(path, os.O_RDONLY)
    try:
        reader, count = LineReader(fd, os.fspath(path)), 0
        while isinstance(reader.next(), Line):
            count += 1
        return count
    finally:
        os.close(fd)
