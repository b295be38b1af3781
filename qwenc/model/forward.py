"""A model on a thread team: the Python side of prefill and decode steps, and the KV state of one sequence."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import numba
import numpy as np

from qwenc.attention.cache import new_cache
from qwenc.checkpoint.packed import Packed
from qwenc.config.rope import rope_inv_freq, rope_tables
from qwenc.errors import QwencError, UsageError
from qwenc.kernels.jit import compiling
from qwenc.kernels.sync import BROKEN, STOP, new_sync
from qwenc.machine.later import Later
from qwenc.machine.team import ThreadTeam
from qwenc.model.decode import decode_phases, decode_step
from qwenc.model.prefill import prefill_phases, prefill_step
from qwenc.model.records import TIMER_SLOTS, Buffers, Team, new_buffers
from qwenc.model.sparse_plan import make_sparse, why_exact
from qwenc.model.weights import make_shape, make_weights
from qwenc.report import Reporter
from qwenc.settings import Settings

if numba.config.DISABLE_JIT:
    raise UsageError("NUMBA_DISABLE_JIT is set, but the model runs as compiled code only")


class Model:
    """Weights and shape of one packed file, ready to run in a wmode that the file holds."""

    def __init__(self, packed: Packed, wmode: str, team: ThreadTeam):
        prefill_fmt, decode_fmt = ("q8fast", "q4") if wmode == "dual" else (wmode, wmode)
        self.config = packed.config
        self.shape = make_shape(packed.config)
        self.prefill_weights = make_weights(packed, prefill_fmt)
        self.decode_weights = self.prefill_weights if decode_fmt == prefill_fmt else make_weights(packed, decode_fmt)
        self.team = team
        self.inv_freq, self.rope_scaling = rope_inv_freq(packed.config.rope, packed.config.head_dim)

    def angles(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin float32 [count, head_dim/2] of the positions from `first` on."""
        return rope_tables(self.inv_freq, self.rope_scaling, np.arange(first, first + count))


