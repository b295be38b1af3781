"""The memory that a file lies in: mapped, on large pages where the system has them and read from disk ahead of need; or the process's
own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import os
import threading
from io import FileIO
from pathlib import Path

import numpy as np

from qwenc.errors import QwencError
from qwenc.machine.memory import available_bytes, available_memory
from qwenc.machine.reserve import reserve

SLICE = 4 << 20  # bytes asked for at once: meanwhile no other thread can map memory
POPULATE_READ = 22  # of Linux 5.14 on; the mmap module does not name it
# A file larger than this part of the available memory is read as it is needed, on pages of any size: reading on would push out what was
# read, and where memory is nearly full, the system moves other pages about for each large one.
MOST_OF_MEMORY = 0.5
READERS = 4  # threads that read a file into memory: one would be held up by the pages that it is the first to touch


def map_file(path: Path, size: int) -> np.ndarray:
    """The bytes of a file of `size` bytes, mapped. Raises QwencError."""
    try:
        with open(path, "rb") as file:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise QwencError(f"{path}: cannot be mapped: {error}") from None
    if len(mapped) != size:
        raise QwencError(f"{path}: changed while it was opened")
    prefer_large_pages(mapped)
    return np.frombuffer(mapped, np.uint8)


def read_file(path: Path, size: int) -> np.ndarray:
    """The same, read into memory of the process, on large pages. Raises QwencError, for a file larger than memory too."""
    available = available_bytes()
    if available is not None and size > available:
        raise QwencError(
            f"{path}: {size / 1e9:.1f} GB do not fit into the {available / 1e9:.1f} GB of memory that are free: leave it mapped"
        )
    places = itertools.count(0, SLICE)
    failed: list[BaseException] = []

    def read() -> None:
        try:
            with FileIO(path) as file:
                while (first := next(places)) < size and not failed:
                    _read_slice(file, data[first : first + SLICE], first)
                if file.seek(0, os.SEEK_END) != size:
                    raise EOFError("changed while it was read")
        except (OSError, EOFError) as error:
            failed.append(error)

    try:
        data = reserve((size,), np.uint8)
        readers = [threading.Thread(target=read, name="qwenc-read", daemon=True) for _ in range(READERS)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    except OSError as error:
        failed.append(error)
    except BaseException as interrupt:
        failed.append(interrupt)  # the readers end
        raise
    if failed:
        reason = getattr(failed[0], "strerror", None) or failed[0]
        raise QwencError(f"{path}: cannot be read: {reason}") from None
    data.flags.writeable = False
    return data


def _read_slice(file: FileIO, room: np.ndarray, first: int) -> None:
    file.seek(first)
    while room.size:
        count = file.readinto(room.data)
        if not count:
            raise EOFError("changed while it was read")
        room = room[count:]


def prefer_large_pages(mapped: mmap.mmap) -> None:
    """Ask for 2 MiB pages where the file is read from disk from now on: decode is quicker on them (docs/benchmarks.md)."""
    if not _fits(len(mapped)):
        return
    with contextlib.suppress(OSError, AttributeError):  # another system, or a kernel without them
        mapped.madvise(mmap.MADV_HUGEPAGE)


def read_ahead(data: np.ndarray) -> threading.Thread | None:
    """Bring the parts of a mapped file (`data`: its bytes) that are not in memory there, in a thread of its own, in order. None where that
    cannot be done or would not help. What is in memory already costs a look at one byte per page."""
    if not _fits(data.size):
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        for call in (libc.mincore, libc.madvise):
            call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p if call is libc.mincore else ctypes.c_int]
    except (OSError, AttributeError):
        return None
    thread = threading.Thread(target=_read, args=(libc, data), name="qwenc-read-ahead", daemon=True)
    thread.start()
    return thread


def _fits(size: int) -> bool:
    available = available_memory()
    return available is not None and size <= MOST_OF_MEMORY * available


def _read(libc: ctypes.CDLL, data: np.ndarray) -> None:
    present = np.empty(-(-SLICE // mmap.PAGESIZE), np.uint8)
    for first in range(0, data.size, SLICE):
        size, start = min(SLICE, data.size - first), data.ctypes.data + first
        if libc.mincore(start, size, present.ctypes.data):
            return
        if not (present[: -(-size // mmap.PAGESIZE)] & 1).all() and libc.madvise(start, size, POPULATE_READ):
            return  # an older kernel, or a file that shrank: whoever reads it will tell
