#!/usr/bin/env python3
"""A greedy run of the tiny checkpoint as an Arm CPU and here, to compare its tokens, the integers of its cache and its floats.

    python scripts/arm_greedy.py pack FOLDER                    here: the checkpoint in every weight format, packed
    python scripts/arm_greedy.py key FOLDER                     there, in an emulated Python: for what Numba compiles, to FOLDER/key
    python scripts/arm_greedy.py compile FOLDER --cpu CPU       here: the model's steps for that CPU, into the JIT cache in FOLDER/jit
    python scripts/arm_greedy.py run FOLDER                     there or here: prints what to compare

Compiling a model's steps takes a minute or two, and an hour under emulation: so Numba's cache is filled here, with code for the other CPU,
and the run there finds it. Both want the same Python and Numba. `scripts/arm_check.sh` does all of this.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "goldens" / "qwen3-dense-tied"
IDS = np.load(GOLDEN / "expected.npz")["input_ids"].tolist()
TOKENS = 24
# weights, cache, sparse attention: what a run goes through
RUNS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("dual", "q8", {}),
    ("q4", "q4", {"sparse_attn": True, "sparse_k": 1, "sparse_block": 8, "sparse_min_ctx": 0, "sparse_pf_min_ctx": 0}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "key", "compile", "run"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--cpu", default="cortex-a76")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.what == "compile":
        compile_there(args.folder, args.cpu)
    else:
        {"pack": pack, "key": tell_key, "run": run}[args.what](args.folder)


def pack(folder: Path) -> None:
    from qwenc.checkpoint.convert import convert

    for wmode in sorted({wmode for wmode, _, _ in RUNS}):
        convert(GOLDEN, folder / f"{wmode}.qwenc", wmode=wmode)


def tell_key(folder: Path) -> None:
    from numba.core.registry import cpu_target

    import qwenc.kernels.jit  # noqa: F401  (tells Numba of CPU features that it does not see by itself)

    (folder / "key").write_text(repr(cpu_target.target_context.codegen().magic_tuple()))


def compile_there(folder: Path, cpu: str) -> None:
    import kernel_asm

    kernel_asm.target_arm(cpu)
    os.environ["NUMBA_CACHE_DIR"] = str(folder / "jit")
    from numba.core import codegen

    key = ast.literal_eval((folder / "key").read_text())
    codegen.CPUCodegen.magic_tuple = lambda self: key
    for wmode, kv, sparse in RUNS:
        with open_engine(folder, wmode, kv, sparse) as engine:
            engine.session(len(IDS) + TOKENS).compile()


def open_engine(folder: Path, wmode: str, kv: str, sparse: dict[str, Any]) -> Any:
    import qwenc

    return qwenc.load(folder / f"{wmode}.qwenc", wmode=wmode, kv=kv, prefill_batch=48, threads=1, pin=False, **sparse)


def run(folder: Path) -> None:
    from qwenc.attention.cache import cache_arrays
    from qwenc.kernels.jit import compiling
    from qwenc.kernels.level import LEVEL

    print(f"SIMD level {LEVEL.name}", file=sys.stderr, flush=True)
    told = lambda: print("compiles", file=sys.stderr, flush=True)  # noqa: E731
    for wmode, kv, sparse in RUNS:
        integers, floats, tokens = hashlib.sha256(), hashlib.sha256(), []
        with compiling(told), open_engine(folder, wmode, kv, sparse) as engine:
            session = engine.session(len(IDS) + TOKENS)
            logits = session.prefill(IDS)
            for _ in range(TOKENS):
                floats.update(logits.tobytes())
                tokens.append(int(np.argmax(logits)))
                logits = session.step(tokens[-1])
            for name, array in cache_arrays(session._sequence.cache).items():
                digest = floats if array.dtype == np.float32 else integers
                digest.update(name.encode() + np.ascontiguousarray(array[0]).tobytes())
        arm = f"{wmode} weights, {kv} cache{', sparse' if sparse else ''}"
        print(f"{arm}: tokens {' '.join(map(str, tokens))}")
        print(f"{arm}: integers {integers.hexdigest()[:16]}")
        print(f"{arm}: floats {floats.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
