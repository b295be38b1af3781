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
import contextlib
import json
import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from embedded_data import (
    HELD_OUT_BOOKS,
    Fact,
    haystack,
    make_fact,
    make_facts,
    make_name,
    needle_prompt,
    prose,
    read_verses,
    words_of,
)
from torch import nn

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 192,
    "intermediate_size": 448,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
}
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
# Qwen's own split: contractions, words with the sign before them, single digits, other signs, line ends, spaces.
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# (steps, ((tokens in a row, rows), …)): the lengths of a stage take turns.
STAGES = (
    (200, ((256, 32),)),
    (700, ((256, 16),)),
    (300, ((256, 16), (1024, 4))),
    (500, ((256, 16), (1024, 4), (4096, 1))),
)
WARMUP, COOLDOWN = 100, 350  # steps of rising and of falling learning rate
ROUNDED_FROM = 250  # before the end: every other step then sees weights rounded to 4 bits, as `q4` and `dual` will
LEARNING_RATE = 4e-3
ANSWER_WEIGHT, TEMPLATE_WEIGHT = 4.0, 0.2


# -- the model


def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * weight).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [B, heads, T, D], cos and sin [T, D/2]: halves rotated, as Qwen3 does."""
    first, second = x.float().chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1).to(x.dtype)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention, [B, heads, T, D] each."""
    length = q.shape[2]
    if length > 512:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)
    scores = (q @ k.transpose(-1, -2)).float() / math.sqrt(q.shape[-1])  # quicker, where it fits the cache
    future = torch.ones(length, length, dtype=torch.bool).triu(1)
    return torch.softmax(scores.masked_fill(future, -1e9), -1).to(q.dtype) @ v


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        hidden, ffn, dim = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
        self.heads, self.kv_heads, self.dim = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"], dim
        shapes = {
            "q_proj": (self.heads * dim, hidden),
            "k_proj": (self.kv_heads * dim, hidden),
            "v_proj": (self.kv_heads * dim, hidden),
            "o_proj": (hidden, self.heads * dim),
            "gate_proj": (ffn, hidden),
            "up_proj": (ffn, hidden),
            "down_proj": (hidden, ffn),
        }
        self.w = nn.ParameterDict({name: nn.Parameter(torch.empty(shape)) for name, shape in shapes.items()})
        norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden, "q_norm": dim, "k_norm": dim}
        self.norm = nn.ParameterDict({name: nn.Parameter(torch.ones(size)) for name, size in norms.items()})

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        w = {name: p.bfloat16() for name, p in self.w.items()}
        h = rms_norm(x, self.norm["input_layernorm"])
        q, k, v = (
            F.linear(h, torch.cat([w["q_proj"], w["k_proj"], w["v_proj"]]))
            .view(batch, length, -1, self.dim)
            .transpose(1, 2)
            .split([self.heads, self.kv_heads, self.kv_heads], 1)
        )
        q, k = rotate(rms_norm(q, self.norm["q_norm"]), cos, sin), rotate(rms_norm(k, self.norm["k_norm"]), cos, sin)
        k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        a = attend(q, k, v)
        x = x + F.linear(a.transpose(1, 2).reshape(batch, length, -1), w["o_proj"])
        h = rms_norm(x, self.norm["post_attention_layernorm"])
        gate, up = F.linear(h, torch.cat([w["gate_proj"], w["up_proj"]])).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, w["down_proj"])


