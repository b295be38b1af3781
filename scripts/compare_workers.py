"""The engines behind compare_llama_cpp.py, each driven token by token in a process of its own.

A worker reads one JSON request per line and answers with one JSON line. Requests: {"open": {...}} loads the model; {"depth": d, "kv": k,
"prefill": p, "decode": t} fills a context with d tokens and times p tokens of prefill and t single steps there, in seconds. Only the
package of its own engine needs to be installed where a worker runs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

GGML_F16, GGML_Q8_0 = 1, 8
CHUNK = 512  # tokens per batch while a context is filled


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level API."""

    def __init__(self, model: str, threads: int, capacity: int, **_: Any):
        import llama_cpp

        self.api = api = llama_cpp
        self.threads, self.capacity = threads, capacity
        api.llama_backend_init()
        self.name = f"llama-cpp-python {llama_cpp.__version__}"
        self.model = api.llama_model_load_from_file(os.fsencode(model), api.llama_model_default_params())
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.context: Any = None
        self.kv = ""

    def start(self, kv: str) -> None:
        """Empty the context; make a new one when the KV type changes."""
        if kv != self.kv:
            if self.context:
                self.api.llama_free(self.context)
            self.context, self.kv = self._new_context(GGML_Q8_0 if kv == "q8_0" else GGML_F16), kv
            if not self.context:
                raise RuntimeError(f"no context with {kv} KV")
        self.length = 0
        self._clear()

    def _new_context(self, kind: int) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.capacity, CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = kind
        params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return self.api.llama_init_from_model(self.model, params)

    def _clear(self) -> None:
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)

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

    def __init__(self, model: str, threads: int, capacity: int, **_: Any):
        from importlib.metadata import version

        from ik_llama_cpp import _ctypes_api as api

        self.api, self.threads, self.capacity = api, threads, capacity
        self.name = f"ik-llama-cpp-python {version('ik-llama-cpp-python')}"
        api.llama_backend_init()
        params = api.llama_model_default_params()
        params.repack_tensors = True
        self.model = api.llama_model_load_from_file(os.fsencode(model), params)
        if not self.model:
            raise RuntimeError(f"ik_llama.cpp cannot load {model}")
        self.context, self.kv = None, ""

    def _new_context(self, kind: int) -> Any:
        params = self.api.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = self.capacity, CHUNK, CHUNK
        params.n_threads = params.n_threads_batch = self.threads
        params.type_k = params.type_v = kind
        params.flash_attn = True
        return self.api.llama_init_from_model(self.model, params)

    def _clear(self) -> None:
        self.api.llama_kv_cache_clear(self.context)


class Qwenc:
    """qwenc itself, on a packed file of the same shape. Its KV types have other names: q8_0 is asked for as q8."""

    def __init__(self, model: str, threads: int, capacity: int, settings: dict[str, Any], **_: Any):
        import qwenc

        self.capacity = capacity
        self.session: Any = None
        self.name = f"qwenc {qwenc.__version__}"
        self.engine = qwenc.load(model, threads=threads, ctx_size=capacity, **settings)

    def start(self, kv: str) -> None:
        self.session = self.engine.session(self.capacity)

    def prefill(self, ids: list[int]) -> None:
        self.session.prefill(ids)

    def step(self, token: int) -> None:
        self.session.step(token)


WORKERS = {"llama": LlamaCpp, "ik": IkLlamaCpp, "qwenc": Qwenc}


def measure(engine: Any, depth: int, kv: str, prefill: int, decode: int, seed: int = 0) -> dict[str, list[float]]:
    """Seconds of `prefill` tokens in one go, and of each of `decode` steps, both at `depth` tokens of context."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        return rng.integers(1000, 100000, count).tolist()

    engine.start(kv)
    if depth:
        engine.prefill(ids(depth))
    steps = []
    for token in ids(decode + 1):
        began = time.perf_counter()
        engine.step(token)
        steps.append(time.perf_counter() - began)
    engine.start(kv)
    if depth:
        engine.prefill(ids(depth))
    prompt = ids(prefill)
    began = time.perf_counter()
    engine.prefill(prompt)
    return {"prefill_s": [time.perf_counter() - began], "step_s": steps[1:]}  # the first step still fills caches


def serve(kind: str) -> None:
    """Answer requests from stdin until it closes. Libraries may print: what they write to stdout goes to stderr."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    engine: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        if "open" in request:
            engine = WORKERS[kind](**request["open"])
            answer: dict[str, Any] = {"name": engine.name}
        else:
            answer = measure(engine, **request)
        print(json.dumps(answer), file=answers, flush=True)
