"""Where saved prompts are kept between runs: one file (--prompt-cache), or a folder of bounded size (--disk-kv)."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from qwenc.attention.cache import KVCache
from qwenc.checkpoint.packed_writer import remove_stale_temps
from qwenc.errors import QwencError, UsageError
from qwenc.kv_store.arrays import common_prefix
from qwenc.kv_store.saved import FORMAT, Damaged, SavedFile, save

SUFFIX = ".qwenc-kv"
WORTH = 256  # tokens computed that make a prompt worth saving
Note = Callable[[str], None]


def first_difference(one: dict[str, Any], other: dict[str, Any]) -> str:
    """A name under which two identities differ, "" if they do not: sparse attention before what counts only with it."""
    names = {name for name in one.keys() | other.keys() if one.get(name) != other.get(name)}
    return "sparse_attn" if "sparse_attn" in names else min(names, default="")


class PromptFile:
    """One saved prompt in the file `path`. What cannot be used or written is said through `note`, and never ends a run.

    Raises UsageError for a file that holds something else: it would be replaced.
    """

    def __init__(self, path: Path, identity: dict[str, Any], note: Note) -> None:
        self._path, self._identity, self._note = path, identity, note
        self._written = False
        self._held = np.zeros(0, np.int64)  # ids in the file
        self._shared = 0  # of them, with the prompt last looked for
        if path.exists() and not _is_ours(path):
            raise UsageError(f"--prompt-cache {path}: holds something else than a saved prompt, and would be replaced")

    def find(self, ids: np.ndarray) -> SavedFile | None:
        """The file, open, if it was made by the same model in the same way."""
        self._held, self._shared = np.zeros(0, np.int64), 0
        if not self._path.exists() or not self._path.stat().st_size:
            return None
        try:
            saved = SavedFile(self._path)
        except Damaged as error:
            self._note(f"--prompt-cache {error}; the prompt is computed")
            return None
        name = first_difference(saved.identity, self._identity)
        if name:
            self._note(f"--prompt-cache {self._path}: was made with another {name}; the prompt is computed")
            saved.close()
            return None
        self._held, self._shared = saved.ids, common_prefix(saved.ids, ids)
        if not self._written and self._shared < min(len(ids), len(self._held)):
            self._note(f"--prompt-cache {self._path}: shares {self._shared} of its {len(self._held)} tokens with this prompt")
        return saved

    def drop(self, _saved: SavedFile) -> None:
        """The file that was found is damaged inside: it is made anew."""
        self._held = np.zeros(0, np.int64)

    def keep(self, ids: np.ndarray, cache: KVCache, computed: int) -> None:
        """Saves the prompt, once in the life of this object, unless the file serves well enough."""
        serves = len(self._held) and computed < WORTH and 2 * self._shared >= len(self._held)
        if self._written or serves:
            return
        self._written = True
        try:
            save(self._path, ids, cache, self._identity)
        except QwencError as error:
            self._note(f"--prompt-cache {error}; the prompt is not saved")


class PromptFolder:
    """Saved prompts in the folder `path`, at most `limit` bytes: the least recently used go first. Several processes may share it."""

    def __init__(self, path: Path, limit: int, identity: dict[str, Any], note: Note) -> None:
        self._path, self._limit, self._identity, self._note = path, limit, identity, note
        self._kind = hashlib.sha256(repr(sorted(identity.items())).encode()).hexdigest()[:12]
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--disk-kv {path}: cannot be made: {error.strerror}") from None
        remove_stale_temps(path)

    def find(self, ids: np.ndarray) -> SavedFile | None:
        """The one that shares the most tokens with `ids`, open; None if none shares any."""
        best, most = None, 0
        for path in self._path.glob(f"{self._kind}-*{SUFFIX}"):
            try:
                saved = SavedFile(path)
            except Damaged as error:
                if path.exists():  # not just removed by another process
                    self._note(f"--disk-kv {error}; it is removed")
                    _remove(path)
                continue
            shared = common_prefix(saved.ids, ids) if saved.identity == self._identity else 0
            if shared > most:
                best, saved, most = saved, best, shared
            if saved is not None:
                saved.close()
        if best is not None:
            with contextlib.suppress(OSError):
                os.utime(best.path)  # used now
        return best

    def drop(self, saved: SavedFile) -> None:
        """Removes a file that is damaged inside."""
        _remove(saved.path)

    def keep(self, ids: np.ndarray, cache: KVCache, computed: int) -> None:
        """Saves the prompt if that was much to compute."""
        if computed < WORTH:
            return
        path = self._path / f"{self._kind}-{hashlib.sha256(ids.astype('<i4').tobytes()).hexdigest()[:20]}{SUFFIX}"
        try:
            save(path, ids, cache, self._identity)
        except QwencError as error:
            self._note(f"--disk-kv {error}; the prompt is not saved")
        self._shrink()

    def _shrink(self) -> None:
        """Removes files until the rest is within the limit."""
        files = []
        for path in self._path.glob(f"*{SUFFIX}"):
            with contextlib.suppress(OSError):
                status = path.stat()
                files.append((status.st_mtime_ns, status.st_size, path))
        total = sum(size for _used, size, _path in files)
        for _used, size, path in sorted(files):
            if total <= self._limit:
                break
            _remove(path)
            total -= size


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _is_ours(path: Path) -> bool:
    """Whether a file may be replaced: a saved prompt, damaged or not, or an empty file."""
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        start = file.read(4096)
    return not start or f'"format":"{FORMAT}"'.encode() in start
