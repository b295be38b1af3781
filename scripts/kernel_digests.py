#!/usr/bin/env python3
"""Print what a greedy run of the tiny checkpoint gives on this CPU, to be compared with another: `scripts/arm_check.sh` does.

Per weight format and KV cache: the tokens, a digest of the cache's integers, and a digest of logits and scales. All of them should be the
same on every CPU and SIMD level. The first line, on stderr, names the level.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwenc
from qwenc.attention.cache import cache_arrays
from qwenc.kernels.level import LEVEL

GOLDEN = Path(__file__).resolve().parent.parent / "tests" / "data" / "goldens" / "qwen3-dense-tied"
RUNS = (("dual", "q8"), ("q4", "q4"))
TOKENS = 24


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    print(f"SIMD level {LEVEL.name}", file=sys.stderr, flush=True)
    ids = np.load(GOLDEN / "expected.npz")["input_ids"].tolist()
    for wmode, kv in RUNS:
        integers, floats, tokens = hashlib.sha256(), hashlib.sha256(), []
        with qwenc.load(GOLDEN, wmode=wmode, kv=kv, prefill_batch=48, threads=1, pin=False) as engine:
            session = engine.session(len(ids) + TOKENS)
            logits = session.prefill(ids)
            for _ in range(TOKENS):
                floats.update(logits.tobytes())
                tokens.append(int(np.argmax(logits)))
                logits = session.step(tokens[-1])
            for name, array in cache_arrays(session._sequence.cache).items():
                digest = floats if array.dtype == np.float32 else integers
                digest.update(name.encode() + np.ascontiguousarray(array[0]).tobytes())
        print(f"{wmode} weights, {kv} cache: tokens {' '.join(map(str, tokens))}")
        print(f"{wmode} weights, {kv} cache: integers {integers.hexdigest()[:16]}")
        print(f"{wmode} weights, {kv} cache: floats {floats.hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
