"""Where results go: a file that an interrupted run can go on with, or a stream.

A record is appended with one write, so that a kill leaves whole lines, and at most one torn one at the end. In a file, records of items
that ran beside each other come as they finish, and `settle` puts them in the order of the input; a stream holds them back instead.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import stat
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qwenc.batch.items import Item
from qwenc.errors import QwencError, UsageError
from qwenc.plain_json import to_json

SIDECAR = ".settings.json"
COPY = 1 << 20  # bytes at a time
Place = tuple[int, int]  # where a record lies in the file: first byte, byte after its line end


class StreamResults:
    """Results to a pipe, a terminal or a device, in the order of the input. `put` takes whole lines."""

    def __init__(self, put: Callable[[str], None]) -> None:
        self._put = put
        self._lines: deque[int] = deque()  # begun and not yet put out
        self._done: dict[int, str] = {}

    def answered(self, item: Item) -> bool:
        return False

    def begin(self, line: int) -> None:
        """An item will get a result, after those begun before it."""
        self._lines.append(line)

    def write(self, line: int, record: dict[str, Any]) -> None:
        self._done[line] = to_json(record)
        while self._lines and self._lines[0] in self._done:
            self._put(self._done.pop(self._lines.popleft()))

    def settle(self, complete: bool) -> None:
        """The lines are in order already."""

    def close(self) -> None:
        """Nothing is held open."""


class FileResults:
    """Results in a file that this process alone writes. Opened by `create` or `resume`."""

    def __init__(self, path: Path, fd: int, end: int) -> None:
        self.path = path
        self._fd, self._end = fd, end
        self._answers: dict[str | int, tuple[str, Place]] = {}  # of earlier runs: id -> digest of the item, place
        self._failures: list[Place] = []  # of earlier runs; tried again, so not wanted in the end
        self._order: list[tuple[int, Place]] = []  # of this run: line of the input, place

    @classmethod
    def create(cls, path: Path, identity: dict[str, Any], force: bool) -> FileResults:
        """A new file. Raises UsageError for one that holds something already (unless force), QwencError if it cannot be written."""
        fd = _open_alone(path)
        try:
            if os.fstat(fd).st_size and not force:
                raise UsageError(f"{path} exists: --resume goes on with it, --force replaces it")
            os.ftruncate(fd, 0)
            _write_whole(sidecar(path), json.dumps(identity, indent=1, sort_keys=True, default=str) + "\n")
        except BaseException:
            os.close(fd)
            raise
        return cls(path, fd, 0)

    @classmethod
    def resume(cls, path: Path, identity: dict[str, Any], tell: Callable[[str], None]) -> FileResults:
        """The file of an earlier run of the same identity, a torn last line taken off; a new one if there is none. Raises UsageError for
        one that something else made, and then changes nothing."""
        if not path.exists() or not path.stat().st_size:
            return cls.create(path, identity, force=False)
        _check_identity(path, identity)
        fd = _open_alone(path)
        results = cls(path, fd, 0)
        try:
            results._read_earlier(tell)
        except BaseException:
            os.close(fd)
            raise
        return results

    def answered(self, item: Item) -> bool:
        """Whether an earlier run has answered this very item."""
        digest, place = self._answers.get(item.id, ("", (0, 0)))
        if digest != item.digest:
            return False
        del self._answers[item.id]
        self._order.append((item.line, place))
        return True

    def begin(self, line: int) -> None:
        """Nothing to note: the order is made in the end."""

    def write(self, line: int, record: dict[str, Any]) -> None:
        """Appends one record. Raises QwencError if it cannot be written; the file then ends with the record before it."""
        data = to_json(record).encode()
        view, end = memoryview(data), self._end
        try:
            while view:
                written = os.write(self._fd, view)
                view, end = view[written:], end + written
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise QwencError(f"cannot write {self.path}: {error.strerror}; what is in it is whole (--resume goes on)") from None
        self._order.append((line, (self._end, end)))
        self._end = end
        if "error" not in record:
            self._answers.pop(record["id"], None)

    def settle(self, complete: bool) -> None:
        """Puts the records in the order of the input, those whose items it does not have last. A run that came to its end (complete) has
        tried the failures of earlier ones again, and they go. Raises QwencError if that cannot be written; the file then is as it was."""
        places = [place for _line, place in sorted(self._order)]
        places += sorted([*(place for _digest, place in self._answers.values()), *([] if complete else self._failures)])
        if places == sorted(places) and sum(last - first for first, last in places) == self._end:
            return
        temp = self.path.with_name(f".{self.path.name}.{secrets.token_hex(4)}.part")
        try:
            with open(temp, "xb") as out:
                os.fchmod(out.fileno(), stat.S_IMODE(os.fstat(self._fd).st_mode))
                for first, last in places:
                    for at in range(first, last, COPY):
                        out.write(os.pread(self._fd, min(COPY, last - at), at))
                out.flush()
                os.fsync(out.fileno())
            os.replace(temp, self.path)
        except OSError as error:
            raise QwencError(f"cannot put {self.path} in the order of the input: {error.strerror}; every result is in it") from None
        finally:
            with contextlib.suppress(OSError):
                temp.unlink()

    def close(self) -> None:
        os.close(self._fd)

    def _read_earlier(self, tell: Callable[[str], None]) -> None:
        """Learns what is answered; `_end` becomes the end of the last whole record."""
        with open(os.dup(self._fd), "rb") as file:
            for number, line in enumerate(file, 1):
                record = _record(line)
                torn = not line.endswith(b"\n")
                if torn and record is not None:  # all but its line end
                    os.pwrite(self._fd, b"\n", self._end + len(line))
                place = (self._end, self._end + len(line) + torn)
                if torn and record is None:
                    tell(f"{self.path}: its last line, {number}, is torn and is taken off; its item is done again")
                    break
                if record is None:
                    raise UsageError(f"{self.path}: line {number} is no result of qwenc batch, so a run cannot go on with it")
                if "error" in record:
                    self._failures.append(place)
                else:
                    self._answers[record["id"]] = (record["item"], place)
                self._end = place[1]
                if torn:
                    break
        os.ftruncate(self._fd, self._end)
        os.lseek(self._fd, self._end, os.SEEK_SET)


def sidecar(path: Path) -> Path:
    """The file beside a result file that says what made it."""
    return path.with_name(path.name + SIDECAR)


def _record(line: bytes) -> dict[str, Any] | None:
    """A result or an error record, or None."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict):
        return None
    answered = isinstance(record.get("id"), (str, int)) and isinstance(record.get("item"), str) and "text" in record
    return record if answered or ("error" in record and "line" in record) else None


