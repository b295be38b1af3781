#!/usr/bin/env python3
"""Print the assembly of one kernel, for this machine or, without a board, for an Arm core.

    python scripts/kernel_asm.py gemv_q4 --cpu cortex-a76

The kernels are compiled as they run, by Numba and LLVM; for another CPU its code is only looked at, never called. `KERNELS` lists them,
with arguments in the shape of Qwen3-VL-2B (head_dim 128, 2 query heads per kv head), so that `scripts/a76_model.py` can time them here.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

ARM_TRIPLE = "aarch64-unknown-linux-gnu"
ARM_FEATURES = {"cortex-a76": "+fp-armv8,+neon,+crc,+lse,+fullfp16,+dotprod", "cortex-a72": "+fp-armv8,+neon,+crc"}
INPUTS, HEAD_DIM, GROUP_ROWS, PAGE_KEYS = 2048, 128, 2, 256
RNG = np.random.default_rng(0)
CHAIN_CYCLES = 4  # a 64-bit multiplication and an exclusive or that wait for each other, on Zen and recent Intel cores


def target_arm(cpu: str) -> None:
    """Make Numba compile for `cpu`. Call it before anything of qwenc.kernels is imported; nothing compiled after it may be called."""
    os.environ |= {"NUMBA_CPU_NAME": cpu, "NUMBA_CPU_FEATURES": ARM_FEATURES[cpu], "NUMBA_CACHE_DIR": os.devnull}
    os.environ.pop("QWENC_SIMD", None)
    platform.machine = lambda: "aarch64"
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.get_process_triple = llvm.get_default_triple = lambda: ARM_TRIPLE


@dataclass(frozen=True)
class Kernel:
    """function: compiled by Numba on its first call; arguments: what it is called with, the last one how many times it does its work;
    work: units of each time."""

    function: Any
    arguments: Callable[[], tuple]
    work: int


def kernels() -> dict[str, Kernel]:
    """Every kernel by name. `work` counts multiply-adds of matrices, query rows × keys of attention (256 keys of one kv head)."""
    return matrix_kernels() | attention_kernels()


def matrix_kernels() -> dict[str, Kernel]:
    from qwenc.kernels.jit import helper
    from qwenc.kernels.linear import linear_many, linear_one, make_ready
    from qwenc.kernels.records import Q4, Q8, TILE, Acts, Q8Fast

    @helper
    def gemv(w, room, acts, out, times):
        for _ in range(times):
            linear_one(w, 0, 0, acts, 0, out, 0)

    @helper
    def gemm(w, room, acts, out, times):
        make_ready(w, 0, 0, room)
        for _ in range(times):
            linear_many(w, room, 0, 0, acts, 0, out, 0)

    def arguments(record: Any, size: int, tokens: int) -> Callable[[], tuple]:
        def make() -> tuple:
            groups, pieces = INPUTS // 32, 2 if record is Q8 else 1
            codes = RNG.integers(0, 100, (1, 1, groups, size)).astype(np.uint8 if record is Q4 else np.int8)
            scales = np.full((1, 1, groups, 16), 0x1C00, np.uint16)
            x = RNG.integers(-127, 128, INPUTS * tokens * pieces).astype(np.int8)
            rows = groups * tokens
            acts = Acts(x, np.full(rows, 0.01, np.float32), np.zeros(rows * pieces, np.int32), np.zeros(0, np.float32))
            return record(codes, scales), np.zeros(groups * 512, np.uint8), acts, np.zeros(16 * tokens, np.float32), 1

        return make

    found = {}
    for fmt, record, size in (("q4", Q4, 256), ("q8", Q8, 512), ("q8fast", Q8Fast, 512)):
        found[f"gemv_{fmt}"] = Kernel(gemv, arguments(record, size, 1), 16 * INPUTS)
        found[f"gemm_{fmt}"] = Kernel(gemm, arguments(record, size, TILE), 16 * INPUTS * TILE)
    return found


def attention_kernels() -> dict[str, Kernel]:
    """The stages of attention, for one segment of keys each: of int8, of 4 bits, and of the 2-bit plane that sparse attention ranks by."""
    from qwenc.attention import cache, look, rows, scan, scores, values
    from qwenc.kernels.jit import helper

    strips, tiles, many, step = HEAD_DIM // 16, PAGE_KEYS // 16, GROUP_ROWS, rows.S_ROW
    int8_tile, q5_tile, plane_tile, look_tile, fold_steps = scores.i8_2, scores.q5_2, scan.scan_2, look.look_2, scan.fold_steps
    int8_values, q4_values, strips_once = values.v8_2, values.v4_2, values.STRIPS_2

    @helper
    def scores_q8(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for i in range(tiles):
                int8_tile((k.codes,), k.scale, r.at, i, strips, r.qp, 0, r.qs, r.qo, 0, v.codes, r.s, 16 * i, step)

    @helper
    def scores_q5(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for i in range(tiles):
                q5_tile((k.upper, k.lower, k.last), None, r.at, i, strips, r.fp, 0, r.fs, r.fb, 0, v.codes, r.s, 16 * i, step)

    @helper
    def scores_plane(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for i in range(tiles):
                plane_tile((plane.codes,), None, r.at, i, strips, c.folded, 0, r.fs, r.fb, 0, None, r.s, 16 * i, step)

    @helper
    def fold_q5(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for unit in range(tiles // 2):
                scores.fold_queries(k, unit, r, many)

    @helper
    def fold_plane(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for page in range(tiles // 16):
                for row in range(many):
                    fold_steps(plane.step, page, 2 * groups, c.q16, row, c.folded, 128 * row, 128 * many)

    @helper
    def look_plane(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            look_tile(
                *(plane.centre, plane.step, plane.scale, 0, 4 * groups, c.q8, c.a8, c.sums, c.qs, 0),
                *(c.mid, c.spread, c.tilt, 0, c.mid.shape[1]),
            )

    @helper
    def softmax(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for row in range(many):
                rows.softmax_segment(r, row, 0, tiles)

    @helper
    def weights_q8(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for row in range(many):
                values.weigh_row(v.scale, r, row, 0, tiles)
                rows.split_weights(r.weights, 0, r, 32 * row, 32 * many, r.ps[0, row], tiles, rows.WORDS)

    @helper
    def weights_q4(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for group in range(groups):
                for row in range(0, many, 2):
                    other = min(row + 1, many - 1)
                    values.weigh_two(v, r, row, other, group, groups, 0, tiles)
                    rows.split_weights(r.weights, 0, r, 32 * row, 32 * many, r.ps[group, row], tiles, False)
                    rows.split_weights(r.weights, rows.SEGMENT_KEYS, r, 32 * other, 32 * many, r.ps[group, other], tiles, False)

    @helper
    def values_q8(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for strip in range(0, strips, strips_once):
                int8_values(
                    *(v.codes, r.at, 0, tiles, 16 * HEAD_DIM, strip, r.pp, 0, r.ps, r.decay, None, 0, (k.codes,), strips),
                    *(r.o, 16 * strip, HEAD_DIM),
                )

    @helper
    def values_q4(k, v, plane, r, c, tiles, groups, times):
        for _ in range(times):
            for group in range(groups):
                q4_values(
                    *(
                        v.codes,
                        r.at,
                        0,
                        tiles,
                        8 * HEAD_DIM,
                        2 * group,
                        r.pp,
                        0,
                        r.ps[group],
                        r.decay,
                        r.pl[group],
                        0,
                        (k.upper, k.lower, k.last),
                        strips,
                    ),
                    *(r.o, 32 * group, HEAD_DIM),
                )

    new_rows: Any = rows.new_rows

    def query_rows() -> Any:  # made by Python: in a process that compiles for another CPU nothing compiled can run
        r = new_rows.py_func(GROUP_ROWS, HEAD_DIM, PAGE_KEYS)
        for i in range(r.at.size):
            r.at[i] = r.pos[i] = 16 * min(i, tiles - 1)
        r.mask[:] = rows.ALL_KEYS
        r.limit[:] = PAGE_KEYS
        r.s[:] = RNG.uniform(0.1, 1, r.s.shape)
        r.q[:] = RNG.uniform(-1, 1, r.q.shape)
        r.fp[:] = RNG.integers(-127, 128, r.fp.shape)
        r.qp[:] = RNG.integers(-127, 128, r.qp.shape)
        r.pp[:] = RNG.integers(0, 128, r.pp.shape)
        for field in (r.m, r.ps, r.qs, r.fs, r.decay):
            field[:] = 0.5
        return r

    def arguments(kv: str) -> tuple:
        choice = new_choice.py_func(GROUP_ROWS, HEAD_DIM, PAGE_KEYS, 32)
        choice.q16[:] = RNG.integers(-32767, 32768, choice.q16.shape)
        choice.folded[:] = RNG.integers(-124, 125, choice.folded.shape)
        choice.q8[:] = RNG.integers(-127, 128, choice.q8.shape)
        choice.a8[:] = np.abs(choice.q8)
        choice.qs[:] = 0.01
        return (*stores[kv], query_rows(), choice, tiles, strips // 2, 1)

    new_choice: Any = look.new_choice
    stores = {}
    for kv in ("q8", "q4"):
        stores[kv] = store = cache.new_cache(kv, PAGE_KEYS, 1, 1, HEAD_DIM, sparse=True)
        for array in cache.cache_arrays(store).values():
            array[:] = 0x1C00 if array.dtype == np.uint16 else 0.01 if array.dtype == np.float32 else RNG.integers(0, 100, array.shape)
    int8 = (scores_q8, softmax, weights_q8, values_q8, look_plane, fold_plane, scores_plane)
    small = (scores_q5, fold_q5, weights_q4, values_q4)
    found = {}
    for function in (*int8, *small):
        found[function.__name__] = Kernel(function, partial(arguments, "q8" if function in int8 else "q4"), GROUP_ROWS * PAGE_KEYS)
    return found


def assembly(kernel: Kernel) -> str:
    """Of the kernel and all that it calls, and of Numba's wrappers around it."""
    from numba import typeof

    signature = tuple(typeof(argument) for argument in kernel.arguments())
    kernel.function.compile(signature)
    return kernel.function.inspect_asm(signature)


