#!/usr/bin/env python3
"""Measure the reference's two tables on this machine: prefill and decode at three contexts, exact and sparse, and print them beside it.

    python scripts/rk3588_tables.py                       about 40 minutes on an RK3588; makes a model of random weights first (2.8 GB)
    python scripts/rk3588_tables.py MODEL --contexts 506

Nothing else should run meanwhile. Temperatures and clocks are read before and after each row, since a hot board slows down. The file
rk3588.json holds all of it, to be sent along with a report.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwenc
from qwenc.commands.env import describe
from qwenc.session import Session
from qwenc.timing import Timings

HERE = Path(__file__).resolve().parent
# of the reference, on 4 Cortex-A76 with Qwen3-VL-2B: prefill s exact, sparse; attention ms exact, sparse; token ms exact, sparse
REFERENCE = {
    506: (13.09, 13.65, 9.7, 13.4, 52.5, 56.6),
    2046: (51.84, 51.50, 48.9, 39.1, 92.3, 82.3),
    4059: (148.50, 106.11, 110.7, 55.4, 155.2, 100.0),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "exact": {},
    "sparse": {"sparse_attn": True},
    "--kv-q4": {"kv": "q4"},
    "--kv-q4, sparse": {"kv": "q4", "sparse_attn": True},
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: random weights in the shape of Qwen3-VL-2B, kept in models/")
    parser.add_argument("--contexts", type=int, nargs="+", default=list(REFERENCE))
    parser.add_argument("--tokens", type=int, default=32, help="decoded at each context (default 32)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--cpus", help="as in qwenc run")
    parser.add_argument("--out", type=Path, default=Path("rk3588.json"))
    args = parser.parse_args()
    if args.tokens < 1 or min(args.contexts) < 1:
        parser.error("--contexts and --tokens must be at least 1")
    model = args.model or random_model()
    record: dict[str, Any] = {"machine": describe(), "model": str(model), "tokens": args.tokens, "rows": []}
    for variant in args.variants:
        with qwenc.load(model, cpus=args.cpus, **VARIANTS[variant]) as engine:
            record["settings"] = {"threads": engine.threads, "cores": engine.cores, "wmode": engine.wmode}
            for context in args.contexts:
                row = {"variant": variant, "n": context, **measure(engine, context, args.tokens)}
                record["rows"].append(row)
                print(f"{variant}, n={context}: {row['prefill_s']:.2f} s, {row['token_ms']:.1f} ms a token", file=sys.stderr, flush=True)
                args.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print_tables(record["rows"])
    print(f"\nThe machine, the clocks and every figure are in {args.out}.", file=sys.stderr)
    return 0


def random_model() -> Path:
    path = HERE.parent / "models" / "2b-dual-random.qwenc"
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        subprocess.run([sys.executable, str(HERE / "make_random_packed.py"), "2b", str(path), "--wmode", "dual"], check=True)
    return path


def measure(engine: qwenc.Engine, context: int, tokens: int) -> dict[str, Any]:
    """A prefill of `context` random tokens, then `tokens` decode steps: seconds, and medians of milliseconds."""
    session: Session = engine.session(context + tokens)
    session.compile()
    session.timings = Timings()
    before = health()
    ids = np.random.default_rng(0).integers(0, engine.config.vocab_size, context + tokens).tolist()
    session.prefill(ids[:context])
    steps = []
    for token in ids[context:]:
        session.step(token)
        assert session.last is not None
        steps.append(session.last)
    prefill = session.timings.prefill
    return {
        "prefill_s": prefill.total_ms / 1e3,
        "prefill_gemm_s": prefill.gemm_ms / 1e3,
        "prefill_attention_s": prefill.attn_ms / 1e3,
        "attention_ms": statistics.median(step.ms["attn"] for step in steps),
        "token_ms": statistics.median(step.total_ms for step in steps),
        "before": before,
        "after": health(),
    }


def health() -> dict[str, list[float]]:
    """°C of every sensor and current MHz of every CPU, where the system tells."""
    return {
        "celsius": _numbers("/sys/class/thermal", "thermal_zone*/temp", 1e-3),
        "mhz": _numbers("/sys/devices/system/cpu", "cpu[0-9]*/cpufreq/scaling_cur_freq", 1e-3),
    }


def _numbers(folder: str, pattern: str, factor: float) -> list[float]:
    found = []
    for path in sorted(Path(folder).glob(pattern)):
        try:
            found.append(float(path.read_text()) * factor)
        except (OSError, ValueError):
            continue
    return found


def print_tables(rows: list[dict[str, Any]]) -> None:
    print("| n | | prefill s | attention in it | decode attention ms | token ms |\n|--:|---|--:|--:|--:|--:|")
    for row in sorted(rows, key=lambda row: row["n"]):
        reference = REFERENCE.get(row["n"])
        place = {"exact": 0, "sparse": 1}.get(row["variant"])
        beside = ["", "", ""] if reference is None or place is None else [f" ({reference[place + 2 * i]})" for i in range(3)]
        print(
            f"| {row['n']} | {row['variant']} | {row['prefill_s']:.2f}{beside[0]} | {row['prefill_attention_s']:.2f} "
            f"| {row['attention_ms']:.1f}{beside[1]} | {row['token_ms']:.1f}{beside[2]} |"
        )
    print("\nIn brackets: the reference on an RK3588.")


if __name__ == "__main__":
    sys.exit(main())
