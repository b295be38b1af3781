"""Small Hugging Face folders for tests: random weights in any layout that a checkpoint may have."""

import json

import numpy as np

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
MOE = DENSE | {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
LLAMA = DENSE | {"model_type": "llama", "tie_word_embeddings": False}


def to_bf16(values):
    """float32 -> the upper 16 bits, rounded to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def write_safetensors(path, tensors, dtype="F32", metadata=None):
    """tensors: name -> array, stored as `dtype`; uint16 arrays are taken as BF16 bits."""
    header, blobs, end = {}, [], 0
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, values in tensors.items():
        values = np.asarray(values)
        if values.dtype == np.uint16:
            kind, data = "BF16", values
        else:
            kind = dtype
            data = to_bf16(values) if dtype == "BF16" else values.astype({"F32": "<f4", "F16": "<f2"}[dtype])
        header[name] = {"dtype": kind, "shape": list(values.shape), "data_offsets": [end, end + data.nbytes]}
        blobs.append(data.tobytes())
        end += data.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def weights(config, seed=0, prefix="model."):
    """Random float32 tensors with the names and shapes that transformers gives them; experts one by one."""
    rng = np.random.default_rng(seed)
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(rows, inputs):
        return (rng.standard_normal((rows, inputs)) / np.sqrt(inputs)).astype(np.float32)

    def norm(n):
        return (1 + 0.1 * rng.standard_normal(n)).astype(np.float32)

    def mlp(at, width):
        return {
            f"{at}gate_proj.weight": matrix(width, hidden),
            f"{at}up_proj.weight": matrix(width, hidden),
            f"{at}down_proj.weight": matrix(hidden, width),
        }

    out = {f"{prefix}embed_tokens.weight": matrix(config["vocab_size"], hidden), f"{prefix}norm.weight": norm(hidden)}
    if not config["tie_word_embeddings"]:
        out["lm_head.weight"] = matrix(config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        at = f"{prefix}layers.{i}."
        out |= {f"{at}input_layernorm.weight": norm(hidden), f"{at}post_attention_layernorm.weight": norm(hidden)}
        out |= {f"{at}self_attn.{x}_proj.weight": matrix(n, hidden) for x, n in (("q", heads), ("k", kv), ("v", kv))}
        out[f"{at}self_attn.o_proj.weight"] = matrix(hidden, heads)
        if config["model_type"] != "llama":
            out |= {f"{at}self_attn.q_norm.weight": norm(dim), f"{at}self_attn.k_norm.weight": norm(dim)}
        if "num_experts" in config and i not in config.get("mlp_only_layers", []):
            out[f"{at}mlp.gate.weight"] = matrix(config["num_experts"], hidden)
            for e in range(config["num_experts"]):
                out |= mlp(f"{at}mlp.experts.{e}.", config["moe_intermediate_size"])
        else:
            out |= mlp(f"{at}mlp.", config["intermediate_size"])
    return out


def fuse_experts(tensors, config, transposed):
    """The same tensors with experts fused: [E, 2I, H] and [E, H, I], or both transposed."""
    out = {name: values for name, values in tensors.items() if ".experts." not in name}
    for name in list(tensors):
        if name.endswith(".experts.0.gate_proj.weight"):
            at = name.removesuffix("0.gate_proj.weight")

            def stack(kind, at=at):
                return np.stack([tensors[f"{at}{e}.{kind}_proj.weight"] for e in range(config["num_experts"])])

            fused = {"gate_up_proj": np.concatenate([stack("gate"), stack("up")], axis=1), "down_proj": stack("down")}
            for kind, values in fused.items():
                out[at + kind] = np.ascontiguousarray(values.swapaxes(1, 2)) if transposed else values
    return out


def write_checkpoint(folder, config=DENSE, tensors=None, shards=1, dtype="F32"):
    """A checkpoint folder; with several shards the tensors are dealt out in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = weights(config) if tensors is None else tensors
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    home = {tensor: names[i % shards] for i, tensor in enumerate(tensors)}
    for name in names:
        write_safetensors(folder / name, {t: v for t, v in tensors.items() if home[t] == name}, dtype)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": home}))
    return folder


class Notes:
    """A Reporter that remembers."""

    def __init__(self):
        self.notes, self.steps = [], []

    def note(self, text):
        self.notes.append(text)

    def detail(self, text):
        pass

    def progress(self, stage, done, total, unit=""):
        self.steps.append((stage, done, total, unit))
