#!/usr/bin/env python3
"""Write four documents of 8,065 tokens each, one after the other: what the quality tables of the README were measured on.

    python scripts/quality_text.py models/smollm2 four.txt
    qwenc quality -m models/smollm2 -f four.txt -c 2048,8000 --chunks 4 --scored 64 ...

With 8,000 tokens of context, 64 scored and one that is the last right answer, each of the four pieces is one document.

Python's argparse (code), the letters to the Romans and the Hebrews (prose), the GPL (law) and Python's language reference (a manual). The
letters come from Debian's bible-kjv-text, the GPL from /usr/share/common-licenses: so it needs Debian or Ubuntu.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from embedded_data import prose, read_verses

import qwenc

LICENCES = [Path("/usr/share/common-licenses") / name for name in ("GPL-3", "GPL-2")]
LETTERS = ("Rom", "Heb")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="whose tokens are counted")
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=8065, help="of each document")
    args = parser.parse_args()
    with qwenc.load(args.model) as engine:
        cut = [first_tokens(engine, text, args.tokens) for text in documents()]
        text = "".join(cut)
        print(f"{args.out}: {len(engine.encode_prompt(text, raw=True))} tokens", file=sys.stderr)
    args.out.write_text(text, encoding="utf-8")


def documents() -> list[str]:
    letters = [verse for verse in read_verses(None) if verse[0] in LETTERS]
    return [
        Path(argparse.__file__).read_text(encoding="utf-8"),
        "".join(prose(letters)),
        "\n".join(path.read_text(encoding="utf-8") for path in LICENCES),
        "\n".join(pydoc_data.topics.topics.values()),
    ]


def first_tokens(engine: qwenc.Engine, text: str, tokens: int) -> str:
    """As much of `text` as takes `tokens` tokens. Raises ValueError for a document that is shorter, or a model without a tokenizer."""
    ids = engine.encode_prompt(text, raw=True)
    if engine.tokenizer is None:
        raise ValueError("a model without a tokenizer")
    if len(ids) < tokens:
        raise ValueError(f"a document of {len(ids)} tokens, {tokens} are needed")
    return engine.tokenizer.decode(ids[:tokens])


if __name__ == "__main__":
    main()
