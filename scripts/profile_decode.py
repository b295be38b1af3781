#!/usr/bin/env python3
"""Where the time of a decoded token goes: every kernel beside the bytes it must read and the operations it must do.

    python scripts/profile_decode.py models/2b-q4.qwenc --depth 512
    python scripts/profile_decode.py models/2b-q4.qwenc --fit

Rows are the slots of qwenc's own timer, medians over steps at one depth; the bounds are bytes / stream rate and products / peak, both
measured by this program: before, between and after the steps. --fit instead decodes at depths 512 … 16,384 over a cache that is full of
random keys and values, and fits attention's time as a + b·n. Markdown on stdout; --json for the numbers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from stream_rate import stream_rate

import qwenc
from qwenc.attention.cache import bytes_per_token, cache_arrays
from qwenc.model.records import ATTN, DOWN, GATE_UP, KV, LM_HEAD, NORM, OTHER_LOOP, OUT, QKV, ROPE

ROWS = {
    "qkv": QKV, "attention": ATTN, "o": OUT, "gate_up": GATE_UP, "down": DOWN, "lm_head": LM_HEAD,
    "norm, quantise": NORM, "q norm, rope": ROPE, "k, v to the cache": KV, "start": OTHER_LOOP,
}  # fmt: skip
DEPTHS = (512, 1024, 2048, 4096, 8192, 16384)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a packed file, a checkpoint folder or a Hub id")
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--wmode", help="as in qwenc run")
    parser.add_argument("--kv", default="q8", help="as in qwenc run")
    parser.add_argument("--no-mmap", action="store_true", help="as in qwenc run")
    parser.add_argument("--depth", type=int, default=0, metavar="N", help="tokens already in the context")
    parser.add_argument("--steps", type=int, default=48, metavar="N", help="timed steps per depth")
    parser.add_argument("--fit", action="store_true", help="attention's time over the depth")
    parser.add_argument("--depths", nargs="+", type=int, default=list(DEPTHS), metavar="N", help="depths of --fit")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args()
    deepest = max(args.depths) if args.fit else args.depth
    settings = {"threads": args.threads, "wmode": args.wmode, "kv": args.kv, "mmap": not args.no_mmap, "ctx_size": deepest + args.steps + 1}
    with qwenc.load(args.model, **settings) as engine:
        record = fit_record(engine, args) if args.fit else profile_record(engine, args)
    print(record.pop("markdown"))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


# ---- one depth ------------------------------------------------------------------------------------------------------------
def profile_record(engine: qwenc.Engine, args: argparse.Namespace) -> dict[str, Any]:
    rates = stream_rate(args.threads)
    slots, totals = measure(engine, args.depth, args.steps)
    rates += stream_rate(args.threads)
    rate = statistics.median(rates)
    peak = product_rate(args.threads)
    total = statistics.median(totals)
    bytes_read = step_bytes(engine, args.depth)
    products = step_products(engine, args.depth)
    lines = [
        f"{engine.packed.path.name}, {engine.wmode}, {args.kv} KV, depth {args.depth}, {args.threads} threads. Memory {rate:.1f} GB/s "
        f"(median of {len(rates)}, best {max(rates):.1f}), int8 products {peak:.0f} G/s.",
        "",
        "| kernel | ms a token | share | MB | GB/s | of the stream rate | M products | of the peak |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    rows: dict[str, dict[str, float]] = {}
    for name, ms in {**slots, "outside the step": total - sum(slots.values()), "all": total}.items():
        megabytes, millions = bytes_read.get(name, 0) / 1e6, products.get(name, 0) / 1e6
        rows[name] = {"ms": ms, "mb": megabytes, "million_products": millions}
        reads = f"{megabytes:.1f} | {megabytes / ms:.1f} | {100 * megabytes / ms / rate:.0f} %" if megabytes and ms > 0 else "| |"
        work = f"{millions:.0f} | {100 * millions / ms / peak:.0f} %" if millions and ms > 0 else "|"
        lines.append(f"| {name} | {ms:.3f} | {100 * ms / total:.1f} % | {reads} | {work} |")
    here = statistics.median(stream_rate(args.threads, values=engine.packed.data[: 1 << 30]))
    used = bytes_read["all"] / 1e6 / total
    lines.append(
        f"\n{1e3 / total:.1f} tok/s; {100 * used / rate:.0f} % of the stream rate. The pages that the weights lie on are read at "
        f"{here:.1f} GB/s ({100 * used / here:.0f} %)."
    )
    return {"markdown": "\n".join(lines), "stream_gb_s": rates, "weights_gb_s": here, "int8_products_g_s": peak, "rows": rows}


def measure(engine: qwenc.Engine, depth: int, steps: int) -> tuple[dict[str, float], list[float]]:
    """(median milliseconds of each timer slot, milliseconds of each step) at `depth` tokens of random context."""
    session = engine.session(depth + steps + 1)
    session.compile()
    sequence: Any = session._sequence  # its timer has what no public record has: every slot, every step
    if depth:
        fill(sequence, depth)
    tokens = np.random.default_rng(0).integers(0, engine.config.vocab_size, steps + 1).tolist()
    session.step(tokens[0])
    slots: dict[str, list[float]] = {name: [] for name in ROWS}
    totals = []
    for token in tokens[1:]:
        session.step(token)
        totals.append(sequence.step_ns / 1e6)
        for name, slot in ROWS.items():
            slots[name].append(sequence.timer[slot] / 1e6)
    return {name: statistics.median(values) for name, values in slots.items()}, totals


def fill(sequence: Any, depth: int) -> None:
    """Pretend that `depth` tokens are in the cache: random codes in touched pages, scales of a few hundredths. Prefill would say the same
    about speed, and takes minutes."""
    rng = np.random.default_rng(1)
    pages = -(-depth // 256)
    for array in cache_arrays(sequence.cache).values():
        for page in range(min(pages, len(array))):
            here = array[page]
            if here.dtype == np.float32:
                here[:] = rng.random(here.shape, np.float32) * 0.02
            elif here.dtype == np.uint16:  # half-precision scales
                here[:] = (rng.random(here.shape, np.float32) * 0.02).astype(np.float16).view(np.uint16)
            else:
                np.maximum(
                    np.frombuffer(rng.bytes(here.nbytes), here.dtype).reshape(here.shape), -127 if here.dtype == np.int8 else 0, out=here
                )
    sequence.length = depth


def step_bytes(engine: qwenc.Engine, depth: int) -> dict[str, float]:
    """Bytes that one step must read, by row: the matrices of the decode format (of experts the chosen ones), keys and values."""
    weights = engine._model.decode_weights
    moe = engine.config.moe
    share = moe.num_experts_per_tok / moe.num_experts if moe else 0.0
    dense = {"qkv": weights.qkv, "o": weights.o, "gate_up": weights.gate_up, "down": weights.down, "lm_head": weights.lm_head}
    found = {name: float(_size(matrix)) for name, matrix in dense.items()}
    found["gate_up"] += share * _size(weights.expert_gate_up)
    found["down"] += share * _size(weights.expert_down)
    found["norm, quantise"] = float(weights.router.nbytes)
    found["attention"] = float(depth * kv_bytes(engine))
    found["all"] = sum(found.values())
    return found


def kv_bytes(engine: qwenc.Engine) -> int:
    """Bytes of one token in the cache, all layers."""
    config = engine.config
    return bytes_per_token(engine.settings.kv, config.num_hidden_layers, config.num_key_value_heads, config.padded_head_dim)


def step_products(engine: qwenc.Engine, depth: int) -> dict[str, float]:
    """Multiplications of one step, by row; each is one of 8 bits, but q8 activations and attention take two (15-bit numbers)."""
    weights, config = engine._model.decode_weights, engine.config
    pieces = 2 if engine.wmode == "q8" else 1
    found = {}
    for name, matrix in (
        ("qkv", weights.qkv),
        ("o", weights.o),
        ("gate_up", weights.gate_up),
        ("down", weights.down),
        ("lm_head", weights.lm_head),
    ):
        found[name] = pieces * float(_count(matrix))
    if config.moe:
        share = config.moe.num_experts_per_tok / config.moe.num_experts
        found["gate_up"] += pieces * share * _count(weights.expert_gate_up)
        found["down"] += pieces * share * _count(weights.expert_down)
    found["attention"] = 4.0 * depth * config.num_hidden_layers * config.num_attention_heads * config.padded_head_dim
    found["all"] = sum(found.values())
    return found


def _size(matrix: Any) -> int:
    return 0 if matrix is None else sum(array.nbytes for array in matrix)


def _count(matrix: Any) -> int:
    """Weights in a matrix stack."""
    if matrix is None:
        return 0
    first = matrix[0]
    return first.size * (2 if first.dtype == np.uint8 else 1)


def product_rate(threads: int) -> float:
    """10^9 8-bit products a second that the dot-product instruction does on registers, all threads together."""
    from product_rate import product_rate as rate

    return rate(threads)


# ---- over depths ------------------------------------------------------------------------------------------------------------
def fit_record(engine: qwenc.Engine, args: argparse.Namespace) -> dict[str, Any]:
    rates, rows = [], []
    for depth in args.depths:
        rates += stream_rate(args.threads, passes=3)
        slots, totals = measure(engine, depth, args.steps)
        rows.append((depth, slots["attention"], statistics.median(totals)))
    rates += stream_rate(args.threads, passes=3)
    rate, each = statistics.median(rates), kv_bytes(engine)
    n, ms = np.array([row[0] for row in rows], float), np.array([row[1] for row in rows])
    b, a = np.polyfit(n, ms, 1)
    least = each / rate / 1e6  # ms a token of context
    lines = [
        f"{engine.packed.path.name}, {args.kv} KV ({each} bytes a token), {args.threads} threads. Memory {rate:.1f} GB/s.",
        "",
        "| depth n | attention, ms | fit a + b·n | KV bytes / stream rate | tok/s |",
        "|--:|--:|--:|--:|--:|",
    ]
    lines += [f"| {depth} | {took:.3f} | {a + b * depth:.3f} | {least * depth:.3f} | {1e3 / total:.1f} |" for depth, took, total in rows]
    lines.append(f"\na = {a:.3f} ms, b = {1e3 * b:.3f} µs a token of context = {b / least:.2f} × (KV bytes / stream rate).")
    return {
        "markdown": "\n".join(lines),
        "stream_gb_s": rates,
        "kv_bytes": each,
        "rows": [dict(zip(("depth", "attention_ms", "step_ms"), row, strict=True)) for row in rows],
        "a_ms": a,
        "b_ms": b,
        "ratio": b / least,
    }


if __name__ == "__main__":
    main()
