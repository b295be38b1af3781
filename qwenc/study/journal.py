"""What a study has measured so far, in a file that survives whatever ends the study: one JSON object a line, written as it is known."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qwenc.errors import QwencError, UsageError

try:
    import fcntl
except ImportError:  # no POSIX
    fcntl = None  # type: ignore[assignment]

FORMAT = "qwenc-journal-1"


class Journal:
    """Records of one study. `records`: those that were there when it was opened; `add` writes another and keeps it there too."""

    def __init__(self, path: Path, conditions: Mapping[str, Any], *, resume: bool):
        """Open or begin the journal. `conditions`: what all its records share. A journal of other conditions is never added to: UsageError
        with the first difference. Without `resume`, a journal that is there is put aside as PATH.old."""
        self.path = path
        self.records: list[dict[str, Any]] = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if not resume and path.exists():
                self._check_free()
                os.replace(path, path.with_name(path.name + ".old"))
            self._file = open(path, "r+b" if path.exists() else "w+b")  # noqa: SIM115 (open for the study's whole life)
        except OSError as error:
            raise QwencError(f"cannot keep the measurements in {path}: {error.strerror}") from None
        try:
            self._lock()
            self._read(dict(conditions))
        except BaseException:
            self._file.close()
            raise

    def add(self, record: dict[str, Any]) -> None:
        self._write(record)
        self.records.append(record)

    def close(self) -> None:
        self._file.close()

    def _read(self, conditions: dict[str, Any]) -> None:
        whole = 0
        for number, (end, record) in enumerate(_lines(self._file.read())):
            if number == 0:
                self._check_header(record, conditions)
            else:
                self.records.append(record)
            whole = end
        # half a line is what a kill in the middle of writing leaves
        self._file.truncate(whole)
        self._file.seek(whole)
        if not whole:
            self._write({"format": FORMAT, "conditions": conditions})

    def _check_header(self, header: Any, conditions: dict[str, Any]) -> None:
        if not isinstance(header, dict) or header.get("format") != FORMAT or not isinstance(header.get("conditions"), dict):
            raise UsageError(f"{self.path} is no journal of qwenc: it is left as it is")
        there = header["conditions"]
        for name, wanted in conditions.items():
            if there.get(name) != wanted:
                raise UsageError(f"{self.path} was measured with {name} {there.get(name)!r:.60}, not {wanted!r:.60}: it cannot be resumed")

    def _write(self, record: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps(record).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise QwencError(f"cannot write {self.path}: {error.strerror}") from None

    def _check_free(self) -> None:
        """Another study that is still writing keeps its file."""
        with open(self.path, "rb") as file:
            self._lock(file)

    def _lock(self, file: Any = None) -> None:
        if fcntl is None:
            return
        try:
            with contextlib.suppress(AttributeError):
                fcntl.flock((file or self._file).fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"another study is writing {self.path}") from None


def _lines(data: bytes) -> Iterator[tuple[int, Any]]:
    """(end, value) of every whole line up to the first that is none."""
    start = 0
    while (end := data.find(b"\n", start)) >= 0:
        try:
            value = json.loads(data[start:end])
        except ValueError:
            if start == 0:
                value = None  # a file of something else: its header says so
            else:
                return
        yield end + 1, value
        start = end + 1
    if start == 0 and data:
        # no line end at all: either the first write was cut off or this is another file
        yield len(data), {"format": FORMAT, "conditions": {}} if b'{"format"'.startswith(data[:9]) else None
