#!/usr/bin/env python3
"""Train the model that comes with qwenc and write it as a Hugging Face folder.

    python scripts/train_embedded.py build/embedded                # to the end, or on from the last checkpoint
    python scripts/train_embedded.py build/embedded --evaluate     # the table only

Torch (extra `train`) on 2 CPU cores with bfloat16 instructions. The text comes from Debian's packages bible-kjv and bible-kjv-text
(or --text FILE, lines "Ge1:1 In the beginning …"). Every step draws its data from (seed, step), so a run that was stopped ends as one
that was not. OUT_DIR/state.pt is the checkpoint, OUT_DIR/model the result.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from embedded_data import needle_prompt
from embedded_model import CONFIG, Model, rounded_weights
from embedded_rows import SPECIAL, Data
from torch import nn

CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Shares of prose, chats, facts to be found again, lists, copies, and passages to be known by heart.
MIXED, FAR, PROSE, READING = (24, 14, 38, 14, 10, 0), (15, 5, 65, 15, 0, 0), (45, 30, 17, 5, 3, 0), (38, 18, 15, 4, 2, 23)
# (steps, ((tokens in a row, rows, shares), …)): the batches of a stage take turns.
STAGES = (
    (200, ((256, 32, MIXED),)),
    (700, ((256, 16, MIXED),)),
    (300, ((256, 16, MIXED), (1024, 4, MIXED))),
    (111, ((256, 16, MIXED), (1024, 4, MIXED), (4096, 1, FAR))),
    (600, ((256, 32, PROSE), (1024, 4, MIXED), (256, 32, PROSE), (4096, 1, FAR))),
    (500, (*[(256, 32, READING)] * 6, (1024, 4, MIXED), (4096, 1, FAR))),
)
FIRST = 1911  # steps, after which the learning rate rises again, for the reading of the last stage
WARMUP, COOLDOWN = 100, 600  # steps of rising and of falling learning rate, of the first
ROUNDED = 300  # last steps of each part: half of them see weights rounded to 4 bits, as `q4` and `dual` will
LEARNING_RATE = (4e-3, 2e-3)  # of the two parts


# -- training


def schedule() -> list[tuple[int, int, tuple[int, ...]]]:
    """(tokens in a row, rows, shares) of every step."""
    return [shapes[step % len(shapes)] for steps, shapes in STAGES for step in range(steps)]


def learning_rate(step: int, steps: int) -> float:
    if step < FIRST:
        return LEARNING_RATE[0] * min(1.0, (step + 1) / WARMUP, (FIRST - step) / COOLDOWN)
    return LEARNING_RATE[1] * min((step - FIRST + 1) / WARMUP, (steps - step) / (steps - FIRST))


def is_rounded(step: int, steps: int) -> bool:
    end = FIRST if step < FIRST else steps
    return end - step <= ROUNDED and (step // 4) % 2 == 0


def make_optimizers(model: Model) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, Adam for the embeddings and the norms."""
    matrices = [p for layer in model.layers for p in layer.w.values()]
    norms = [p for name, p in model.named_parameters() if p.dim() == 1]
    return [
        torch.optim.Muon(matrices, lr=1.0, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(
            [{"params": [model.embed], "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}], lr=1.0, betas=(0.9, 0.97)
        ),
    ]


def loss_of(model: Model, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    logits = model.output(model(ids[:, :-1]))
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    targets = weights[:, 1:].flatten()
    return (losses * targets).sum() / targets.sum()


def train(out: Path, data: Data, args: argparse.Namespace) -> tuple[Model, bool]:
    """The model after as many steps as there was time for, and whether they were all."""
    torch.manual_seed(args.seed)
    model = Model()
    optimizers = make_optimizers(model)
    shapes, step, losses, spent = schedule(), 0, [], 0.0
    state_file = out / "state.pt"
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, losses, spent = state["step"], state["losses"], state["seconds"]
        say(f"going on from step {step}")
    compiled_loss = torch.compile(loss_of, dynamic=False)  # a minute for each length
    began = time.monotonic() - spent
    stopping = []
    signal.signal(signal.SIGTERM, lambda *_: stopping.append(True))  # ends after the step, with a checkpoint
    while not stopping and step < min(len(shapes), args.stop_at or len(shapes)):
        length, rows, shares = shapes[step]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, len(shapes))
        with rounded_weights(model, is_rounded(step, len(shapes))):
            loss = compiled_loss(model, *data.batch(args.seed, step, length, rows, shares))
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append((length, loss.item()))
        step += 1
        if step % 20 == 0:
            progress(step, len(shapes), losses[-60:], time.monotonic() - began)
        if step % 200 == 0 or step == len(shapes) or stopping:
            state = {"model": model.state_dict(), "optimizers": [optimizer.state_dict() for optimizer in optimizers]}
            torch.save(state | {"step": step, "losses": losses, "seconds": time.monotonic() - began}, out / "state.tmp")
            os.replace(out / "state.tmp", state_file)
        if args.probe and step % args.probe == 0:
            say(f"  needles at 256: {answer_rate(model, data, 256, 60):.0%}, held-out perplexity {perplexity(model, data, 256):.2f}")
    return model, step == len(shapes)


def progress(step: int, steps: int, recent: list[tuple[int, float]], seconds: float) -> None:
    means = {length: [loss for other, loss in recent if other == length] for length in sorted({length for length, _ in recent})}
    text = ", ".join(f"{length}: {sum(values) / len(values):.3f}" for length, values in means.items())
    say(f"step {step}/{steps}, loss at {text}; {seconds / 60:.1f} min, {seconds / step * (steps - step) / 60:.0f} min to go")


# -- the evaluation


@torch.no_grad()
def perplexity(model: Model, data: Data, length: int) -> float:
    """Of the held-out books, in windows of `length` tokens whose first half is only context, per token."""
    ids = [id for piece in data.held_out for id in data.encode(piece)]
    total, count = 0.0, 0
    for start in range(0, len(ids) - length, length // 2):
        window = torch.tensor([ids[start : start + length + 1]])
        half = length // 2
        logits = model.output(model(window[:, :-1])[0, half:])
        total += F.cross_entropy(logits, window[0, half + 1 :], reduction="sum").item()
        count += window.shape[1] - 1 - half
    return math.exp(total / count)


@torch.no_grad()
def answer_rate(model: Model, data: Data, tokens: int, count: int, depths: tuple[float, ...] = (0.1, 0.5, 0.9)) -> float:
    """How many of `count` fresh questions greedy decoding would answer, over `depths`: every token of the answer is the likeliest."""
    rng, right = random.Random(f"needles {tokens} {depths}"), 0
    for number in range(count):
        frame = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
        budget = tokens - data.length_of(frame.format(""))
        user, fact = needle_prompt(rng, data.held_out, data.words, depths[number % len(depths)], budget, data.length_of)
        prompt, answer = data.tokenizer.encode(frame.format(user)).ids, data.encode(f"{fact.sentence}<|im_end|>")
        hidden = model(torch.tensor([prompt + answer[:-1]]))[0, len(prompt) - 1 :]
        right += model.output(hidden).argmax(-1).tolist() == answer
    return right / count


def evaluate(model: Model, data: Data) -> None:
    """Prints the table: the weights as they are and rounded to 4 bits."""
    print("| weights | held-out perplexity | prompt tokens | answers at depth 10 % | 50 % | 90 % |\n|---|--:|--:|--:|--:|--:|")
    for name, rounded, count in (("bf16", False, 67), ("4 bits", True, 34)):
        with rounded_weights(model, rounded):
            held_out = perplexity(model, data, 1024)
            for tokens in (1024, 2048, 4096):
                cells = [f"{answer_rate(model, data, tokens, count, (depth,)):.1%}" for depth in (0.1, 0.5, 0.9)]
                print(f"| {name} | {held_out:.2f} | {tokens} | {' | '.join(cells)} |", flush=True)


# -- the result


def export(model: Model, data: Data, folder: Path) -> None:
    """The model as a Hugging Face folder."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {"model.embed_tokens.weight": model.embed, "model.norm.weight": model.final_norm}
    for number, layer in enumerate(model.layers):
        for name, p in [*layer.w.items(), *layer.norm.items()]:
            part = (
                "self_attn."
                if name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
                else "mlp."
                if name.endswith("proj")
                else ""
            )
            tensors[f"model.layers.{number}.{part}{name}.weight"] = p
    save_file(
        {name: p.detach().bfloat16().contiguous() for name, p in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"}
    )
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes 0600 whatever the umask says
    ids = {name: data.tokenizer.token_to_id(name) for name in SPECIAL}
    ends = {"bos_token_id": None, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "add_prefix_space": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "model_max_length": CONFIG["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    texts = {
        "config.json": CONFIG | ends,
        "generation_config.json": ends | {"do_sample": False, "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]]},
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    data.tokenizer.save(str(folder / "tokenizer.json"), pretty=False)


def say(text: str) -> None:
    print(f"train_embedded: {text}", file=sys.stderr, flush=True)


def keep_memory() -> None:
    """Starts this process again with a malloc that keeps large buffers: fresh pages for every tensor cost more than the arithmetic."""
    wanted = {"MALLOC_MMAP_THRESHOLD_": str(1 << 32), "MALLOC_TRIM_THRESHOLD_": str(1 << 34), "MALLOC_TOP_PAD_": str(1 << 28)}
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train the model that comes with qwenc.")
    parser.add_argument("out", metavar="OUT_DIR", type=Path)
    parser.add_argument("--text", metavar="FILE", type=Path, help="the Bible as lines 'Ge1:1 text' instead of Debian's packages")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--probe", type=int, default=0)
    parser.add_argument("--stop-at", type=int, metavar="STEP", help="stop after this step")
    parser.add_argument("--evaluate", action="store_true", help="only print the table of what is there")
    args = parser.parse_args()
    keep_memory()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)
    data = Data(args.text, args.out / "tokenizer.json")
    if args.evaluate:
        args.stop_at = -1
    model, done = train(args.out, data, args)
    if not done and not args.evaluate:
        return 1
    export(model, data, args.out / "model")
    evaluate(model, data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
