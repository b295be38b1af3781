"""The real Qwen3 tokenizer, trimmed to what the tests' texts need (tests/data/qwen3-tokenizer/make.py), under its real ids."""

import json
from functools import lru_cache
from pathlib import Path

DATA = Path(__file__).parent / "data" / "qwen3-tokenizer"
CASES = json.loads((DATA / "cases.json").read_text())
CONFIG = json.loads((DATA / "tokenizer_config.json").read_text())


@lru_cache(maxsize=1)
def tokenizer_json() -> bytes:
    """The trimmed tokenizer.json with a filler at every id that was trimmed: added tokens keep their ids only behind a full vocabulary."""
    data = json.loads((DATA / "tokenizer.json").read_text())
    vocabulary = data["model"]["vocab"]
    known = set(vocabulary.values())
    first_added = min(token["id"] for token in data["added_tokens"])
    vocabulary.update({f"\x00{id}": id for id in range(first_added) if id not in known})
    return json.dumps(data).encode()
