"""A saved prompt: token ids and the keys and values that prefill made of them, in memory or in a file.

The file is a safetensors file: `ids` I32 [tokens], `crc` U32 (one per piece of the arrays, in their order), and the arrays of the cache
under their names ("k.codes" …), as they stand, the last page whole. Metadata: `format`, `version`, and `identity`, a JSON object of all
that the bits depend on besides the ids.
"""

from __future__ import annotations

import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qwenc.attention.cache import KVCache, cache_arrays, is_paged
from qwenc.checkpoint.layout import TensorSpec
from qwenc.checkpoint.packed_writer import PackedWriter
from qwenc.checkpoint.safetensors_file import SafetensorsFile
from qwenc.errors import QwencError
from qwenc.kv_store.arrays import pages_of, pieces, used_arrays

FORMAT, VERSION = "qwenc-kv", "1"
WORKERS = min(4, os.cpu_count() or 1)  # reading and checking both leave Python


class Damaged(QwencError):
    """A saved prompt that cannot be used. str() says why, for a note: the prompt is computed instead."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A context in memory: ids int64 [tokens], of which prefill computed the first `prefilled`, and copies of the arrays by name."""

    ids: np.ndarray
    prefilled: int
    arrays: dict[str, np.ndarray]

    @classmethod
    def take(cls, ids: np.ndarray, prefilled: int, cache: KVCache) -> Snapshot:
        return cls(ids.copy(), prefilled, {name: array.copy() for name, array in used_arrays(cache, len(ids)).items()})

    def load(self, cache: KVCache, tokens: int) -> None:
        """Copies the first `tokens` tokens into `cache`, which has room for them."""
        for name, array in used_arrays(cache, tokens).items():
            array[:] = self.arrays[name][: len(array)]


class SavedFile:
    """A saved prompt in a file. Raises Damaged for one that is not whole or of another version. Close it, or use it as a context."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = SafetensorsFile(path)
        except QwencError as error:
            raise Damaged(str(error)) from None
        try:
            metadata = self._file.header.metadata
            if (metadata.get("format"), metadata.get("version")) != (FORMAT, VERSION):
                raise Damaged(f"{path}: is no saved prompt of this version of qwenc")
            self.identity = _parse(path, metadata.get("identity", ""))
            self.ids = self._whole("ids", "I32", np.dtype("<i4")).astype(np.int64)
            self._crc = self._whole("crc", "U32", np.dtype("<u4"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> SavedFile:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def prefilled(self) -> int:
        return len(self.ids)

    def load(self, cache: KVCache, tokens: int) -> None:
        """Reads the first `tokens` tokens into `cache`, checking what is read. Raises Damaged; the cache's content is then undefined."""
        arrays, wanted = cache_arrays(cache), pages_of(tokens)
        jobs = [(number, *piece) for number, piece in enumerate(self._pieces(cache)) if not is_paged(piece[0]) or piece[1] < wanted]

        def read(job: tuple) -> None:
            number, name, first, end, shape, dtype = job
            target = arrays[name]
            # a piece may reach beyond the pages that the cache has room for: its check needs them all the same
            buffer = target[first:end] if end <= len(target) else np.empty((end - first, *shape[1:]), dtype)
            flat = buffer.reshape(-1).view(np.uint8)
            info = self._file.info(name)
            try:
                self._file.read_bytes(info.offset + first * (info.nbytes // shape[0]), flat)
            except QwencError as error:
                raise Damaged(str(error)) from None
            if zlib.crc32(flat.data) != self._crc[number]:
                raise Damaged(f"{self.path}: is damaged: what it holds of {name} has another checksum")
            if end > len(target):
                target[first:] = buffer[: len(target) - first]

        with ThreadPoolExecutor(WORKERS) as pool:
            for _ in pool.map(read, jobs):
                pass

    def _pieces(self, cache: KVCache) -> list[tuple[str, int, int, tuple[int, ...], np.dtype]]:
        """The pieces that the file was written in. Raises Damaged where it does not fit the kind of cache."""
        found: list[tuple[str, int, int, tuple[int, ...], np.dtype]] = []
        total = pages_of(len(self.ids))
        stand_ins = {}
        for name, array in cache_arrays(cache).items():
            shape = (total if is_paged(name) else len(array), *array.shape[1:])
            info = self._file.header.tensors.get(name)
            if info is None or info.shape != shape or info.nbytes != int(np.prod(shape)) * array.itemsize:
                raise Damaged(f"{self.path}: is damaged: it lacks the {name} of its prompt")
            stand_ins[name] = _Sized(shape, info.nbytes, array.dtype)
        for name, first, end in pieces(stand_ins):
            found.append((name, first, end, stand_ins[name].shape, stand_ins[name].dtype))
        if len(found) != len(self._crc):
            raise Damaged(f"{self.path}: is damaged: it has {len(self._crc)} checksums instead of {len(found)}")
        return found

    def _whole(self, name: str, kind: str, dtype: np.dtype) -> np.ndarray:
        info = self._file.header.tensors.get(name)
        if info is None or info.dtype != kind or len(info.shape) != 1:
            raise Damaged(f"{self.path}: is damaged: it has no {name}")
        out = np.empty(info.shape, dtype)
        try:
            self._file.read_bytes(info.offset, out.view(np.uint8))
        except QwencError as error:
            raise Damaged(str(error)) from None
        return out


@dataclass(frozen=True, slots=True)
class _Sized:
    """What `pieces` asks of an array."""

    shape: tuple[int, ...]
    nbytes: int
    dtype: np.dtype


DTYPES = {"int8": "I8", "uint8": "U8", "uint16": "U16", "float32": "F32"}


def save(path: Path, ids: np.ndarray, cache: KVCache, identity: dict[str, Any]) -> int:
    """Writes the prompt `ids`, which `cache` holds, as a file that appears only when it is whole. Returns its size in bytes. Raises
    QwencError where it cannot be written."""
    arrays = used_arrays(cache, len(ids))
    parts = list(pieces(arrays))
    with ThreadPoolExecutor(WORKERS) as pool:
        sums = list(pool.map(lambda part: zlib.crc32(arrays[part[0]][part[1] : part[2]].data), parts))
    specs = {"ids": TensorSpec("I32", (len(ids),)), "crc": TensorSpec("U32", (len(sums),))}
    specs |= {name: TensorSpec(DTYPES[array.dtype.name], array.shape) for name, array in arrays.items()}
    metadata = {"format": FORMAT, "version": VERSION, "identity": json.dumps(identity, sort_keys=True)}
    with PackedWriter(path, specs, metadata) as writer:
        writer.write("ids", (), ids.astype("<i4"))
        writer.write("crc", (), np.array(sums, "<u4"))
        for name, first, end in parts:
            writer.write(name, (first,), arrays[name][first:end])
    return writer.file_bytes


def _parse(path: Path, text: str) -> dict[str, Any]:
    try:
        identity = json.loads(text)
    except (ValueError, RecursionError):
        identity = None
    if not isinstance(identity, dict):
        raise Damaged(f"{path}: is damaged: nothing says what it was made by")
    return identity