def _check_identity(path: Path, identity: dict[str, Any]) -> None:
    beside = sidecar(path)
    try:
        earlier = json.loads(beside.read_bytes())
    except FileNotFoundError:
        raise UsageError(f"{path} has no {beside.name} beside it, so nothing says what made it: --resume cannot go on with it") from None
    except (OSError, ValueError, RecursionError):
        earlier = None
    if not isinstance(earlier, dict):
        raise UsageError(f"{beside} is damaged, so nothing says what made {path}: --resume cannot go on with it")
    now = json.loads(json.dumps(identity, default=str))
    for name in sorted(now.keys() | earlier.keys()):
        if name != "version" and now.get(name) != earlier.get(name):
            was, is_ = (json.dumps(value.get(name), ensure_ascii=False) for value in (earlier, now))
            raise UsageError(f"{path} was made with another {name}: {was:.80}, now {is_:.80}; take those settings or another OUT")


def _open_alone(path: Path) -> int:
    """Opens (and creates) the file, locked, for appending. Raises QwencError."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise QwencError(f"cannot write {path}: {error.strerror}") from None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise QwencError(f"{path} is being written by another run") from None
        except OSError:
            return fd  # a file system without locks
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)  # another run has just put a new file in its place


def _write_whole(path: Path, text: str) -> None:
    """The file appears with all of its text, or not at all."""
    temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        temp.write_text(text, encoding="utf-8")
        os.replace(temp, path)
    except OSError as error:
        raise QwencError(f"cannot write {path}: {error.strerror}") from None
    finally:
        with contextlib.suppress(OSError):
            temp.unlink()
