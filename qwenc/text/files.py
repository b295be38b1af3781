"""Text that a user keeps in a file: UTF-8, its bytes as they are (line ends too), less a byte order mark in front."""

from __future__ import annotations

import codecs
import json
from pathlib import Path
from typing import Any, BinaryIO

from qwenc.errors import UsageError

MOST = 256 << 20  # bytes: far more than any context holds, and a device may never end


def read_text(path: str, what: str) -> str:
    """The text of the file, a pipe perhaps. `what` it is names it in a UsageError."""
    try:
        with Path(path).open("rb") as file:
            return text_of(read_all(file, path, what), path)
    except IsADirectoryError:
        raise UsageError(f"cannot read {what} from {path}: it is a directory") from None
    except OSError as error:
        raise UsageError(f"cannot read {what} from {path}: {error.strerror}") from None
    except ValueError as error:  # a NUL in the name
        raise UsageError(f"cannot read {what} from {path!r}: {error}") from None


def read_all(file: BinaryIO, name: str, what: str) -> bytes:
    """All bytes of an open file. Raises UsageError beyond MOST, and OSError."""
    data = file.read(MOST + 1) or b""
    if len(data) > MOST:
        raise UsageError(f"cannot read {what} from {name}: it is longer than 256 MiB")
    return data


def text_of(data: bytes, name: str) -> str:
    """Bytes as text. Raises UsageError."""
    bare = data.removeprefix(codecs.BOM_UTF8)
    return decode(bare, name, len(data) - len(bare))


def decode(data: bytes, name: str, skipped: int = 0) -> str:
    """Bytes as text, a byte order mark too. `skipped`: bytes before them, for the offset in the UsageError."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        hint = " (it looks like UTF-16; save it as UTF-8)" if data[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else ""
        bad = data[error.start]
        raise UsageError(f"{name} is not UTF-8: byte 0x{bad:02x} at offset {error.start + skipped}{hint}") from None


def strict_json(text: str) -> Any:
    """The value of a JSON text, which holds no NaN and no infinity. Raises ValueError, or RecursionError for what nests too deep."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)