class Model(nn.Module):
    """Qwen3 with tied embeddings; computes in bfloat16, keeps its weights in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.empty(CONFIG["vocab_size"], CONFIG["hidden_size"]))
        self.layers = nn.ModuleList([Layer() for _ in range(CONFIG["num_hidden_layers"])])
        self.final_norm = nn.Parameter(torch.ones(CONFIG["hidden_size"]))
        depth_scale = 1 / math.sqrt(2 * len(self.layers))
        for name, p in self.named_parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=CONFIG["initializer_range"] * (depth_scale if "o_proj" in name or "down_proj" in name else 1))
        half = CONFIG["head_dim"] // 2
        angles = torch.outer(torch.arange(CONFIG["max_position_embeddings"]), CONFIG["rope_theta"] ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [B, T] to the hidden states before the output layer, [B, T, hidden]."""
        x = F.embedding(ids, self.embed.bfloat16())
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return rms_norm(x, self.final_norm)

    def output(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits, float32."""
        return F.linear(hidden, self.embed.bfloat16()).float()


@contextlib.contextmanager
def rounded_weights(model: Model, rounded: bool = True) -> Iterator[None]:
    """The matrices as `q4` stores them, near enough, for as long as this lasts. Gradients then go to the weights proper."""
    matrices = [p for p in model.parameters() if p.dim() == 2] if rounded else []
    kept = [p.detach().clone() for p in matrices]
    with torch.no_grad():
        for p in matrices:
            p.copy_(round_to_4_bits(p))
    yield
    with torch.no_grad():
        for p, values in zip(matrices, kept, strict=True):
            p.copy_(values)


def round_to_4_bits(p: torch.Tensor) -> torch.Tensor:
    """p [N, K] with one scale per 32 inputs, the best of four."""
    groups = p.view(p.shape[0], -1, 32)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    best, least = groups, torch.full_like(extreme, math.inf)
    for code in (-9.0, -8.0, -7.0, -6.0):
        scale = torch.where(extreme != 0, extreme / code, 1.0)
        tried = (groups / scale).round().clamp(-8, 7) * scale
        miss = (tried - groups).pow(2).sum(-1, keepdim=True)
        best, least = torch.where(miss < least, tried, best), torch.minimum(miss, least)
    return best.view_as(p)


# -- the data


def train_tokenizer(texts: list[str]) -> Any:
    """Byte-level BPE in Qwen's form."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    size = CONFIG["vocab_size"] - len(SPECIAL)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    assert tokenizer.get_vocab_size() == CONFIG["vocab_size"]
    return tokenizer


class Data:
    """Rows of token ids with a weight for each as a target."""

    def __init__(self, text: Path | None, tokenizer_file: Path) -> None:
        from tokenizers import Tokenizer

        verses = read_verses(text)
        self.pieces = prose([verse for verse in verses if verse[0] not in HELD_OUT_BOOKS])
        self.held_out = prose([verse for verse in verses if verse[0] in HELD_OUT_BOOKS])
        self.words = words_of(self.pieces)
        if not tokenizer_file.exists():
            rng = random.Random(0)
            facts = [make_fact(rng, self.words) for _ in range(3000)]
            train_tokenizer(self.pieces + [f"{fact.sentence} {fact.question}\nuser\nassistant\nsystem\n" for fact in facts]).save(
                str(tokenizer_file)
            )
        self.tokenizer = Tokenizer.from_file(str(tokenizer_file))
        self.encode = lru_cache(1 << 16)(lambda text: self.tokenizer.encode(text).ids)
        self.end = self.tokenizer.token_to_id("<|endoftext|>")

    def length_of(self, text: str) -> int:
        return len(self.encode(text))

    def batch(self, seed: int, step: int, length: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """ids int64 [rows, length + 1] and weights float32 [rows, length + 1]."""
        rng = random.Random(f"{seed} {step}")
        ids = torch.full((rows, length + 1), self.end)
        weights = torch.zeros(rows, length + 1)
        makers = (self.prose_row, self.chat_row, self.needle_row, self.list_row, self.copy_row)
        shares = (24, 14, 38, 14, 10) if length < 2048 else (15, 5, 65, 15, 0)
        for row in range(rows):
            at = 0
            for text, weight in rng.choices(makers, shares)[0](rng, length):
                new = self.encode(text)[: length + 1 - at]
                ids[row, at : at + len(new)] = torch.tensor(new)
                weights[row, at : at + len(new)] = weight
                at += len(new)
        return ids, weights

    def prose_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        row: list[tuple[str, float]] = []
        place, used = rng.randrange(len(self.pieces)), 0
        while used <= length:
            piece = self.pieces[place] if row else self.pieces[place].lstrip()
            row.append((piece, 1.0))
            used += self.length_of(piece)
            place = (place + 1) % len(self.pieces)
        return row

    def chat_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """The user gives the first words of some verses, the assistant goes on."""
        row, used = [], 0
        while used <= length:
            place = rng.randrange(len(self.pieces))
            text = self.pieces[place].strip()
            for _ in range(rng.randint(1, 3)):
                place = (place + 1) % len(self.pieces)
                text += self.pieces[place]
            words = text.split(" ")
            cut = rng.randint(2, 9)
            system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" if rng.random() < 0.1 else ""
            user = f"{system}<|im_start|>user\n{' '.join(words[:cut])}<|im_end|>\n<|im_start|>assistant\n"
            row += [(user, TEMPLATE_WEIGHT), (" ".join(words[cut:]), 1.0), ("<|im_end|>\n", 1.0)]
            used += sum(self.length_of(text) for text, _ in row[-3:])
        return row

    def needle_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """Prose with facts in it, then questions for them: in a chat, as bare questions, or as sentences to be completed."""
        most = max(3, length // 80)
        facts = make_facts(rng, self.words, min(24, 1 + int(rng.random() ** 1.5 * most)))
        asked = rng.sample(facts, len(facts))
        style = rng.choice(("chat", "chat", "bare", "sentence"))
        tail = [part for fact in asked for part in self._asked(fact, style)]
        if style == "chat":
            head = "<|im_start|>user\n"
            tail = [("\n" + asked[0].question, TEMPLATE_WEIGHT), *tail[1:]]
        else:
            head = ""
        budget = length - self.length_of(head) - sum(self.length_of(text) for text, _ in tail)
        body = haystack(rng, self.pieces, [(rng.random(), fact) for fact in facts], budget, self.length_of)
        row = [(head, 0.0)] if head else []
        for text, fact in body:
            text = text if row else text.lstrip()
            row += (
                [(text, 0.5)]
                if fact is None
                else [((" " if row else "") + fact.lead, TEMPLATE_WEIGHT), (f" {fact.value}", 0.0), (".", 1.0)]
            )
        return row + tail

    def _asked(self, fact: Fact, style: str) -> list[tuple[str, float]]:
        if style == "chat":
            ask = [(f"<|im_start|>user\n{fact.question}", TEMPLATE_WEIGHT), ("<|im_end|>\n<|im_start|>assistant\n", TEMPLATE_WEIGHT)]
            return [*ask, (fact.lead, 1.0), (f" {fact.value}", ANSWER_WEIGHT), (".", 1.0), ("<|im_end|>", 1.0), ("\n", 0.0)]
        if style == "bare":
            return [(f"\nQuestion: {fact.question}\nAnswer:", TEMPLATE_WEIGHT), (f" {fact.value}", ANSWER_WEIGHT)]
        return [("\n" + fact.lead, TEMPLATE_WEIGHT), (f" {fact.value}", ANSWER_WEIGHT), (".", 1.0)]

    def list_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """Lines "name: value", then as many of them again, in another order, as there is room for."""
        pairs: dict[str, str] = {}
        digits = rng.randint(2, 5)
        for _ in range(length // 24):
            name = make_name(rng, self.words)
            value = make_name(rng, self.words) if rng.random() < 0.2 else "".join(rng.choices("0123456789", k=digits))
            pairs.setdefault(name, value)
        row = [part for name, value in pairs.items() for part in ((f"{name}:", 0.0), (f" {value}", 0.0), ("\n", 0.0))]
        for name in rng.sample(list(pairs), len(pairs)):
            row += [(f"{name}:", 0.0), (f" {pairs[name]}", ANSWER_WEIGHT), ("\n", 1.0)]
        return row

    def copy_row(self, rng: random.Random, length: int) -> list[tuple[str, float]]:
        """Some words, then the same again, over and over."""
        row, used = [], 0
        while used <= length:
            part = "".join(" " + make_name(rng, self.words) for _ in range(rng.randint(4, max(5, length // 12))))
            row += [(part.strip(), 0.0), ("\n" + part.strip(), 1.0), ("\n\n", 1.0)]
            used += sum(self.length_of(text) for text, _ in row[-3:])
        return row


# -- training


def schedule() -> list[tuple[int, int]]:
    """(tokens in a row, rows) of every step."""
    return [shapes[step % len(shapes)] for steps, shapes in STAGES for step in range(steps)]


def learning_rate(step: int, steps: int) -> float:
    return LEARNING_RATE * min(1.0, (step + 1) / WARMUP, (steps - step) / COOLDOWN)


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
        length, rows = shapes[step]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, len(shapes))
        rounded = len(shapes) - step <= ROUNDED_FROM and (step // 4) % 2 == 0
        with rounded_weights(model, rounded):
            loss = compiled_loss(model, *data.batch(args.seed, step, length, rows))
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
