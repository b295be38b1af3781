#!/usr/bin/env python3
"""Recompute the logits of the tiny golden checkpoints with transformers in float32.

    python scripts/make_golden_logits.py tests/data/goldens

Writes float32.npz beside each expected.npz: logits float32 [n, vocab] of its input_ids, greedy_ids and greedy_margin. The older
expected.npz was made from a model cast to bfloat16 and back, which rounds the rotary frequencies too (transformers keeps them in
float32 when it loads a checkpoint in any dtype); the tests compare with both. Needs torch and transformers; qwenc itself does not, and
is not used here.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def load(folder: Path) -> torch.nn.Module:
    config = transformers.AutoConfig.from_pretrained(folder)
    kind = transformers.Qwen3VLForConditionalGeneration if config.model_type == "qwen3_vl" else transformers.AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def main() -> None:
    for folder in sorted(path.parent for path in Path(sys.argv[1]).glob("*/expected.npz")):
        expected = np.load(folder / "expected.npz")
        model = load(folder)
        ids = torch.tensor(expected["input_ids"][None].astype(np.int64))
        logits = model(input_ids=ids).logits[0]
        greedy, margins, running = [], [], ids
        for _ in range(len(expected["greedy_ids"])):
            top = torch.topk(model(input_ids=running).logits[0, -1], 2)
            greedy.append(int(top.indices[0]))
            margins.append(float(top.values[0] - top.values[1]))
            running = torch.cat([running, top.indices[:1].view(1, 1)], dim=1)
        np.savez_compressed(
            folder / "float32.npz",
            logits=logits.numpy(),
            greedy_ids=np.array(greedy, np.int32),
            greedy_margin=np.array(margins, np.float32),
        )
        print(f"{folder.name}: largest difference from expected.npz {np.abs(logits.numpy() - expected['logits']).max():.2g}")


if __name__ == "__main__":
    main()
