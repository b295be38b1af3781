#!/usr/bin/env python3
"""Compute what transformers says about SmolLM2 in float32: test data for qwenc's exact path.

    python scripts/fetch_smollm2.py models/smollm2
    python scripts/make_goldens.py models/smollm2 tests/data

Writes two files. smollm2_greedy.json: five prompts, 64 greedy tokens each, with the margin (top logit minus the second) of every step.
english_nll.npz: for the first 2,000 tokens of english.txt, ids, and per position the most likely next token, its margin, and the negative
log-likelihood (nats) of the token that follows. Needs torch and transformers; qwenc itself does not, and is not used here.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

STEPS = 64
ENGLISH_TOKENS = 2000
PROMPTS: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "Why is the sky blue?"}]},
    {
        "messages": [
            {"role": "system", "content": "You are a careful gardener."},
            {"role": "user", "content": "When should I plant tomatoes, and how much water do they need?"},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "What is a prime number?"},
            {"role": "assistant", "content": "A whole number above 1 that only 1 and itself divide."},
            {"role": "user", "content": "Explain why 91 is not prime, step by step."},
        ]
    },
    {"text": "The history of the steam engine begins"},
    {"text": "def fibonacci(n):\n    "},
]


def greedy(model: Any, ids: list[int]) -> tuple[list[int], list[float]]:
    """STEPS greedy ids after `ids`, and each step's margin. The end token does not stop it."""
    out, margins, past, feed = [], [], None, torch.tensor([ids])
    for _ in range(STEPS):
        step = model(input_ids=feed, past_key_values=past, use_cache=True)
        top = torch.topk(step.logits[0, -1].float(), 2)
        out.append(int(top.indices[0]))
        margins.append(round(float(top.values[0] - top.values[1]), 5))
        past, feed = step.past_key_values, top.indices[:1].view(1, 1)
    return out, margins


def greedy_records(model: Any, tokenizer: Any) -> list[dict[str, Any]]:
    records = []
    for prompt in PROMPTS:
        if "messages" in prompt:
            text = tokenizer.apply_chat_template(prompt["messages"], add_generation_prompt=True, tokenize=False)
        else:
            text = prompt["text"]
        prompt_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids, margins = greedy(model, prompt_ids)
        print(f"{len(prompt_ids)} prompt tokens, smallest margin {min(margins):.4f}: {tokenizer.decode(ids)!r}", file=sys.stderr)
        records.append(
            {**prompt, "rendered": text, "prompt_ids": prompt_ids, "ids": ids, "margins": margins, "decoded": tokenizer.decode(ids)}
        )
    return records


def english_record(model: Any, tokenizer: Any, text: str) -> dict[str, np.ndarray]:
    """ids, top1 int32 [n]; margin float32 [n]; nll float32 [n-1], nll[i] being that of ids[i+1]."""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][:ENGLISH_TOKENS]
    if len(ids) < ENGLISH_TOKENS:
        raise SystemExit(f"english.txt has only {len(ids)} tokens")
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0].float()
    top = torch.topk(logits, 2, dim=-1)
    nll = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
    print(
        f"english: mean NLL {nll.mean():.4f} nats, top-1 right {(top.indices[:-1, 0] == torch.tensor(ids[1:])).float().mean():.3f}",
        file=sys.stderr,
    )
    return {
        "ids": np.asarray(ids, np.int32),
        "top1": top.indices[:, 0].numpy().astype(np.int32),
        "margin": (top.values[:, 0] - top.values[:, 1]).numpy().astype(np.float32),
        "nll": nll.numpy().astype(np.float32),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", metavar="MODEL_DIR", type=Path)
    parser.add_argument("data", metavar="DATA_DIR", type=Path, help="holds english.txt; both files are written here")
    args = parser.parse_args()
    tokenizer = transformers.AutoTokenizer.from_pretrained(args.model)
    model = transformers.AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        records = greedy_records(model, tokenizer)
        english = english_record(model, tokenizer, (args.data / "english.txt").read_text(encoding="utf-8"))
    made_by = {"transformers": transformers.__version__, "torch": torch.__version__.split("+")[0], "dtype": "float32", "attention": "eager"}
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    text = f'{{"made_by": {json.dumps(made_by)},\n"prompts": [\n' + ",\n".join(lines) + "\n]}\n"
    (args.data / "smollm2_greedy.json").write_text(text, encoding="utf-8")
    np.savez_compressed(args.data / "english_nll.npz", **english)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
