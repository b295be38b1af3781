#!/usr/bin/env python3
"""Write a GGUF file with random Q4_0 weights in the shape of a Qwen3 model, for benchmarks of llama.cpp and its kin.

    python scripts/random_gguf.py 0.6b out.gguf

Every matrix is Q4_0, the (tied) embeddings too: 4.5 bits a weight, as in qwenc's q4. There is no tokenizer. Needs the package gguf.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

BLOCK, BLOCK_BYTES = 32, 18  # Q4_0: a half-precision scale and 16 bytes of nibbles for 32 weights


@dataclass(frozen=True)
class Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float


SHAPES = {
    "0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, 1e6),
    "2b": Shape(28, 2048, 16, 8, 128, 6144, 151936, 5e6),
}


class RandomBlocks:
    """Q4_0 matrices cut from one pool of random blocks, each from another place: writing gigabytes then needs little memory or time."""

    def __init__(self, seed: int = 0, blocks: int = 1 << 23):
        rng = np.random.default_rng(seed)
        self._pool = rng.integers(0, 256, (blocks, BLOCK_BYTES), dtype=np.uint8)
        self._rng = rng

    def matrix(self, rows: int, inputs: int) -> np.ndarray:
        """uint8 [rows, inputs/32·18], weights of standard deviation 1/sqrt(inputs)."""
        count = rows * inputs // BLOCK
        start = int(self._rng.integers(0, len(self._pool)))
        blocks = np.take(self._pool, np.arange(start, start + count), axis=0, mode="wrap")
        code_rms = math.sqrt((16 * 16 - 1) / 12 + 0.25)
        blocks[:, :2] = np.float16(1 / (code_rms * math.sqrt(inputs))).reshape(1).view(np.uint8)
        return blocks.reshape(rows, -1)


def layer_matrices(shape: Shape) -> dict[str, tuple[int, int]]:
    """(rows, inputs) of each matrix of a layer."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    return {
        "attn_q": (q, shape.hidden),
        "attn_k": (kv, shape.hidden),
        "attn_v": (kv, shape.hidden),
        "attn_output": (shape.hidden, q),
        "ffn_gate": (shape.ffn, shape.hidden),
        "ffn_up": (shape.ffn, shape.hidden),
        "ffn_down": (shape.hidden, shape.ffn),
    }


def write(shape: Shape, out: Path) -> None:
    """Write `out`; it appears when it is complete."""
    import gguf

    part = out.with_name(f".{out.name}.{os.getpid()}.part")
    writer = gguf.GGUFWriter(part, "qwen3")
    writer.add_context_length(40960)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(shape.vocab)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_tokenizer_model("none")
    blocks = RandomBlocks()

    def matrix(name: str, rows: int, inputs: int) -> None:
        writer.add_tensor(f"{name}.weight", blocks.matrix(rows, inputs), raw_dtype=gguf.GGMLQuantizationType.Q4_0)

    def norm(name: str, width: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))

    matrix("token_embd", shape.vocab, shape.hidden)
    norm("output_norm", shape.hidden)
    for i in range(shape.layers):
        norm(f"blk.{i}.attn_norm", shape.hidden)
        norm(f"blk.{i}.ffn_norm", shape.hidden)
        norm(f"blk.{i}.attn_q_norm", shape.head_dim)
        norm(f"blk.{i}.attn_k_norm", shape.head_dim)
        for name, (rows, inputs) in layer_matrices(shape).items():
            matrix(f"blk.{i}.{name}", rows, inputs)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        os.replace(part, out)
    finally:
        part.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    write(SHAPES[args.shape], args.out)


if __name__ == "__main__":
    main()
