#!/usr/bin/env python3
"""Writes a packed file with random weights in the shape of a real model, for benchmarks. The text it produces is noise.

python scripts/make_random_packed.py 2b /tmp/2b-q4.qwenc --wmode q4
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from qwenc.checkpoint.layout import FORMATS, Matrix, TensorSpec, matrices, packed_tensors, plain_tensors
from qwenc.checkpoint.packed import FORMAT, TOKENIZER, VERSION
from qwenc.checkpoint.packed_writer import PackedWriter
from qwenc.config.model_config import ModelConfig
from qwenc.errors import QwencError

_COMMON = {"head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False}


def _text(layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, theta: float, context: int) -> dict:
    return {
        **_COMMON,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": ffn,
        "rope_theta": theta,
        "max_position_embeddings": context,
    }


def _vision_language(text: dict, tied: bool) -> dict:
    return {"model_type": "qwen3_vl", "tie_word_embeddings": tied, "text_config": {"model_type": "qwen3_vl_text", **text}}


_MOE = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
SHAPES = {
    "0.6b": {"model_type": "qwen3", "tie_word_embeddings": True, **_text(28, 1024, 16, 8, 3072, 1e6, 40960)},
    "2b": _vision_language(_text(28, 2048, 16, 8, 6144, 5e6, 262144), tied=True),
    "8b": _vision_language(_text(36, 4096, 32, 8, 12288, 5e6, 262144), tied=False),
    "30b-a3b": {"model_type": "qwen3_moe", "tie_word_embeddings": False, **_text(48, 2048, 32, 4, 6144, 1e6, 40960), **_MOE},
}
# Root mean square of uniform codes, so that scale = 1 / (rms * sqrt(K)) gives weights of standard deviation 1/sqrt(K).
_CODE_RMS = {"q4": math.sqrt(2 * sum(x * x for x in range(8)) / 16), "q8": math.sqrt((255 * 255 - 1) / 12)}
_CHUNK_BYTES = 4 << 20  # codes per write


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    parser.add_argument("--wmode", choices=("q4", "q8", "dual"), default="q4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="put the tokenizer.json of this folder into the file")
    args = parser.parse_args()
    try:
        write_random(SHAPES[args.shape], args.out, args.wmode, args.seed, args.tokenizer)
    except QwencError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def write_random(config_json: dict, out: Path, wmode: str, seed: int, tokenizer: Path | None = None) -> None:
    """Writes `out` with weights of standard deviation 1/sqrt(K) and norms of one: activations then stay finite through any depth.
    `tokenizer`: a folder with tokenizer.json and tokenizer_config.json."""
    config = ModelConfig.from_dict(config_json)
    tensors = packed_tensors(config, wmode)
    rng = np.random.Generator(np.random.SFC64(seed))
    metadata = {"format": FORMAT, "version": VERSION, "wmode": wmode, "config": json.dumps(config_json)}
    metadata |= {"source": f"random weights, seed {seed}", "source_hash": "random"}
    if tokenizer is not None:
        words = np.frombuffer((tokenizer / "tokenizer.json").read_bytes(), np.uint8)
        tensors[TOKENIZER] = TensorSpec("U8", words.shape)
        metadata["tokenizer_config"] = (tokenizer / "tokenizer_config.json").read_text(encoding="utf-8")
    with PackedWriter(out, tensors, metadata) as writer:
        print(f"{out}: {writer.file_bytes / 1e9:.2f} GB", file=sys.stderr)
        if tokenizer is not None:
            writer.write(TOKENIZER, (), words)
        for name, spec in plain_tensors(config).items():
            values = np.ones(spec.shape, np.float32)
            if name == "router":
                values = rng.standard_normal(spec.shape, np.float32) / np.float32(math.sqrt(config.hidden_size))
            writer.write(name, (), values)
        for fmt in FORMATS[wmode]:
            for matrix in matrices(config):
                print(f"\r{fmt} {matrix.name:<16}", end="", file=sys.stderr, flush=True)
                _write_matrix(writer, matrix, fmt, rng)
    print("\rdone" + " " * 20, file=sys.stderr)


def _write_matrix(writer: PackedWriter, matrix: Matrix, fmt: str, rng: np.random.Generator) -> None:
    """Uniform random codes; one scale for the whole matrix."""
    specs = matrix.tensors(fmt)
    codes = specs[f"{matrix.name}.{fmt}.codes"]
    scales = specs[f"{matrix.name}.{fmt}.scales"]
    scale = np.float16(1 / (_CODE_RMS[fmt] * math.sqrt(matrix.inputs))).view(np.uint16)
    tiles = math.prod(codes.shape[:-2])
    step = max(1, _CHUNK_BYTES // math.prod(codes.shape[-2:]))
    lead = len(codes.shape) - 2
    for start in range(0, tiles, step):
        count = min(step, tiles - start)
        at = np.unravel_index(start, codes.shape[:lead])
        index = tuple(int(i) for i in at)
        raw = np.frombuffer(rng.bytes(count * math.prod(codes.shape[-2:])), np.uint8)
        # Codes have a mean of 0. With one of -½ every token would soon be much the same vector, and so be sent to the same experts.
        if fmt == "q8":
            raw = np.maximum(raw.view(np.int8), np.int8(-127))
        else:
            raw = raw | (raw & 0x0F == 0) * np.uint8(0x08) | (raw & 0xF0 == 0) * np.uint8(0x80)
        writer.write(f"{matrix.name}.{fmt}.codes", index, raw)
        writer.write(f"{matrix.name}.{fmt}.scales", index, np.full(count * math.prod(scales.shape[-2:]), scale))


if __name__ == "__main__":
    sys.exit(main())
