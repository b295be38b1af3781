#!/usr/bin/env python3
"""Measure how fast this machine's cores read memory: the ceiling of every decode step.

    python scripts/stream_rate.py --threads 2

Each thread sums its own large array, far beyond the last cache, in several streams with several accumulators. Needs numpy and numba.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import numpy as np
from numba import njit

STREAMS = 4


@njit(nogil=True)
def read(values):
    """Sum of int64 values [n], n a multiple of 4. Integer sums may be reordered: LLVM makes wide loads and many accumulators."""
    quarter = values.shape[0] // STREAMS
    a, b = values[:quarter], values[quarter : 2 * quarter]
    c, d = values[2 * quarter : 3 * quarter], values[3 * quarter :]
    s0 = s1 = s2 = s3 = 0
    for i in range(quarter):
        s0 += a[i]
        s1 += b[i]
        s2 += c[i]
        s3 += d[i]
    return s0 + s1 + s2 + s3


def stream_rate(threads: int, megabytes: int = 512, passes: int = 9) -> list[float]:
    """GB/s of each pass, all threads together. Each thread reads `megabytes` MB of its own."""
    arrays = [np.ones(megabytes * 1_000_000 // 8 // STREAMS * STREAMS, np.int64) for _ in range(threads)]
    read(arrays[0][:1024])
    together = threading.Barrier(threads)
    began, ended = np.empty((passes, threads)), np.empty((passes, threads))

    def work(thread: int) -> None:
        for i in range(passes):
            together.wait()
            began[i, thread] = time.perf_counter()
            read(arrays[thread])
            ended[i, thread] = time.perf_counter()

    team = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for member in team:
        member.start()
    for member in team:
        member.join()
    # From the first start to the last end: this thread's own clock would start late when all cores are busy.
    seconds = ended.max(axis=1) - began.min(axis=1)
    return (sum(values.nbytes for values in arrays) / 1e9 / seconds).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=512, help="read by each thread (default 512)")
    args = parser.parse_args()
    rates = stream_rate(args.threads, args.megabytes)
    print(f"{args.threads} threads: median {statistics.median(rates):.1f} GB/s, best {max(rates):.1f}, worst {min(rates):.1f}")


if __name__ == "__main__":
    main()
