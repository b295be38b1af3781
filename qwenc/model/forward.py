"""A model on a thread team: the Python side of prefill and decode steps, and the KV state of one sequence."""

from __future__ import annotations

from typing import NamedTuple

import numba
import numpy as np

from qwenc.attention.cache import PAGE, KVCache, cache_arrays, is_paged, new_cache
from qwenc.attention.select import PROBE
from qwenc.checkpoint.packed import Packed
from qwenc.config.rope import rope_inv_freq, rope_tables
from qwenc.errors import UsageError
from qwenc.machine.team import ThreadTeam
from qwenc.model.decode import decode_phases, decode_step
from qwenc.model.prefill import prefill_phases, prefill_step
from qwenc.model.records import Buffers, new_buffers
from qwenc.model.sparse_plan import make_sparse, why_exact
from qwenc.model.steps import Steps, check_finite, compile_steps
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
        return self.angles_at(np.arange(first, first + count))

    def angles_at(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """cos and sin float32 [n, head_dim/2] of any positions."""
        return rope_tables(self.inv_freq, self.rope_scaling, positions)


class Scratch:
    """Buffers for the steps of one context after another, never of two at once. prefill: by size and whether logits of every token fit."""

    def __init__(self, model: Model, kept_blocks: int = 0) -> None:
        shape = model.shape
        self.steps = Steps(model.team, max(decode_phases(shape.layers), prefill_phases(shape.layers)))
        self.decode = new_buffers(shape, model.decode_weights, 1, kept_blocks=kept_blocks)
        self.prefill: dict[tuple[int, bool], Buffers] = {}


class Mark(NamedTuple):
    """A point of a context: its length, and the cache's page that the next token goes to."""

    length: int
    page: dict[str, np.ndarray]


class Sequence:
    """One context of at most `capacity` tokens: its KV cache, its length and the buffers to extend it. watch: keep what every decode step
    chooses (`kept_blocks`). beside: another context of the model, never in use at the same time, whose buffers this one shares."""

    def __init__(self, model: Model, capacity: int, settings: Settings, *, watch: bool = False, beside: Sequence | None = None):
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
        blocks = -(-capacity // settings.sparse_block) if watch else 0
        self._scratch: Scratch = Scratch(model, blocks) if beside is None else beside._scratch

    def extend(self, ids: np.ndarray, *, all_logits: bool = False) -> np.ndarray:
        """Prefill one mini-batch of at most prefill_batch token ids. Returns float32 logits: [vocab] after the last, or [n, vocab] (a
        view, valid until the next step). Raises UsageError beyond the capacity, QwencError for logits that are not finite."""
        count = len(ids)
        self.check_room(count)
        buffers = self._buffers_for(count, all_logits)
        cos, sin = self.model.angles(self.length, count)
        weights, shape = self.model.prefill_weights, self.model.shape
        tokens = np.ascontiguousarray(ids, np.int64)
        cache, sparse, at = self.cache, self.sparse_prefill, self.length
        self._scratch.steps.run(lambda team: prefill_step(team, weights, shape, cache, sparse, buffers, tokens, at, cos, sin, all_logits))
        self.length += count
        vocab = self.model.config.vocab_size
        return self._checked(buffers.logits[:count, :vocab] if all_logits else buffers.logits[0, :vocab])

    def step(self, token: int) -> np.ndarray:
        """Decode one token. Returns float32 logits [vocab] (a view, valid until the next step). Raises as `extend` does."""
        self.check_room(1)
        cos, sin = self.model.angles(self.length, 1)
        weights, shape, buffers = self.model.decode_weights, self.model.shape, self._scratch.decode
        cache, sparse = self.cache, self.sparse_decode
        self._scratch.steps.run(lambda team: decode_step(team, weights, shape, cache, sparse, buffers, token, self.length, cos, sin))
        self.length += 1
        return self._checked(buffers.logits[0, : self.model.config.vocab_size])

    def why_exact(self, *, prefill: bool) -> str:
        """Why the last step attended to the whole context; "" if it chose blocks."""
        sparse = self.sparse_prefill if prefill else self.sparse_decode
        return why_exact(sparse if self.is_sparse else None, self.length)

    @property
    def missed(self) -> np.ndarray | None:
        """Estimated share of the attention that the last decode step left out, float32 [layers, kv_heads]; None when it was exact, or when
        nothing is estimated (score "probe")."""
        if self.why_exact(prefill=False) or self.sparse_decode.score == PROBE:
            return None
        return self._scratch.decode.missed.reshape(self.model.shape.layers, self.model.shape.kv_heads)

    @property
    def kept_blocks(self) -> np.ndarray:
        """Which blocks the last sparse step chose, uint8 [layers, kv_heads, blocks] (with `watch`)."""
        return self._scratch.decode.kept.reshape(self.model.shape.layers, self.model.shape.kv_heads, -1)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. What the cache holds of the others is written over."""
        if not 0 <= length <= self.length:
            raise UsageError(f"a context of {self.length} tokens cannot be cut to {length}")
        self.length = length

    @property
    def block_masses(self) -> np.ndarray:
        """Share of attention that each block held in the last sparse step, float32 [layers, kv_heads, blocks] (with `watch`): true when the
        oracle chose, else estimated."""
        return self._scratch.decode.mass.reshape(self.model.shape.layers, self.model.shape.kv_heads, -1)

    def mark(self) -> Mark:
        """This point, to come back to: full pages are never written again."""
        last = self.length // PAGE
        arrays = cache_arrays(self.cache).items()
        return Mark(self.length, {name: array[place].copy() for name, array in arrays if (place := _page(name, last)) < len(array)})

    def rewind(self, mark: Mark) -> None:
        """Go back to `mark`, made on this cache."""
        arrays = cache_arrays(self.cache)
        for name, saved in mark.page.items():
            arrays[name][_page(name, mark.length // PAGE)] = saved
        self.length = mark.length

    def take_over(self, other: Sequence, mark: Mark) -> None:
        """Share the cache of `other`, as it was at `mark`. Raises UsageError for a cache of another kind or a wrong capacity."""
        if other.model is not self.model or _kind(other.cache) != _kind(self.cache):
            raise UsageError("a session can only go on in a cache of its own kind")
        if not mark.length <= self.capacity <= other.capacity:
            raise UsageError(f"a session of {self.capacity} tokens cannot go on after {mark.length} in one of {other.capacity}")
        self.cache = other.cache
        self.rewind(mark)

    def kv_bytes(self) -> int:
        """Bytes of the tokens in the cache, rounded up."""
        arrays = cache_arrays(self.cache).items()
        return -(-sum(array[0].nbytes for name, array in arrays if is_paged(name)) * self.length // PAGE)

    def compile(self, reporter: Reporter) -> None:
        """Compile both steps, or load them from the cache."""
        team = self._scratch.steps.team(0)
        cos, sin = self.model.angles(0, 1)
        shape, cache, ids = self.model.shape, self.cache, np.zeros(1, np.int64)
        prefill = (self.model.prefill_weights, shape, cache, self.sparse_prefill, self._buffers_for(1, False), ids, 0, cos, sin, False)
        decode = (self.model.decode_weights, shape, cache, self.sparse_decode, self._scratch.decode, 0, 0, cos, sin)
        compile_steps([(prefill_step, (team, *prefill)), (decode_step, (team, *decode))], reporter)

    @property
    def timer(self) -> np.ndarray:
        """Nanoseconds of the last step, by slot."""
        return self._scratch.steps.timer

    @property
    def step_ns(self) -> int:
        return self._scratch.steps.step_ns

    def check_room(self, count: int) -> None:
        """Raises UsageError if `count` more tokens do not fit."""
        if self.length + count > self.capacity:
            raise UsageError(f"the context is full: {self.length} + {count} tokens do not fit into {self.capacity}")

    def _buffers_for(self, count: int, all_logits: bool) -> Buffers:
        """Buffers that fit `count` tokens: a small batch does not pay for a large one's memory."""
        size = self.prefill_batch if count > 64 else min(64, self.prefill_batch)
        key = (max(size, 2), all_logits)
        if key not in self._scratch.prefill:
            self._scratch.prefill[key] = new_buffers(
                self.model.shape, self.model.prefill_weights, key[0], all_logits=all_logits, staged=hasattr(self.cache.k, "tail")
            )
        return self._scratch.prefill[key]

    def _checked(self, logits: np.ndarray) -> np.ndarray:
        self.bad_layer = self._scratch.steps.bad_layer
        return check_finite(logits)


def _page(name: str, page: int) -> int:
    """Where array `name` of a cache has what it holds of a page: what is not full yet lies outside the pages."""
    return page if is_paged(name) else 0


def _kind(cache: KVCache) -> list[tuple]:
    return [(name, array.dtype, array.shape[1:]) for name, array in cache_arrays(cache).items()]
