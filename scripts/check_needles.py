#!/usr/bin/env python3
"""Ask the model that comes with qwenc (or another) fresh questions about a sentence far back in the text, through qwenc itself.

    python scripts/check_needles.py                       # 200 questions at 1,024, 2,048 and 4,096 tokens each
    python scripts/check_needles.py --wmode q8 --count 40 --tokens 4096

"The secret number of Zora is 48213." stands at depth 10, 50 or 90 % of a book that the model was not trained on; the name and the number
are new to it too. Right is a greedy answer that holds the number. The text comes as for scripts/train_embedded.py.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from functools import lru_cache
from pathlib import Path

from embedded_data import HELD_OUT_BOOKS, needle_prompt, prose, read_verses, words_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import qwenc  # noqa: E402
from qwenc.resources import EMBEDDED  # noqa: E402
from qwenc.settings import KV_TYPES, WMODES  # noqa: E402

DEPTHS = (0.1, 0.5, 0.9)
ANSWER_TOKENS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default=str(EMBEDDED), help="default: the model that comes with qwenc")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 2048, 4096], metavar="N", help="tokens of the whole prompt")
    parser.add_argument("--count", type=int, default=200, metavar="N", help="questions at each length")
    parser.add_argument("--wmode", choices=WMODES, default="q8")
    parser.add_argument("--kv", choices=KV_TYPES, default=KV_TYPES[0])
    parser.add_argument("--seed", default="1")
    parser.add_argument("--text", metavar="FILE", type=Path, help="the Bible as lines 'Ge1:1 text' instead of Debian's packages")
    args = parser.parse_args()
    verses = read_verses(args.text)
    words = words_of(prose([verse for verse in verses if verse[0] not in HELD_OUT_BOOKS]))
    pieces = prose([verse for verse in verses if verse[0] in HELD_OUT_BOOKS])
    print("| prompt tokens | questions | right at depth 10 % | 50 % | 90 % | all |\n|--:|--:|--:|--:|--:|--:|")
    with qwenc.load(args.model, wmode=args.wmode, kv=args.kv) as engine:
        frame = len(engine.encode_prompt("x")) - 1

        @lru_cache(1 << 16)
        def length_of(text: str) -> int:
            return len(engine.encode_prompt(text, raw=True))

        for tokens in args.tokens:
            rng, right, began = random.Random(f"{args.seed} {tokens}"), [0] * len(DEPTHS), time.monotonic()
            for number in range(args.count):
                which = number % len(DEPTHS)
                user, fact = needle_prompt(rng, pieces, words, DEPTHS[which], tokens - frame, length_of)
                ids = engine.encode_prompt(user)
                right[which] += fact.value in "".join(step.text for step in engine.generate(ids, max_tokens=ANSWER_TOKENS))
            asked = [len(range(which, args.count, len(DEPTHS))) for which in range(len(DEPTHS))]
            shares = [f"{ok / max(1, of):.1%}" for ok, of in zip(right, asked, strict=True)]
            print(f"| {tokens} | {args.count} | {' | '.join(shares)} | {sum(right) / args.count:.1%} |", flush=True)
            print(f"{time.monotonic() - began:.0f} s, last prompt {len(ids)} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
