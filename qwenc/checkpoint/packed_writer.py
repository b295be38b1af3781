"""Writes a packed file slice by slice, in any order; nothing appears under the final name before all of it is there."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import glob
import json
import math
import os
import secrets
import shutil
from pathlib import Path

import numpy as np

from qwenc.checkpoint.layout import TensorSpec
from qwenc.errors import QwencError

_TEMP_SUFFIX = ".part"
ALIGN = 64  # bytes: a cache line, and the widest SIMD load
_CODES = {"U8": "u1", "I8": "i1", "U16": "<u2", "F16": "<u2", "U32": "<u4", "I32": "<i4", "F32": "<f4"}
NUMPY_DTYPES: dict[str, np.dtype] = {name: np.dtype(code) for name, code in _CODES.items()}


class PackedWriter:
    """A context manager. Leaving it normally syncs the file and renames it to `path`; leaving it by any exception removes it.

    Raises QwencError where the folder cannot be written or the disk is full, which shows before the first tensor where the file
    system can reserve space.
    """

    def __init__(self, path: Path, tensors: dict[str, TensorSpec], metadata: dict[str, str]) -> None:
        self.path = path
        self._tensors = tensors
        header, self._offsets, self.file_bytes = _layout(tensors, metadata)
        remove_stale_temps(path.parent, path.name)
        self._temp, self._fd = _create_temp(path)
        try:
            self._reserve()
            self._pwrite(header, 0)
        except BaseException:
            self._abandon()
            raise

    def __enter__(self) -> PackedWriter:
        return self

    def __exit__(self, kind: object, *exc: object) -> None:
        if kind is not None:
            self._abandon()
            return
        try:
            os.fsync(self._fd)
            if hasattr(os, "posix_fadvise"):  # read again, it comes on large pages (checkpoint/pages.py); as it was written, on small ones
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.replace(self._temp, self.path)
        except BaseException as error:
            self._abandon()
            if isinstance(error, OSError):
                raise self._failure(error) from None
            raise
        os.close(self._fd)
        _sync_folder(self.path.parent)

    def write(self, name: str, index: tuple[int, ...], values: np.ndarray) -> None:
        """Stores `values` at tensor[index], index being a prefix of the axes; `values` may go on over following rows. Thread-safe."""
        spec = self._tensors[name]
        dtype = NUMPY_DTYPES[spec.dtype]
        if values.dtype != dtype:
            raise ValueError(f"{name} holds {dtype}, not {values.dtype}")
        strides = [math.prod(spec.shape[axis + 1 :]) for axis in range(len(index))]
        start = sum(i * stride for i, stride in zip(index, strides, strict=True)) * dtype.itemsize
        if start + values.nbytes > spec.nbytes:
            raise ValueError(f"{name} {spec.shape}: {values.shape} at {index} goes beyond it")
        self._pwrite(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data, self._offsets[name] + start)

    def _reserve(self) -> None:
        """Claims the whole file's space, so that a full disk shows now."""
        free = shutil.disk_usage(self.path.parent).free
        if free < self.file_bytes:
            raise QwencError(f"{self.path}: needs {show_bytes(self.file_bytes)}, but only {show_bytes(free)} is free on its disk")
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self._fd, 0, self.file_bytes)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise self._failure(error) from None
        try:
            os.ftruncate(self._fd, self.file_bytes)
        except OSError as error:
            raise self._failure(error) from None

    def _pwrite(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        done = 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done : done + (1 << 30)], offset + done)
            except OSError as error:
                raise self._failure(error) from None

    def _failure(self, error: OSError) -> QwencError:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return QwencError(f"{self.path}: the disk is full ({show_bytes(self.file_bytes)} needed)")
        return QwencError(f"{self.path}: cannot be written: {error.strerror}")

    def _abandon(self) -> None:
        with contextlib.suppress(OSError):
            self._temp.unlink()
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _create_temp(path: Path) -> tuple[Path, int]:
    """A new file beside `path`, open and locked: the lock tells a running writer from a leftover."""
    while True:
        temp = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_TEMP_SUFFIX}")
        try:
            fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except OSError as error:
            raise QwencError(f"{path}: cannot be written: {error.strerror}") from None
        with contextlib.suppress(OSError):  # some file systems have no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink:
            return temp, fd
        os.close(fd)  # another process took it for a leftover, just before the lock


def remove_stale_temps(folder: Path, name: str | None = None) -> None:
    """Removes what killed writers left in `folder` (of the file `name` only, if given). Files of running writers are locked, and stay."""
    for temp in folder.glob(f".{glob.escape(name) if name else '*'}.*{_TEMP_SUFFIX}"):
        with contextlib.suppress(OSError), open(temp, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            temp.unlink()


def _layout(tensors: dict[str, TensorSpec], metadata: dict[str, str]) -> tuple[bytes, dict[str, int], int]:
    """(header bytes, offset in the file of each tensor, file size).

    safetensors allows no gap between tensors, so that alignment needs filler tensors, named `pad.N`; the header is filled with spaces.
    """
    entries: dict[str, object] = {"__metadata__": metadata}
    offsets: dict[str, int] = {}
    end = 0
    for name, spec in tensors.items():
        fill = -end % ALIGN
        if fill:
            entries[f"pad.{len(entries)}"] = {"dtype": "U8", "shape": [fill], "data_offsets": [end, end + fill]}
            end += fill
        offsets[name] = end
        end += spec.nbytes
        entries[name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [offsets[name], end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    data_start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data_start + at for name, at in offsets.items()}, data_start + end


def _sync_folder(folder: Path) -> None:
    """Makes the rename last. Some file systems refuse; the file is complete all the same."""
    with contextlib.suppress(OSError):
        fd = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def show_bytes(nbytes: int) -> str:
    """A size for people: "1.83 GB", "335 MB", "12 kB"."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.2f} GB"
    return f"{nbytes / 1e6:.0f} MB" if nbytes >= 1e6 else f"{nbytes / 1e3:.0f} kB"