def measured_cycles(kernel: Kernel) -> float:
    """Core cycles per unit of work, all data in the first caches: the least of 7 runs of about 20 ms, timed against a chain of
    multiplications of known length just before and after each."""

    from qwenc.kernels.jit import helper

    @helper
    def chain(steps, x):
        for _ in range(steps):
            x = (x * 6364136223846793005) ^ (x >> 7)  # LLVM would join two steps of a sum into one
        return x

    arguments = kernel.arguments()[:-1]
    kernel.function(*arguments, 1)
    chain(1, 1)
    times = max(1, int(0.02 * times_a_second(lambda n: kernel.function(*arguments, n))))
    steps, best = 2_000_000, float("inf")
    for _ in range(7):
        before = seconds(chain, steps, 1)
        taken = seconds(kernel.function, *arguments, times)
        after = seconds(chain, steps, 1)
        cycle = min(before, after) / (steps * CHAIN_CYCLES)
        best = min(best, taken / cycle / (times * kernel.work))
    return best


def times_a_second(run: Callable[[int], Any]) -> float:
    return 100 / seconds(run, 100)


def seconds(function: Callable, *arguments: Any) -> float:
    began = time.perf_counter()
    function(*arguments)
    return time.perf_counter() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernel", nargs="+", help="names, or all")
    parser.add_argument("--time", action="store_true", help="also run each kernel here and print its cycles per unit of work")
    parser.add_argument("--cpu", choices=ARM_FEATURES, help="an Arm core (default: this machine)")
    args = parser.parse_args()
    if args.cpu:
        if args.time:
            parser.error("only kernels for this machine can be timed here")
        target_arm(args.cpu)
    known = kernels()
    for name in known if args.kernel == ["all"] else args.kernel:
        if name not in known:
            parser.error(f"no kernel {name} (known: {', '.join(known)})")
        timed = measured_cycles(known[name]) if args.time else 0.0
        print(f"# kernel {name} cycles {timed:.6g}\n{assembly(known[name])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
