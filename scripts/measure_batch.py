"""Tokens a second of batched decode: `python scripts/measure_batch.py MODEL [--prompt 32] [--tokens 64] [--lanes 1,2,4,8]`.

Random prompts of equal length, each answered with the same number of tokens; only the decode steps are timed. Every answer is compared
with that of the prompt alone.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import qwenc


def decode_rate(engine: qwenc.Engine, count: int, prompts: list[list[int]], tokens: int) -> tuple[float, list[list[int]]]:
    """(tokens a second, ids of each answer) of `count` completions at a time."""
    lanes = engine.lanes(count)
    answers: list[list[int]] = [[] for _ in prompts]
    for n, prompt in enumerate(prompts[:count]):
        step = lanes.start(n, prompt, max_tokens=tokens + 1, ignore_eos=True)
        answers[n].append(step.id or 0)
    began = time.perf_counter()
    while lanes.working:
        for n, taken in lanes.step():
            if isinstance(taken, qwenc.QwencError):
                raise taken
            answers[n].append(taken.id or 0)
    return count * tokens / (time.perf_counter() - began), answers[:count]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--lanes", default="1,2,4,8")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    counts = [int(count) for count in chosen.lanes.split(",")]
    with qwenc.load(chosen.model) as engine:
        rng = np.random.default_rng(0)
        prompts = [rng.integers(0, engine.config.vocab_size, chosen.prompt).tolist() for _ in range(max(counts))]
        rates: dict[int, list[float]] = {count: [] for count in counts}
        seen: dict[int, list[int]] = {}
        for _ in range(chosen.rounds):
            for count in counts:
                rate, answers = decode_rate(engine, count, prompts, chosen.tokens)
                rates[count].append(rate)
                for n, answer in enumerate(answers):
                    if seen.setdefault(n, answer) != answer:
                        raise SystemExit(f"{count} lanes changed the answer to prompt {n}")
    alone = float(np.median(rates[counts[0]]))
    for count in counts:
        median = float(np.median(rates[count]))
        print(f"{count} at a time: {median:.1f} tok/s ({median / alone:.2f} x)")


if __name__ == "__main__":
    main()
