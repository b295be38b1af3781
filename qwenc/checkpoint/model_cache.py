"""The cache of converted checkpoints: each is converted once, whoever asks first, and never seen half-written."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from qwenc.checkpoint.packed import VERSION
from qwenc.checkpoint.packed_writer import remove_stale_temps
from qwenc.checkpoint.safetensors_file import SafetensorsFile
from qwenc.checkpoint.shards import Shards, open_shards
from qwenc.checkpoint.source import read_source, source_hash
from qwenc.errors import QwencError
from qwenc.machine.folders import cache_root
from qwenc.report import SILENT, Reporter

QUANTISER = "2"  # to be raised whenever a conversion gives other numbers than before

# A conversion that holds more than was asked for serves too.
_SERVED_BY = {"q4": ("q4", "dual"), "q8": ("q8", "dual"), "dual": ("dual",), "f32": ("f32",)}


def serves(held: str, wanted: str) -> bool:
    """Whether a packed file in wmode `held` can run as `wanted`."""
    return held in _SERVED_BY[wanted]


def cached_conversion(folder: Path, label: str, wmode: str, reporter: Reporter) -> Path:
    """The packed form of the checkpoint `folder`, from the cache or converted into it now. `label` names it for people.

    Raises QwencError: what convert raises, or a cache that cannot be written.
    """
    source = read_source(folder)
    with open_shards(folder, SILENT) as shards:
        key = _key(source_hash(source, shards), shards)
    models = cache_root() / "models"
    name = re.sub(r"[^A-Za-z0-9._-]+", "--", label).strip("-.")[:80] or "model"
    paths = {mode: models / f"{name}-{mode}-{key}.qwenc" for mode in _SERVED_BY[wmode]}
    found = _first_whole(paths.values())
    if found is not None:
        return found
    path = paths[wmode]
    with _only_one(path, reporter):
        found = _first_whole(paths.values())  # another run may have made it meanwhile
        if found is not None:
            return found
        remove_stale_temps(models)
        from qwenc.checkpoint.convert import convert  # brings in Numba, which opening a packed file does not need

        return convert(folder, path, wmode, reporter)


def _key(content: str, shards: Shards) -> str:
    """Changes with the content, as far as can be told without reading the weights, with their modification times, and with the format."""
    digest = hashlib.sha256(f"{VERSION} {QUANTISER} {content}".encode())
    for name, file in shards.files.items():
        digest.update(f"{name} {os.stat(file.path).st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _first_whole(paths: Iterable[Path]) -> Path | None:
    """The first that exists and is whole; a damaged one is removed."""
    for path in paths:
        if path.exists():
            try:
                SafetensorsFile(path).close()
            except QwencError:
                with contextlib.suppress(OSError):
                    path.unlink()
                continue
            return path
    return None


@contextlib.contextmanager
def _only_one(path: Path, reporter: Reporter) -> Iterator[None]:
    """Holds the lock of `path`, waiting for another run that does."""
    lock = path.with_suffix(".lock")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise QwencError(
            f"{path.parent}: the cache cannot be written ({error.strerror}); set QWENC_CACHE to a folder that can, or use `qwenc convert`"
        ) from None
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reporter.note(f"another run is converting {path.name}; waiting for it")
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            pass  # a file system without locks: two runs may both convert, and either result is whole
        yield
    finally:
        with contextlib.suppress(OSError):
            lock.unlink()
        os.close(fd)
