"""The engines behind compare_llama_cpp.py, each driven token by token in a process of its own.

A worker reads one JSON request per line and answers with one JSON line. Requests: {"open": {...}} loads the model; {"depth": d, "prefill":
p, "decode": t} brings the context to d tokens and times t single steps and p tokens of prefill there, in seconds; {"stream": passes}
measures the rate at which memory is read; {"peak": true} asks for the most memory that the process ever held. Only the package of its own
engine needs to be installed where a worker runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from ctypes import c_bool, c_int32, c_void_p
from typing import Any

import numpy as np

GGML_F16, GGML_Q8_0 = 1, 8
CHUNK = 512  # tokens per batch while a context is filled


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level API."""

    def __init__(self, model: str, threads: int, capacity: int, kv: str, **_: Any):
        import llama_cpp

        self.api = api = llama_cpp
        self.threads, self.capacity, self.length = threads, capacity, 0
        api.llama_backend_init()
        self.name = f"llama-cpp-python {llama_cpp.__version__}"
        self.model = api.llama_model_load_from_file(os.fsencode(model), api.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self._open_context(kv)

    def _open_context(self, kv: str) -> None:
        self.context = self._new_context(GGML_Q8_0 if kv == "q8_0" else GGML_F16)
        if not self.context:
            raise RuntimeError(f"no context with {kv} KV")

    def _new_context(self, kind: int) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.capacity, CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = kind
        params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return self.api.llama_init_from_model(self.model, params)

    def trim(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        self.api.llama_memory_seq_rm(self.api.llama_get_memory(self.context), 0, length, -1)
        self.length = length

    def add(self, ids: list[int]) -> None:
        """One batch of tokens (at most CHUNK); logits of the last one are computed."""
        batch = self.api.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.length + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, i == len(ids) - 1
        failed = self.api.llama_decode(self.context, batch)
        self.api.llama_batch_free(batch)
        if failed:
            raise RuntimeError(f"llama_decode returned {failed}")
        self.length += len(ids)
        logits = self.api.llama_get_logits_ith(self.context, -1)  # waits until the work is done
        if not np.isfinite(logits[0]):
            raise RuntimeError("logits are not finite")

    def prefill(self, ids: list[int]) -> None:
        for first in range(0, len(ids), CHUNK):
            self.add(ids[first : first + CHUNK])

    def step(self, token: int) -> None:
        self.add([token])


class IkLlamaCpp(LlamaCpp):
    """ik_llama.cpp through ik-llama-cpp-python's ctypes layer; weights repacked for its kernels."""

    def __init__(self, model: str, threads: int, capacity: int, kv: str, **_: Any):
        from importlib.metadata import version

        from ik_llama_cpp import _ctypes_api as api

        self.api, self.threads, self.capacity, self.length = api, threads, capacity, 0
        self.name = f"ik-llama-cpp-python {version('ik-llama-cpp-python')}"
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.repack_tensors = True
        self.model = api.llama_model_load_from_file(os.fsencode(model), params)
        if not self.model:
            raise RuntimeError(f"ik_llama.cpp cannot load {model}")
        self._open_context(kv)

    def _new_context(self, kind: int) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.capacity, CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = kind
        params.flash_attn = True
        return self.api.llama_init_from_model(self.model, params)

    def trim(self, length: int) -> None:
        forget = self.api._cfunc("llama_kv_cache_seq_rm", [c_void_p, c_int32, c_int32, c_int32], c_bool)  # the package leaves it out
        if not forget(lambda *_: False)(self.context, 0, length, -1):
            raise RuntimeError("ik_llama.cpp's context cannot be shortened")
        self.length = length


class Qwenc:
    """qwenc itself, on a packed file of the same shape."""

    def __init__(self, model: str, threads: int, capacity: int, settings: dict[str, Any], **_: Any):
        import qwenc
        from qwenc.attention.cache import bytes_per_token

        self.name = f"qwenc {qwenc.__version__}"
        self.engine = qwenc.load(model, threads=threads, ctx_size=capacity, **settings)
        self.session = self.engine.session(capacity)
        config = self.engine.config
        self.kv_bytes = bytes_per_token(settings["kv"], config.num_hidden_layers, config.num_key_value_heads, config.padded_head_dim)

    @property
    def length(self) -> int:
        return self.session.length

    def trim(self, length: int) -> None:
        self.session._sequence.length = length  # no public call forgets tokens

    def prefill(self, ids: list[int]) -> None:
        self.session.prefill(ids)

    def step(self, token: int) -> None:
        self.session.step(token)


class Transformers:
    """Hugging Face transformers in float32, random weights."""

    def __init__(self, model: str, threads: int, shape: str, **_: Any):
        import torch
        import transformers

        torch.set_num_threads(threads)
        torch.manual_seed(0)
        self.torch, self.length = torch, 0
        self.name = f"transformers {transformers.__version__}, float32"
        self.model = transformers.AutoModelForCausalLM.from_config(hf_config(shape), dtype=torch.float32).eval()
        self.cache = transformers.DynamicCache(config=self.model.config)

    def trim(self, length: int) -> None:
        self.cache.crop(length)
        self.length = length

    def prefill(self, ids: list[int]) -> None:
        with self.torch.inference_mode():
            logits = self.model(self.torch.tensor([ids]), past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits
        self.length += len(ids)
        if not self.torch.isfinite(logits).all():
            raise RuntimeError("logits are not finite")

    def step(self, token: int) -> None:
        self.prefill([token])


class OpenVino:
    """OpenVINO by way of optimum-intel: int4 weights in groups of 128, symmetric, random. It is written to `model` on first use."""

    def __init__(self, model: str, threads: int, shape: str, **_: Any):
        from importlib.metadata import version

        import transformers
        from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

        self.name = f"openvino {version('openvino')}, int4 group 128"
        settings = {"INFERENCE_NUM_THREADS": str(threads), "PERFORMANCE_HINT": "LATENCY"}
        if not os.path.isdir(model):
            source = f"{model}-f32"
            transformers.AutoModelForCausalLM.from_config(hf_config(shape)).save_pretrained(source)
            four = OVWeightQuantizationConfig(bits=4, group_size=128, sym=True, ratio=1.0)
            OVModelForCausalLM.from_pretrained(source, export=True, quantization_config=four).save_pretrained(model)
        self.model = OVModelForCausalLM.from_pretrained(model, ov_config=settings)
        self.length, self.past = 0, None

    def trim(self, length: int) -> None:
        if length:
            raise RuntimeError("OpenVINO's context cannot be shortened")
        self.length, self.past = 0, None

    def prefill(self, ids: list[int]) -> None:
        import torch

        tokens = np.array([ids], np.int64)
        mask = torch.ones((1, self.length + len(ids)), dtype=torch.int64)
        answer = self.model(input_ids=torch.from_numpy(tokens), attention_mask=mask, past_key_values=self.past)
        self.past = answer.past_key_values
        self.length += len(ids)

    def step(self, token: int) -> None:
        self.prefill([token])


def hf_config(shape: str) -> Any:
    """The transformers config of a shape of random_gguf.py."""
    import transformers
    from random_gguf import SHAPES

    s = SHAPES[shape]
    return transformers.Qwen3Config(
        num_hidden_layers=s.layers,
        hidden_size=s.hidden,
        num_attention_heads=s.heads,
        num_key_value_heads=s.kv_heads,
        head_dim=s.head_dim,
        intermediate_size=s.ffn,
        vocab_size=s.vocab,
        rope_theta=s.rope_theta,
        max_position_embeddings=40960,
        tie_word_embeddings=True,
    )


WORKERS = {"llama": LlamaCpp, "ik": IkLlamaCpp, "qwenc": Qwenc, "transformers": Transformers, "openvino": OpenVino}


def random_ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(1000, 100000, count).tolist()


def measure(engine: Any, filled: int, depth: int, prefill: int, decode: int) -> dict[str, Any]:
    """Seconds of each of `decode` steps, and of `prefill` tokens in one go, both at `depth` tokens of context, of which the first `filled`
    are there already."""
    back_to(engine, min(filled, depth))
    if depth > engine.length:
        engine.prefill(random_ids(depth - engine.length, 1))
    steps = []
    for token in random_ids(decode + 1, 2):
        began = time.perf_counter()
        engine.step(token)
        steps.append(time.perf_counter() - began)
    back_to(engine, depth)
    prompt = random_ids(prefill, 3)
    began = time.perf_counter()
    engine.prefill(prompt)
    return {"prefill_s": time.perf_counter() - began, "step_s": steps[1:]}  # the first step still fills caches


def back_to(engine: Any, length: int) -> None:
    """A context of `length` tokens again; one that cannot be shortened is filled anew."""
    if engine.length == length:
        return
    try:
        engine.trim(length)
    except RuntimeError:
        engine.trim(0)
        engine.prefill(random_ids(length, 1))


def peak_rss() -> int:
    """Bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


def answers_channel() -> Any:
    """Where answers go. Libraries may print: what they write to stdout goes to stderr."""
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return channel


def serve(kind: str) -> None:
    """Answer requests from stdin until it closes."""
    answers = answers_channel()
    engine: Any = None
    filled = 0
    for line in sys.stdin:
        request = json.loads(line)
        if "open" in request:
            engine = WORKERS[kind](**request["open"])
            answer: dict[str, Any] = {"name": engine.name, "kv_bytes": getattr(engine, "kv_bytes", None)}
        elif "stream" in request:
            from stream_rate import stream_rate

            answer = {"rates": stream_rate(request["threads"], passes=request["stream"])}
        elif "peak" in request:
            answer = {"peak_rss": peak_rss()}
        else:
            answer = measure(engine, filled, **request)
            filled = request["depth"]
        print(json.dumps(answer), file=answers, flush=True)


def first_token(kind: str, options: str) -> None:
    """A whole life: load, take a prompt of `prompt` ids, say when the first logits are there, end."""
    answers = answers_channel()
    wanted = json.loads(options)
    prompt = wanted.pop("prompt")
    engine = WORKERS[kind](**wanted)
    engine.prefill(random_ids(prompt, 1))
    print(json.dumps({"name": engine.name, "peak_rss": peak_rss()}), file=answers, flush=True)
