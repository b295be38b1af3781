#!/usr/bin/env python3
"""Predict qwenc on an RK3588 (4 Cortex-A76 at 2.3 GHz) without one: cycles of the compiled loops, bytes at a stated memory rate.

    python scripts/a76_model.py              cycles of every kernel, then the reference's two tables beside the prediction
    python scripts/a76_model.py --check      the method on this x86 machine: predicted against measured cycles of the same kernels

Cycles are what llvm-mca says of the assembly that LLVM makes for a Cortex-A76. The model is Qwen3-VL-2B, q4 in decode and q8 in prefill
(`--wmode dual`). Each step takes the longer of its computing and its reading, since a core fetches ahead of what it computes.
Left out: norms, rotary embedding, quantising activations, barriers and the sampler (together 2 to 3 % in the reference's log), cache
misses inside a step, and throttling. Needs llvm-mca (Debian: apt-get install llvm-19).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from loop_cycles import Loop, cycles, loops_of

HERE = Path(__file__).resolve().parent
CORES, GHZ = 4, 2.3
# LLVM knows the A76's pipeline by the name of its server twin, and stands an A57 (half the loads, slower SIMD) in for the A76 itself
MODELS = ("neoverse-n1", "cortex-a76")

# Qwen3-VL-2B
ROWS = 2  # query heads of a kv head, as scripts/kernel_asm.py compiles attention
LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB, HIDDEN, FFN = 28, 16, 8, 128, 151936, 2048, 6144
LAYER_MATRICES = {"qkv": (4096, HIDDEN), "o": (HIDDEN, HIDDEN), "gate_up": (2 * FFN, HIDDEN), "down": (HIDDEN, FFN)}
WEIGHT_BYTES = {"q4": 4.5 / 8, "q8": 8.5 / 8}
BATCH = 256  # prompt tokens that read the weights once
# bytes of a token and kv head in the cache: codes and scales of K and V
KV_BYTES = {"q8": 2 * (HEAD_DIM + 4), "q4": (5 * HEAD_DIM / 8 + (1.5 * HEAD_DIM + 8) / 32) + (HEAD_DIM / 2 + HEAD_DIM / 16)}
UNIT = 32  # keys that share a centre and a step in the plane that blocks are ranked by
LOOK_BYTES, SCAN_BYTES = (HEAD_DIM + HEAD_DIM / 2 + 8) / UNIT, HEAD_DIM / 4  # centre, step, scales; 2-bit codes, of a key
KEPT = 32 * 32  # keys attended to
# scanned: at least so many units, so many times the keys kept, or one in so many (qwenc/model/sparse_plan.py)
SCAN_LEAST, SCAN_TIMES, SCAN_SHARE = 256, 4, 3

# the reference on the board (its documentation): context: (prefill s exact, sparse), (attention ms exact, sparse), (token ms exact, sparse)
REFERENCE = {
    506: ((13.09, 13.65), (9.7, 13.4), (52.5, 56.6)),
    2046: ((51.84, 51.50), (48.9, 39.1), (92.3, 82.3)),
    4059: ((148.50, 106.11), (110.7, 55.4), (155.2, 100.0)),
}
CONTEXTS = (506, 2046, 4059, 8192, 16384)


# ---- cycles of a kernel --------------------------------------------------------------------------------------------------------
# what --check compiles for: LLVM 19 has no model of 512-bit units as they are in a Zen 5 (it takes a Zen 4's, of half the width)
X86 = {"NUMBA_CPU_NAME": "znver3", "NUMBA_CPU_FEATURES": "+sse4.2,+avx2,+fma,+f16c,+bmi,+bmi2,+popcnt,+lzcnt"}
DOT, WORDS = r"sdot|vpdpbusd|vpmaddubsw", r"vpmaddwd"  # words: 15 bits at once instead of two pieces, where nothing else multiplies
FMA, COMPARE, NARROW = r"fmla|vf\w*(add|sub)\d+ps", r"fcmgt|vcmpn?ltps|vmaxps", r"shrn2?|vpack[us]sdw"


@dataclass(frozen=True)
class Tile:
    """A loop of dot products. products: per unit of work; around: products between two turns of the loop that it stands in, whose other
    instructions count too (0: so many that they do not)."""

    products: float
    around: float = 0


@dataclass(frozen=True)
class Passes:
    """Loops over vectors, each known by an instruction that comes `often` times per vector, in a loop without `never`.
    steps: 16-lane steps per unit of work."""

    steps: float
    loops: tuple[tuple[str, float, str], ...]


WEIGHED, PIECES, LARGEST = (COMPARE, 1, NARROW), (NARROW, 0.5, DOT), (COMPARE, 1, f"{FMA}|{NARROW}|fmul")
NEAREST = "frint[nx]|vrndscaleps|vroundps"
KERNELS: dict[str, Tile | Passes] = {
    # unit: a multiply-add; an activation of q8 has two pieces
    **{f"{kind}_{fmt}": Tile(2 if fmt == "q8" else 1) for fmt in ("q4", "q8fast", "q8") for kind in ("gemv", "gemm")},
    # unit: one query row and key; queries and probabilities have two pieces, except where only blocks are ranked
    "scores_q8": Tile(2 * HEAD_DIM, 16 * ROWS * 2 * HEAD_DIM),
    "softmax": Passes(1 / 16, ((FMA, 9, DOT), LARGEST)),
    "weights_q8": Passes(1 / 16, (WEIGHED, PIECES)),
    "values_q8": Tile(2 * HEAD_DIM, 256 * ROWS * 2 * 16),
    "scores_q5": Tile(HEAD_DIM, 16 * ROWS * HEAD_DIM),  # one piece of a query
    "fold_q5": Passes(HEAD_DIM / 16 / UNIT, (WEIGHED, (NEAREST, 1, DOT))),
    # blocks are ranked by a look at every unit of 32 keys, three products a dimension, and a scan of some at 2 bits
    "look_plane": Tile(3 * HEAD_DIM / UNIT, 8 * ROWS * 3 * HEAD_DIM),
    "fold_plane": Passes(HEAD_DIM / 16 / UNIT, ((r"mul|vpmullw", 0.5, DOT),)),
    "scores_plane": Tile(HEAD_DIM, 16 * ROWS * HEAD_DIM),
    "weights_q4": Passes(HEAD_DIM / 32 / 16, (WEIGHED, PIECES)),
    "values_q4": Tile(2 * HEAD_DIM, 256 * ROWS * 2 * 32),
}


def kernel_cycles(kernel: Tile | Passes, assembly: str, cpu: str) -> float:
    """Cycles per unit of work. Raises RuntimeError if the assembly does not hold the loops."""
    every = loops_of(assembly)
    loops = [loop for loop in every if not loop.inner and not loop.count(r"bl|call\w*|ret\w*")]
    if isinstance(kernel, Tile):
        dot = DOT if any(loop.count(DOT) for loop in loops) else WORDS
        loop = _most(loops, dot)
        cost = cycles(loop.lines, cpu) / (loop.count(dot) * 4 * lanes(loop))
        outer = [other for other in every if loop in other.inner]
        if kernel.around and outer:
            cost += cycles(outer[-1].own, cpu) / kernel.around
        return cost * kernel.products
    total = 0.0
    for marker, often, never in kernel.loops:
        loop = _most([loop for loop in loops if not loop.count(never)], marker)
        total += cycles(loop.lines, cpu) / (loop.count(marker) / often * lanes(loop) / 16)
    return total * kernel.steps


def _most(loops: list[Loop], marker: str) -> Loop:
    """The loop with the most of an instruction: the unrolled one, where there is a remainder too."""
    loop = max(loops, key=lambda loop: loop.count(marker), default=None)
    if loop is None or not loop.count(marker):
        raise RuntimeError(f"no loop with {marker}")
    return loop


def lanes(loop: Loop) -> int:
    """32-bit lanes of the vectors in a loop."""
    text = "\n".join(loop.lines)
    return 16 if "%zmm" in text else 8 if "%ymm" in text else 4


def compiled(*options: str, **environment: str) -> dict[str, tuple[float, str]]:
    """Measured cycles per unit of work (0 without --time) and assembly of every kernel, from a process of its own."""
    command = [sys.executable, str(HERE / "kernel_asm.py"), "all", *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr.strip()[-2000:]}")
    parts = re.split(r"^# kernel (\w+) cycles (\S+)\n", done.stdout, flags=re.M)[1:]
    return {name: (float(cycles), text) for name, cycles, text in zip(*[iter(parts)] * 3, strict=True)}


# ---- the model ------------------------------------------------------------------------------------------------------------------
# what the tables are made of: kernels that follow each other
STAGES = {
    "a multiply-add of decode": ("gemv_q4",),
    "a multiply-add of prefill": ("gemm_q8fast",),
    "a row and key, int8": ("scores_q8", "softmax", "weights_q8", "values_q8"),
    "a row and key, 4 bits": ("scores_q5", "fold_q5", "softmax", "weights_q4", "values_q4"),
    "a row and key, looked at": ("look_plane",),
    "a row and key, scanned": ("fold_plane", "scores_plane"),
}


def stage_cycles(cost: dict[str, float]) -> list[float]:
    """Cycles of each of STAGES."""
    return [sum(cost[name] for name in names) for names in STAGES.values()]


class Board:
    """cost: cycles per unit of work of every kernel; rate: GB/s that all cores together read."""

    def __init__(self, cost: dict[str, float], rate: float):
        self.rate = rate
        self.decode, self.prefilled, self.q8, self.q4, self.look, self.scan = stage_cycles(cost)

    def step(self, cycles: float, bytes_: float) -> float:
        """Milliseconds: the longer of computing on all cores and reading."""
        return max(cycles / (CORES * GHZ * 1e6), bytes_ / (self.rate * 1e6))

    def matrices(self) -> float:
        """The weights of one decoded token."""
        shapes = [*LAYER_MATRICES.values()] * LAYERS + [(VOCAB, HIDDEN)]
        return sum(self.step(rows * inputs * self.decode, rows * inputs * WEIGHT_BYTES["q4"]) for rows, inputs in shapes)

    def exact(self, keys: int, kv: str = "q8") -> float:
        """Attention of one token over `keys` keys."""
        per_pair = self.q8 if kv == "q8" else self.q4
        return LAYERS * self.step(keys * HEADS * per_pair, keys * KV_HEADS * KV_BYTES[kv])

    def sparse(self, keys: int, kv: str = "q8") -> float:
        """The same over the likeliest 32 blocks of 32: a look at all units, a scan of some; exact while that is all of them. Sorting the
        units is left out: scalar loops over n/32 numbers."""
        if keys <= KEPT:
            return self.exact(keys, kv)
        scanned = min(keys, max(SCAN_LEAST * UNIT, SCAN_TIMES * KEPT, keys / SCAN_SHARE))
        look = self.step(keys * HEADS * self.look, keys * KV_HEADS * LOOK_BYTES)
        scan = self.step(scanned * HEADS * self.scan, scanned * KV_HEADS * SCAN_BYTES)
        return LAYERS * (look + scan) + self.exact(KEPT, kv)

    def prefill(self, tokens: int) -> tuple[float, float]:
        """(matrices, attention) of a prompt in seconds, exact."""
        weights = sum(rows * inputs for rows, inputs in LAYER_MATRICES.values())
        batches = -(-tokens // BATCH)
        matrices = LAYERS * self.step(tokens * weights * self.prefilled, batches * weights * WEIGHT_BYTES["q8"])
        pairs = tokens * (tokens + 1) / 2 * HEADS
        return matrices / 1e3, LAYERS * self.step(pairs * self.q8, 0) / 1e3


# ---- what is printed --------------------------------------------------------------------------------------------------------------
def print_cycles(costs: dict[str, dict[str, float]]) -> None:
    print("Cycles per unit of work on one core (matrices: multiply-add; attention: query row × key; peak: 32 products a cycle)\n")
    print("| kernel | " + " | ".join(f"{cpu} | share of peak" for cpu in costs) + " |\n|---|" + "--:|--:|" * len(costs))
    for name, kernel in KERNELS.items():
        cells = []
        for cost in costs.values():
            share = f"{kernel.products / 32 / cost[name]:.0%}" if isinstance(kernel, Tile) else ""
            cells.append(f"{cost[name]:.4g} | {share}")
        print(f"| {name} | {' | '.join(cells)} |")
    board = Board(costs[MODELS[0]], 1.0)
    print(f"\n{MODELS[0]}: a core computes through {WEIGHT_BYTES['q4'] / board.decode * GHZ:.1f} GB/s of q4 weights,", end=" ")
    for kv, per_pair in (("q8", board.q8), ("q4", board.q4)):
        rate = KV_BYTES[kv] / (per_pair * HEADS / KV_HEADS) * GHZ
        print(f"{rate:.1f} GB/s of {kv} keys and values ({per_pair * HEADS / KV_HEADS:.0f} cycles a token and kv head)", end=", ")
    print(f"{SCAN_BYTES / (board.scan * HEADS / KV_HEADS) * GHZ:.1f} GB/s of the 2-bit plane.\n")


def print_tables(board: Board, cpu: str) -> None:
    print(f"## {board.rate:g} GB/s, cycles of {cpu}\n")
    print("Prefill, s (reference in brackets)\n\n| n | matrices | attention | exact |\n|--:|--:|--:|--:|")
    for n in CONTEXTS:
        matrices, attention = board.prefill(n)
        reference = f" ({REFERENCE[n][0][0]})" if n in REFERENCE else ""
        print(f"| {n} | {matrices:.1f} | {attention:.1f} | {matrices + attention:.1f}{reference} |")
    print("\nDecode, ms a token: attention / total (reference in brackets)\n")
    print("| n | exact | sparse | --kv-q4 | --kv-q4, sparse |\n|--:|--:|--:|--:|--:|")
    rest = board.matrices()
    for n in CONTEXTS:
        cells = []
        for place, attention in enumerate((board.exact(n), board.sparse(n), board.exact(n, "q4"), board.sparse(n, "q4"))):
            reference = f" ({REFERENCE[n][1][place]} / {REFERENCE[n][2][place]})" if n in REFERENCE and place < 2 else ""
            cells.append(f"{attention:.1f} / {attention + rest:.1f}{reference}")
        print(f"| {n} | {' | '.join(cells)} |")
    print()


def print_goals(costs: dict[str, dict[str, float]], rates: list[float]) -> None:
    n = 4059
    print(f"Goals at {n} tokens: exact attention at most 25 ms, sparse 10 ms, a token 70 ms, a prompt 60 s\n")
    print("| GB/s | cycles of | exact attention | sparse attention | a token, exact | a prompt |\n|--:|---|--:|--:|--:|--:|")
    for rate in rates:
        for cpu, cost in costs.items():
            board = Board(cost, rate)
            values = (board.exact(n), board.sparse(n), board.exact(n) + board.matrices(), sum(board.prefill(n)))
            cells = [f"{value:.1f}{'' if value <= goal else ' (missed)'}" for value, goal in zip(values, (25, 10, 70, 60), strict=True)]
            print(f"| {rate:g} | {cpu} | {' | '.join(cells)} |")


def check(level: str, cpu: str) -> int:
    """Predicted against measured cycles on this machine. Returns how many of STAGES are off by more than 30 %."""
    print(f"Cycles per unit of work, {level} code on this machine, llvm-mca -mcpu={cpu}\n")
    print("| kernel | predicted | measured | ratio |\n|---|--:|--:|--:|")
    found = compiled("--time", QWENC_SIMD=level, NUMBA_CACHE_DIR=os.devnull, **X86)
    measured = {name: cycles for name, (cycles, _) in found.items()}
    predicted = {name: kernel_cycles(kernel, found[name][1], cpu) for name, kernel in KERNELS.items()}
    for name in KERNELS:
        print(f"| {name} | {predicted[name]:.4g} | {measured[name]:.4g} | {predicted[name] / measured[name]:.2f} |")
    off = 0
    for stage, guess, truth in zip(STAGES, stage_cycles(predicted), stage_cycles(measured), strict=True):
        print(f"| **{stage}** | {guess:.4g} | {truth:.4g} | {guess / truth:.2f} |")
        off += not 0.7 <= guess / truth <= 1.3
    print(f"\n{len(STAGES) - off} of the {len(STAGES)} sums that the tables are made of (bold) are within 30 %\n")
    return off


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare the method with measurements on this machine instead")
    parser.add_argument("--simd", default="avx2", help="SIMD level of --check (default avx2)")
    parser.add_argument("--mcpu", help="core of --check, as llvm-mca names it (default: what LLVM says of this one)")
    parser.add_argument("--rate", type=float, nargs="+", default=[20.0, 10.0], help="GB/s that four cores read (default 20 and 10)")
    args = parser.parse_args()
    if args.check:
        import llvmlite.binding as llvm

        return 1 if check(args.simd, args.mcpu or llvm.get_host_cpu_name()) else 0
    found = compiled("--cpu", "cortex-a76")
    costs = {cpu: {name: kernel_cycles(kernel, found[name][1], cpu) for name, kernel in KERNELS.items()} for cpu in MODELS}
    print_cycles(costs)
    for rate in args.rate:
        print_tables(Board(costs[MODELS[0]], rate), MODELS[0])
    print_goals(costs, args.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
