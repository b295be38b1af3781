#!/usr/bin/env python3
"""Measure prefill and decode of every weight format of one model, side by side: the speeds of the README's table.

    python scripts/measure_speed.py models/smollm2

Per format: a prefill of 512 random tokens, then 64 decode steps. Rounds alternate between the formats, the first one warms up; printed
are medians in tokens a second, with the lowest and the highest round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwenc
from qwenc.timing import Timings

PREFILL, DECODE = 512, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--wmode", nargs="+", default=["dual", "q4", "q8", "f32"])
    args = parser.parse_args()
    engines = {wmode: qwenc.load(args.model, wmode=wmode, threads=args.threads) for wmode in args.wmode}
    rates: dict[str, list[tuple[float, float]]] = {wmode: [] for wmode in engines}
    for round_ in range(args.rounds + 1):
        for wmode, engine in engines.items():
            prefill, decode = measure(engine)
            if round_:
                rates[wmode].append((prefill, decode))
    print("| `--wmode` | prefill tok/s | decode tok/s |\n|---|--:|--:|")
    for wmode, pairs in rates.items():
        print(f"| {wmode} | " + " | ".join(show(column) for column in zip(*pairs, strict=True)) + " |")


def measure(engine: qwenc.Engine) -> tuple[float, float]:
    """(prefill, decode) in tokens a second."""
    session = engine.session(PREFILL + DECODE)
    session.compile()
    session.timings = Timings()
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, PREFILL).tolist()
    session.prefill(ids)
    for token in ids[:DECODE]:
        session.step(token)
    timings = session.timings
    return 1e3 * PREFILL / timings.prefill.total_ms, 1e3 * DECODE / timings.decode.total_ms


def show(rates: tuple[float, ...]) -> str:
    return f"{statistics.median(rates):.0f} ({min(rates):.0f} to {max(rates):.0f})"


if __name__ == "__main__":
    main()
