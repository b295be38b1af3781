"""How many 8-bit products this machine's cores do a second: the ceiling of a prefill. `python scripts/product_rate.py`."""

from __future__ import annotations

import argparse
import sys
import threading
import time
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qwenc.kernels.emit import Emitter
from qwenc.kernels.level import LEVEL

SUMS = 12 if LEVEL.vector_bytes == 64 else 3  # of 64 bytes each: as many as hide the latency and stay in registers
STEPS = 4_000_000
REPEAT = 4


@intrinsic
def dot_many(typingctx, steps):
    """`steps` rounds of SUMS dot products of 16 lanes × 4 bytes, on registers."""

    def codegen(context, builder, sig, arguments):
        e = Emitter(builder)
        sums = [[cgutils.alloca_once_value(builder, part) for part in e.constant(e.i32, i)] for i in range(SUMS)]
        with cgutils.for_range(builder, arguments[0]) as loop:
            x = e.each(builder.bitcast, e.splat(builder.trunc(loop.index, ir.IntType(32)), e.i32), [e.i8] * e.parts)
            small = e.low_nibbles(x)
            for total in sums:
                held = [builder.load(slot) for slot in total]
                for slot, part in zip(total, e.dot_small(held, small, x), strict=True):
                    builder.store(part, slot)
        whole = builder.load(sums[0][0])
        for total in sums:
            for slot in total:
                whole = builder.xor(whole, builder.load(slot))
        return builder.sext(builder.extract_element(whole, ir.IntType(32)(0)), ir.IntType(64))

    return types.int64(types.int64), codegen


@njit(nogil=True)
def run(steps):
    return dot_many(steps)


def product_rate(threads: int) -> float:
    """10^9 products a second, all threads together: the best of a few passes."""
    run(1)
    return max(_pass(threads) for _ in range(REPEAT))


def _pass(threads: int) -> float:
    together = threading.Barrier(threads)
    began, ended = np.empty(threads), np.empty(threads)

    def work(thread: int) -> None:
        together.wait()
        began[thread] = time.perf_counter()
        run(STEPS)
        ended[thread] = time.perf_counter()

    team = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for member in team:
        member.start()
    for member in team:
        member.join()
    return threads * STEPS * SUMS * 64 / 1e9 / float(ended.max() - began.min())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-t", "--threads", type=int, default=2)
    args = parser.parse_args()
    print(f"{args.threads} threads, {LEVEL.name}: {product_rate(args.threads):.0f}e9 8-bit products a second")


if __name__ == "__main__":
    main()
