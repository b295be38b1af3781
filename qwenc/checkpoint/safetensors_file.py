"""Reads one safetensors file by row ranges, as float32, after checking that the file is whole.

Reads with pread and not through a map: a file that shrinks meanwhile is then an error and not a bus error, and source pages never
count as memory of the process.
"""

from __future__ import annotations

import json
import math
import os
import stat
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwenc.errors import QwencError

# dtype name in the file -> bytes per element. Only the first three can be read as weights; the others are known for their size.
WEIGHT_DTYPES = {"BF16": 2, "F16": 2, "F32": 4}
ITEM_BYTES = {**WEIGHT_DTYPES, "F64": 8, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1, "U8": 1, "BOOL": 1}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors package
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies: dtype name, shape, first byte (from the start of the file) and byte count."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. json_bytes is its text, which names the content well enough to key a cache."""

    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]
    file_bytes: int
    json_bytes: bytes


class SafetensorsFile:
    """An open file: `header` tells what is in it, `rows` and `tensor` read. Reading is thread-safe. Raises QwencError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_regular(path)
        try:
            self._fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise QwencError(f"{path}: cannot be opened: {error.strerror}") from None
        try:
            self.header = _read_header(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def info(self, name: str) -> TensorInfo:
        if name not in self.header.tensors:
            raise QwencError(f"{self.path}: has no tensor {name}")
        return self.header.tensors[name]

    def tensor(self, name: str) -> np.ndarray:
        """The whole tensor as float32, in its shape."""
        info = self.info(name)
        return self._read(name, info, 0, math.prod(info.shape)).reshape(info.shape)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """tensor[start:stop] along its first axis, as float32."""
        info = self.info(name)
        if not info.shape or not 0 <= start <= stop <= info.shape[0]:
            raise ValueError(f"rows {start}:{stop} of {name} {info.shape}")
        row = math.prod(info.shape[1:])
        return self._read(name, info, start * row, stop * row).reshape(stop - start, *info.shape[1:])

    def read_bytes(self, offset: int, out: np.ndarray) -> None:
        """Fills `out`, uint8, with what the file holds from `offset` on."""
        _pread_exactly(self._fd, out, offset, self.path)

    def _read(self, name: str, info: TensorInfo, start: int, stop: int) -> np.ndarray:
        """Elements start…stop of the flat tensor, widened exactly to float32."""
        if info.dtype not in WEIGHT_DTYPES:
            raise QwencError(f"{self.path}: tensor {name} is {info.dtype}; only {', '.join(WEIGHT_DTYPES)} weights are supported")
        size = WEIGHT_DTYPES[info.dtype]
        raw = np.empty(stop - start, np.dtype(f"<u{size}"))
        _pread_exactly(self._fd, raw.view(np.uint8), info.offset + start * size, self.path)
        if info.dtype == "BF16":
            return np.left_shift(raw, np.uint32(16), dtype=np.uint32).view(np.float32)
        return raw.view("<f2").astype(np.float32) if info.dtype == "F16" else raw.view(np.float32)


def require_regular(path: Path) -> None:
    """Raises QwencError for a folder, a pipe or a device: opening one may wait for ever. A missing file is left to whoever opens it."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        raise QwencError(f"{path}: cannot be opened: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(mode):
        raise QwencError(f"{path}: is {'a folder' if stat.S_ISDIR(mode) else 'a pipe, a socket or a device'}, not a file")


def _read_header(fd: int, path: Path) -> Header:
    """Reads the header and checks that the file holds exactly the bytes it promises."""
    file_bytes = os.fstat(fd).st_size
    if file_bytes == 0:
        raise QwencError(f"{path}: is empty (incomplete download?)")
    start = os.pread(fd, 512, 0)
    if start.startswith(b"version https://git-lfs"):
        raise QwencError(f"{path}: is a Git LFS pointer, not the weights (run `git lfs pull` in the checkpoint)")
    if start.lstrip()[:1] == b"<":
        raise QwencError(f"{path}: is an HTML or XML page, not a safetensors file (a download that went wrong?)")
    length = int.from_bytes(start[:8], "little")
    if file_bytes < 8 or length > MAX_HEADER_BYTES:
        raise QwencError(f"{path}: is not a safetensors file")
    if 8 + length > file_bytes:
        raise QwencError(f"{path}: its header of {length} bytes goes beyond the file of {file_bytes} bytes (incomplete download?)")
    text = bytearray(length)
    _pread_exactly(fd, np.frombuffer(text, np.uint8), 8, path)
    metadata, tensors = _parse_header(bytes(text), 8 + length, path)
    promised = max((info.offset + info.nbytes for info in tensors.values()), default=8 + length)
    if promised > file_bytes:
        raise QwencError(f"{path}: is {file_bytes} bytes long but its header promises {promised} (incomplete download?)")
    if promised < file_bytes:
        raise QwencError(f"{path}: is {file_bytes} bytes long but its header describes only {promised}")
    return Header(metadata, tensors, file_bytes, bytes(text))


def _parse_header(text: bytes, data_start: int, path: Path) -> tuple[dict[str, str], dict[str, TensorInfo]]:
    try:
        entries = json.loads(text)
    except ValueError:  # also what UnicodeDecodeError is
        raise QwencError(f"{path}: is not a safetensors file (its header is not JSON)") from None
    except RecursionError:
        raise QwencError(f"{path}: is not a safetensors file (its header nests too deep)") from None
    if not isinstance(entries, dict):
        raise QwencError(f"{path}: is not a safetensors file (its header is not a JSON object)")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise QwencError(f"{path}: its header has a malformed __metadata__")
    return metadata, {name: _parse_entry(name, entry, data_start, path) for name, entry in entries.items()}


def _parse_entry(name: str, entry: object, data_start: int, path: Path) -> TensorInfo:
    malformed = QwencError(f"{path}: its header has a malformed entry for tensor {name}")
    if not isinstance(entry, dict) or not isinstance(entry.get("dtype"), str):
        raise malformed
    dtype, shape, offsets = entry["dtype"], _counts(entry.get("shape")), _counts(entry.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise malformed
    begin, end = offsets
    expected = math.prod(shape) * ITEM_BYTES[dtype] if dtype in ITEM_BYTES else end - begin
    if begin > end or end - begin != expected:
        raise malformed
    return TensorInfo(dtype, shape, data_start + begin, end - begin)


def _counts(value: object) -> tuple[int, ...] | None:
    """A JSON list of whole numbers from 0 up, or None for anything else."""
    if not isinstance(value, list) or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in value):
        return None
    return tuple(value)


def _pread_exactly(fd: int, out: np.ndarray, offset: int, path: Path) -> None:
    """Fills `out` (uint8) from `offset`."""
    done = 0
    while done < len(out):
        try:
            got = os.pread(fd, min(len(out) - done, _READ_BYTES), offset + done)
        except OSError as error:
            raise QwencError(f"{path}: cannot be read: {error.strerror}") from None
        if not got:
            raise QwencError(f"{path}: became shorter while it was read")
        out[done : done + len(got)] = np.frombuffer(got, np.uint8)
        done += len(got)
