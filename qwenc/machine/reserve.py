"""Memory that is handed out as it is used."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np


def reserve(shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """A zero array whose pages the system hands out when they are first written, large ones if it can. Larger than memory is fine until
    then."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0)
    buffer = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            buffer.madvise(mmap.MADV_HUGEPAGE)  # fewer TLB misses on long scans
    return np.frombuffer(buffer, dtype, count=int(np.prod(shape))).reshape(shape)
