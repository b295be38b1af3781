#!/usr/bin/env python3
"""Write tests/data/embedded_goldens.json: what the model that comes with qwenc says, through qwenc itself, for tests/test_embedded.py.

    python scripts/make_embedded_goldens.py

`prose`: arguments of a run and its greedy text by weight mode. `needles`: haystacks out of the held-out books; the answers are known
beforehand, not taken from the model. The text comes as for scripts/train_embedded.py. To be run again only when the weights change.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

from embedded_data import HELD_OUT_BOOKS, Fact, haystack, prose, read_verses

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import qwenc  # noqa: E402
from qwenc.resources import EMBEDDED  # noqa: E402

PROMPT = "In the beginning"
PROSE_TOKENS = 64
# (place, tokens of the prompt, depth, fact): the names are held out of the training
NEEDLES = (
    ("near the start of 1,000", 1000, 0.1, Fact("secret number", "Cairo", "48213")),
    ("in the middle of 1,000", 1000, 0.5, Fact("secret number", "Amber", "70965")),
    ("near the start of 2,000", 2000, 0.1, Fact("secret number", "Osaka", "31586")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", metavar="FILE", type=Path, help="the Bible as lines 'Ge1:1 text' instead of Debian's packages")
    args = parser.parse_args()
    pieces = prose([verse for verse in read_verses(args.text) if verse[0] in HELD_OUT_BOOKS])
    goldens: dict[str, Any] = {"prose": {"args": [PROMPT], "text": {}}, "needles": []}
    for wmode in ("q8", "dual", "f32"):
        with qwenc.load(EMBEDDED, wmode=wmode, kv="f32" if wmode == "f32" else "q8") as engine:
            steps = engine.generate(PROMPT, max_tokens=PROSE_TOKENS)
            goldens["prose"]["text"][wmode] = "".join(step.text for step in steps)
            if wmode == "q8":
                goldens["needles"] = [needle(engine, pieces, *entry) for entry in NEEDLES]
    path = ROOT / "tests/data/embedded_goldens.json"
    path.write_text(json.dumps(goldens, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def needle(engine: Any, pieces: list[str], place: str, tokens: int, depth: float, fact: Fact) -> dict[str, str]:
    body = haystack(random.Random(place), pieces, [(depth, fact)], tokens, lambda text: len(engine.encode_prompt(text, raw=True)))
    at = next(i for i, (_, held) in enumerate(body) if held)
    before, after = ("".join(text for text, _ in part) for part in (body[:at], body[at + 1 :]))
    return {
        "place": place,
        "before": before.lstrip(),
        "sentence": f" {fact.sentence}",
        "after": after,
        "question": f"\n{fact.question}",
        "answer": fact.sentence,
    }


if __name__ == "__main__":
    main()
