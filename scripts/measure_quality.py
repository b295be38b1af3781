#!/usr/bin/env python3
"""Measure what each weight format costs in quality: the figures of the README's table.

    python scripts/measure_quality.py models/smollm2

Teacher-forced over the first 2,000 tokens of tests/data/english.txt, against `--wmode f32 --kv f32`: perplexity, mean KL divergence
(nats) and the share of positions with the same most likely token. `prefill` computes the text in mini-batches, `decode` token by token:
they differ for dual, which reads q8 there and q4 here.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import qwenc  # noqa: E402
from qwenc.study.divergence import log_probabilities  # noqa: E402

CASES = (("q8", "q8", "prefill"), ("dual", "q8", "decode"), ("q4", "q8", "prefill"), ("f32", "q8", "prefill"), ("q8", "f32", "prefill"))


def compare(reference: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """(mean KL(reference ‖ other) in nats, share of rows with the same largest entry) of two arrays of log-probabilities [n, vocab]."""
    kl = (np.exp(reference) * (reference - other)).sum(axis=1).mean()
    return float(kl), float((reference.argmax(axis=1) == other.argmax(axis=1)).mean())


def perplexity(log_probs: np.ndarray, ids: list[int]) -> float:
    return float(np.exp(-log_probs[np.arange(len(ids) - 1), ids[1:]].mean()))


def run(model: str, wmode: str, kv: str, phase: str, ids: list[int]) -> np.ndarray:
    """Log-probabilities float64 [n, vocab] after each token."""
    with qwenc.load(model, wmode=wmode, kv=kv) as engine:
        if phase == "prefill":
            return log_probabilities(engine.logits(ids))
        session: Any = engine.session(len(ids))
        rows = [session.prefill(ids[:1]).copy()] + [session.step(token).copy() for token in ids[1:]]
        return log_probabilities(np.stack(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint folder or Hub id")
    parser.add_argument("--text", type=Path, default=ROOT / "tests/data/english.txt")
    parser.add_argument("--tokens", type=int, default=2000, metavar="N")
    args = parser.parse_args()
    with qwenc.load(args.model, wmode="f32", kv="f32") as engine:
        ids = engine.encode_prompt(args.text.read_text(encoding="utf-8"), raw=True)[: args.tokens]
        reference = log_probabilities(engine.logits(ids))
    print("| weights | KV | phase | perplexity | mean KL to f32 | same top token |")
    print("|---|---|---|--:|--:|--:|")
    print(f"| f32 | f32 | | {perplexity(reference, ids):.3f} | 0 | 100 % |", flush=True)
    for wmode, kv, phase in CASES:
        found = run(args.model, wmode, kv, phase, ids)
        kl, same = compare(reference, found)
        print(f"| {wmode} | {kv} | {phase} | {perplexity(found, ids):.3f} | {kl:.5f} | {100 * same:.2f} % |", flush=True)


if __name__ == "__main__":
    main()
