"""The memory pages of a mapped file: large ones where the system has them, and read from disk ahead of need."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading

import numpy as np

from qwenc.machine.memory import available_memory

SLICE = 4 << 20  # bytes asked for at once: meanwhile no other thread can map memory
POPULATE_READ = 22  # of Linux 5.14 on; the mmap module does not name it
# A file larger than this part of the available memory is read as it is needed, on pages of any size: reading on would push out what was
# read, and where memory is nearly full, the system moves other pages about for each large one.
MOST_OF_MEMORY = 0.5


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
