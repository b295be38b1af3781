#!/usr/bin/env python3
"""Measure how fast this machine's cores read memory: the ceiling of every decode step.

    python scripts/stream_rate.py --threads 2

The threads share one array far beyond the last cache, on huge pages, and take pieces of it in turn, so that an uneven core does not
hold up the rest. It is read with 64-byte loads into eight accumulators, in several ways (one stream or four, with or without asking
for lines ahead); each pass counts with its best way. Needs numpy and numba.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import mmap
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

PIECE = 8 << 20  # bytes that a thread takes at once
ACCUMULATORS = 8
LINE = 64
I8, I32, I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
WIDE = ir.VectorType(I64, 8)


def make_read(streams: int, ahead: int) -> Callable[[np.ndarray, int], int]:
    """read(bytes, first): XOR of PIECE bytes from `first` on, in `streams` streams side by side, asking for lines `ahead` bytes early
    (0: leave that to the core)."""
    each = ACCUMULATORS // streams

    @intrinsic
    def xor_piece(typingctx, values, first):
        def codegen(context, builder, sig, arguments):
            data = builder.bitcast(context.make_array(sig.args[0])(context, builder, arguments[0]).data, I8.as_pointer())
            start = builder.gep(data, [arguments[1]])
            sums = [cgutils.alloca_once_value(builder, ir.Constant(WIDE, [0] * 8)) for _ in range(ACCUMULATORS)]
            fetch_type = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), I32, I32, I32])
            fetch = cgutils.get_or_insert_function(builder.module, fetch_type, "llvm.prefetch")
            with cgutils.for_range(builder, I64(PIECE // (LINE * ACCUMULATORS))) as loop:
                at = builder.mul(loop.index, I64(LINE * each))
                for i, total in enumerate(sums):
                    place = builder.add(at, I64(i // each * (PIECE // streams) + i % each * LINE))
                    pointer = builder.gep(start, [place])
                    if ahead:
                        builder.call(fetch, [builder.gep(pointer, [I64(ahead)]), I32(0), I32(3), I32(1)])
                    line = builder.load(builder.bitcast(pointer, WIDE.as_pointer()), align=LINE)
                    builder.store(builder.xor(builder.load(total), line), total)
            whole = builder.load(sums[0])
            for total in sums[1:]:
                whole = builder.xor(whole, builder.load(total))
            result = builder.extract_element(whole, I32(0))
            for lane in range(1, 8):
                result = builder.xor(result, builder.extract_element(whole, I32(lane)))
            return result

        return types.int64(values, types.int64), codegen

    return njit(nogil=True)(lambda values, first: xor_piece(values, first))


def stream_rate(threads: int, megabytes: int = 1024, passes: int = 5, values: np.ndarray | None = None) -> list[float]:
    """GB/s of each pass, all threads together, over one array of `megabytes` MiB, or over the bytes `values`: whole pieces of them."""
    if values is None:
        values = _huge_array(max(1, (megabytes << 20) // PIECE) * PIECE)
    values = values[: values.size // PIECE * PIECE]
    ways = [make_read(streams, ahead) for streams in (1, 4) for ahead in (0, 2048, 4096)]
    for read in ways:
        read(values, 0)
    return [max(_pass(read, values, threads) for read in ways) for _ in range(passes)]


def _pass(read: Callable[[np.ndarray, int], int], values: np.ndarray, threads: int) -> float:
    """GB/s of reading the whole array once."""
    pieces = itertools.count()
    together = threading.Barrier(threads)
    began, ended = np.empty(threads), np.empty(threads)

    def work(thread: int) -> None:
        together.wait()
        began[thread] = time.perf_counter()
        while (first := next(pieces) * PIECE) < values.size:
            read(values, first)
        ended[thread] = time.perf_counter()

    team = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for member in team:
        member.start()
    for member in team:
        member.join()
    # from the first start to the last end: this thread's own clock would start late when all cores are busy
    return values.size / 1e9 / float(ended.max() - began.min())


def _huge_array(size: int) -> np.ndarray:
    """`size` bytes, touched, on huge pages where the system gives them; a piece more is reserved behind them."""
    buffer = mmap.mmap(-1, size + PIECE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets small pages
    with contextlib.suppress(OSError, AttributeError):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    values = np.frombuffer(buffer, np.uint8)
    start = -values.ctypes.data % (2 << 20)
    values[start : start + size] = 1
    return values[start : start + size]


def mapped_file(path: Path) -> np.ndarray:
    """The bytes of a file, mapped as qwenc maps its own: on large pages where it gets them."""
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    with contextlib.suppress(OSError, AttributeError):
        mapped.madvise(mmap.MADV_HUGEPAGE)
    values = np.frombuffer(mapped, np.uint8)
    return values[-values.ctypes.data % LINE :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--file", type=Path, help="read this file, mapped, instead of an array: pages that lie elsewhere may be slower")
    parser.add_argument("--megabytes", type=int, default=1024, help="size of the array that all threads read (default 1024)")
    args = parser.parse_args()
    rates = stream_rate(args.threads, args.megabytes, values=None if args.file is None else mapped_file(args.file))
    print(f"{args.threads} threads: median {statistics.median(rates):.1f} GB/s, best {max(rates):.1f}, worst {min(rates):.1f}")


if __name__ == "__main__":
    main()
