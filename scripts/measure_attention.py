#!/usr/bin/env python3
"""Measure a decoded token against the length of its context: attention in full and sparse, for one or more kinds of KV cache.

    python scripts/measure_attention.py A.qwenc --kv q8 q4 --n 506 2046 4059 8192 16384

The cache is filled with noise instead of a prefill, which changes no time: every step reads the same bytes. Arms take turns in every
round; printed are medians in milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwenc
from qwenc.attention.cache import cache_arrays
from qwenc.session import Session

NEVER = 2**31 - 1  # tokens
CHUNK = 1 << 20  # bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--kv", nargs="+", default=["q8"])
    parser.add_argument("--n", nargs="+", type=int, default=[506, 2046, 4059, 8192, 16384])
    parser.add_argument("--wmode", default="q4")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("-k", "--sparse-k", type=int, default=32)
    args = parser.parse_args()
    settings = {"wmode": args.wmode, "threads": args.threads, "sparse_attn": True, "sparse_k": args.sparse_k, "ctx_size": max(args.n) + 1}
    sessions = {}
    for kv in args.kv:
        session = qwenc.load(args.model, kv=kv, **settings).session(max(args.n) + 1)
        session.compile()
        fill(session)
        sessions[kv] = session
    print("| n | " + " | ".join(f"{kv} exact | {kv} sparse" for kv in sessions) + " | total − attention, exact | sparse |")
    print("|--:|" + "--:|" * (2 * len(sessions) + 2))
    for n in args.n:
        attention, rest = measure(sessions, n, args.rounds)
        print(f"| {n} | " + " | ".join(f"{ms:.2f}" for ms in attention) + f" | {rest[0]:.2f} | {rest[1]:.2f} |", flush=True)


def fill(session: Session) -> None:
    """Random codes, constant scales."""
    noise = np.random.default_rng(0).integers(0, 255, CHUNK, dtype=np.uint8)
    for array in cache_arrays(session.cache).values():
        if array.dtype == np.float32:
            array[:] = 0.01
        elif array.dtype == np.uint16:
            array[:] = 0x2000  # 2^-7 in half precision
        else:
            flat = array.reshape(-1).view(np.uint8)
            for first in range(0, flat.size, CHUNK):
                flat[first : first + CHUNK] = noise[: min(CHUNK, flat.size - first)]


def measure(sessions: dict, n: int, rounds: int) -> tuple[list[float], list[float]]:
    """Medians: attention of every session in full and sparse; the rest of a token, in full and sparse."""
    attention: dict[tuple[str, bool], list[float]] = {}
    rest: dict[bool, list[float]] = {True: [], False: []}
    for round_ in range(rounds + 2):
        for kv, session in sessions.items():
            sequence = session._sequence
            sparse = sequence.sparse_decode
            for exact in (True, False):
                sequence.sparse_decode = sparse._replace(from_keys=NEVER) if exact else sparse
                sequence.length = n - 1
                session.step(0)
                if round_ > 1:
                    attention.setdefault((kv, exact), []).append(session.last.ms["attn"])
                    rest[exact].append(session.last.total_ms - session.last.ms["attn"])
            sequence.sparse_decode = sparse
    return [statistics.median(times) for times in attention.values()], [statistics.median(rest[True]), statistics.median(rest[False])]


if __name__ == "__main__":
    main()