class Sequence:
    """One context of at most `capacity` tokens: its KV cache, its length and the buffers to extend it. watch: keep what every decode step
    chooses (`kept_blocks`)."""

    def __init__(self, model: Model, capacity: int, settings: Settings, *, watch: bool = False):
        shape = model.shape
        self.model = model
        self.capacity = capacity
        self.prefill_batch = min(settings.prefill_batch, capacity)
        self.sparse_prefill = make_sparse(settings, prefill=True)
        self.sparse_decode = make_sparse(settings, prefill=False)
        self.is_sparse = settings.sparse_attn
        self.cache = new_cache(settings.kv, capacity, shape.layers, shape.kv_heads, shape.head_room, sparse=self.is_sparse)
        self.length = 0
        self.bad_layer: int | None = None
        self.timer = np.zeros(TIMER_SLOTS, np.int64)  # nanoseconds of the last step, by slot
        self.step_ns = 0
        self._sync = new_sync()
        self._claims = np.zeros(max(decode_phases(shape.layers), prefill_phases(shape.layers)), np.int64)
        self._health = np.full(1, -1, np.int64)
        blocks = -(-capacity // settings.sparse_block) if watch else 0
        self._decode_buffers = new_buffers(shape, model.decode_weights, 1, kept_blocks=blocks)
        self._prefill_buffers: dict[tuple[int, bool], Buffers] = {}

    def extend(self, ids: np.ndarray, *, all_logits: bool = False) -> np.ndarray:
        """Prefill one mini-batch of at most prefill_batch token ids. Returns float32 logits: [vocab] after the last, or [n, vocab] (a
        view, valid until the next step). Raises UsageError beyond the capacity, QwencError for logits that are not finite."""
        count = len(ids)
        self._check_room(count)
        buffers = self._buffers_for(count, all_logits)
        cos, sin = self.model.angles(self.length, count)
        weights, shape = self.model.prefill_weights, self.model.shape
        tokens = np.ascontiguousarray(ids, np.int64)
        cache, sparse = self.cache, self.sparse_prefill
        self._run(lambda team: prefill_step(team, weights, shape, cache, sparse, buffers, tokens, self.length, cos, sin, all_logits))
        self.length += count
        vocab = self.model.config.vocab_size
        return self._checked(buffers.logits[:count, :vocab] if all_logits else buffers.logits[0, :vocab])

    def step(self, token: int) -> np.ndarray:
        """Decode one token. Returns float32 logits [vocab] (a view, valid until the next step). Raises as `extend` does."""
        self._check_room(1)
        cos, sin = self.model.angles(self.length, 1)
        weights, shape, buffers = self.model.decode_weights, self.model.shape, self._decode_buffers
        cache, sparse = self.cache, self.sparse_decode
        self._run(lambda team: decode_step(team, weights, shape, cache, sparse, buffers, token, self.length, cos, sin))
        self.length += 1
        return self._checked(buffers.logits[0, : self.model.config.vocab_size])

    @property
    def missed(self) -> np.ndarray | None:
        """Estimated share of the attention that the last step left out, float32 [layers, kv_heads]; None when it was exact."""
        if not self.is_sparse or why_exact(self.sparse_decode, self.length):
            return None
        return self._decode_buffers.missed.reshape(self.model.shape.layers, self.model.shape.kv_heads)

    @property
    def kept_blocks(self) -> np.ndarray:
        """Which blocks the last sparse step chose, uint8 [layers, kv_heads, blocks] (with `watch`)."""
        return self._decode_buffers.kept.reshape(self.model.shape.layers, self.model.shape.kv_heads, -1)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. What the cache holds of the others is written over."""
        if not 0 <= length <= self.length:
            raise UsageError(f"a context of {self.length} tokens cannot be cut to {length}")
        self.length = length

    def compile(self, reporter: Reporter) -> None:
        """Compile both steps, or load them from the cache."""
        team = Team(0, self.model.team.size, self._sync, self._claims, self.timer, self._health)
        cos, sin = self.model.angles(0, 1)
        shape, cache, ids = self.model.shape, self.cache, np.zeros(1, np.int64)
        prefill = (self.model.prefill_weights, shape, cache, self.sparse_prefill, self._buffers_for(1, False), ids, 0, cos, sin, False)
        decode = (self.model.decode_weights, shape, cache, self.sparse_decode, self._decode_buffers, 0, 0, cos, sin)
        jobs: list[tuple[Any, tuple]] = [(prefill_step, (team, *prefill)), (decode_step, (team, *decode))]
        told: list[bool] = []

        def tell() -> None:
            if not told:
                reporter.note("compiling the kernels for these settings, once: about half a minute")
                told.append(True)

        with compiling(tell):
            for done, (step, arguments) in enumerate(jobs):
                if told:
                    reporter.progress("compile", done, len(jobs), "steps")
                types = tuple(numba.typeof(argument) for argument in arguments)
                # in a thread of its own: LLVM's callbacks swallow a KeyboardInterrupt that comes while they run
                Later(partial(step.compile, types)).result()
        if told:
            reporter.progress("compile", len(jobs), len(jobs), "steps")

    def _run(self, step: Any) -> None:
        self._claims[:] = 0
        self.timer[:] = 0
        self._sync[:] = 0
        self._health[0] = -1
        threads = self.model.team.size
        began = time.perf_counter_ns()
        self.model.team.run(
            lambda rank: step(Team(rank, threads, self._sync, self._claims, self.timer, self._health)),
            on_interrupt=lambda: self._signal(STOP),
            on_error=lambda: self._signal(BROKEN),
        )
        self.step_ns = time.perf_counter_ns() - began

    def _signal(self, slot: int) -> None:
        self._sync[slot] = 1

    def _check_room(self, count: int) -> None:
        if self.length + count > self.capacity:
            raise UsageError(f"the context is full: {self.length} + {count} tokens do not fit into {self.capacity}")

    def _buffers_for(self, count: int, all_logits: bool) -> Buffers:
        """Buffers that fit `count` tokens: a small batch does not pay for a large one's memory."""
        size = self.prefill_batch if count > 64 else min(64, self.prefill_batch)
        key = (max(size, 2), all_logits)
        if key not in self._prefill_buffers:
            self._prefill_buffers[key] = new_buffers(
                self.model.shape, self.model.prefill_weights, key[0], all_logits=all_logits, staged=hasattr(self.cache.k, "tail")
            )
        return self._prefill_buffers[key]

    def _checked(self, logits: np.ndarray) -> np.ndarray:
        if np.isfinite(logits.sum(dtype=np.float64)):  # cheap, and no float32 values can overflow a float64
            return logits
        self.bad_layer = int(self._health[0]) if self._health[0] >= 0 else None
        raise QwencError("the model's logits are not finite (NaN or infinity): damaged weights or an overflow")
