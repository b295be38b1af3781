"""One conversation with a model, token by token: what `Engine.generate` is made of, for those who drive the steps themselves."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from collections.abc import Sequence as Ids
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from qwenc.attention.cache import KVCache
from qwenc.errors import QwencError, UsageError
from qwenc.kv_store.arrays import grain_of, used_arrays
from qwenc.model.forward import Mark, Model
from qwenc.model.forward import Sequence as Context
from qwenc.model.records import ATTN, DOWN, GATE_UP, KV, LM_HEAD, NORM, OTHER_LOOP, OUT, QKV, ROPE, SILU
from qwenc.report import SILENT, Reporter
from qwenc.settings import Settings
from qwenc.timing import Timings, TokenTiming

if TYPE_CHECKING:
    from qwenc.kv_store.saved import SavedFile, Snapshot
    from qwenc.model.together import Together

SLOTS = {
    "qkv": QKV, "attn": ATTN, "o": OUT, "gu": GATE_UP, "down": DOWN, "lm": LM_HEAD,
    "nrm": NORM, "rope": ROPE, "kv": KV, "silu": SILU, "othloop": OTHER_LOOP,
}  # fmt: skip
MS = 1e-6  # nanoseconds to milliseconds


class Session:
    """A context of at most `capacity` tokens. `timings` grows with every call; `length` is the number of tokens in the cache. watch: keep
    what sparse attention chooses, for `watched`."""

    def __init__(
        self,
        model: Model,
        capacity: int,
        settings: Settings,
        reporter: Reporter = SILENT,
        beside: Session | None = None,
        *,
        watch: bool = False,
    ):
        """beside: another session of this model, never in use at the same time: its buffers are shared."""
        self.reporter = reporter
        self.timings = Timings()
        self.last: TokenTiming | None = None
        self._settings = settings
        self._path: dict[str, bool] = {}  # phase → whether it is exact
        self._ids: list[int] = []  # of the tokens in the context
        self._prefilled = 0  # leading ones that came by prefill
        self._sequence: Context = Context(model, capacity, settings, watch=watch, beside=beside._sequence if beside else None)

    @property
    def length(self) -> int:
        return self._sequence.length

    def prefill(self, ids: Ids[int]) -> np.ndarray:
        """Add `ids` (at least one) to the context in mini-batches. Returns float32 logits [vocab] after the last one, valid until the
        next call."""
        timing, sequence, done = self.timings.prefill, self._sequence, 0
        for batch in self._batches(ids):
            logits = self._guard(partial(sequence.extend, batch))
            self._took(batch.tolist(), True)
            self._tell_path("prefill", sequence.why_exact(prefill=True))
            done += len(batch)
            timing.n += len(batch)
            timing.total_ms += sequence.step_ns * MS
            timing.qkv_ms += sequence.timer[QKV] * MS
            timing.o_ms += sequence.timer[OUT] * MS
            timing.gateup_ms += sequence.timer[GATE_UP] * MS
            timing.down_ms += sequence.timer[DOWN] * MS
            timing.attn_ms += sequence.timer[ATTN] * MS
            if len(ids) > sequence.prefill_batch:
                self.reporter.progress("prefill", done, len(ids), "tokens")
        return logits

    def step(self, token: int) -> np.ndarray:
        """Add one token to the context. Returns float32 logits [vocab] of the next one, valid until the next call."""
        sequence = self._sequence
        (token,) = self._checked([token])
        logits = self._guard(lambda: sequence.step(token))
        self._took([token], False)
        self._charge(sequence.timer, sequence.step_ns)
        self._tell_path("decode", sequence.why_exact(prefill=False))
        missed = sequence.missed
        if missed is not None:
            self.timings.decode.add_missed(float(missed.mean()), float(missed.max()))
        return logits

    def _tell_path(self, phase: str, why_exact: str) -> None:
        """Says which attention a phase takes, when that changes."""
        if self._settings.sparse_attn and self._path.get(phase) != bool(why_exact):
            self._path[phase] = bool(why_exact)
            self.reporter.detail(
                f"{phase} at {self.length} tokens: " + (f"exact attention ({why_exact})" if why_exact else "sparse attention")
            )

    def together(self, most: int) -> Shared | None:
        """What up to `most` sessions of this kind need to step together; None if they would not keep their bits, or there is but one."""
        from qwenc.model.together import Together

        return Shared(Together(self._sequence.model, most), self) if most > 1 and self.can_share else None

    @property
    def can_share(self) -> bool:
        """Whether sessions of this kind can step together."""
        from qwenc.model.together import can_share_steps

        return can_share_steps(self._sequence.model)

    @property
    def capacity(self) -> int:
        return self._sequence.capacity

    def _charge(self, timer: np.ndarray, step_ns: int, sharers: int = 1) -> None:
        """Counts a decode step that `sharers` sessions took together."""
        ms = {name: float(timer[slot]) * MS / sharers for name, slot in SLOTS.items()}
        total = step_ns * MS / sharers
        ms["other"] = max(0.0, total - sum(ms.values()))
        self.last = TokenTiming(self.length, ms, total)
        self.timings.decode.add(self.last)

    def truncate(self, length: int) -> None:
        """Forget all but the first `length` tokens. Raises UsageError for more than there are, or for a place where the context cannot be
        cut: tokens that share scales (`grain`) stay together."""
        if length != self.length and length % self._cache_grain:
            raise UsageError(f"this kind of context can be cut at multiples of {self._cache_grain} tokens, not at {length}")
        self._sequence.truncate(length)
        del self._ids[length:]
        self._prefilled = min(self._prefilled, length)

    def fork(self, capacity: int | None = None) -> Session:
        """Another session that stands where this one does, with a cache of its own. It shares the buffers: use one at a time."""
        forked = Session(self._sequence.model, capacity or self._sequence.capacity, self._settings, self.reporter, self)
        forked.restore(self.snapshot())
        return forked

    def snapshot(self) -> Snapshot:
        """A copy of the context: its ids, keys and values."""
        from qwenc.kv_store.saved import Snapshot

        return Snapshot.take(self.ids, self.prefilled, self.cache)

    def restore(self, source: Snapshot | SavedFile | Session, tokens: int | None = None) -> None:
        """Become the first `tokens` tokens (default: all) of what `source` holds, of the same model and settings. Raises UsageError for
        more than it holds or than fit."""
        ids = source.ids
        count = len(ids) if tokens is None else tokens
        if not 0 <= count <= min(len(ids), self._sequence.capacity):
            raise UsageError(f"{count} tokens cannot be restored: {len(ids)} are there, and {self._sequence.capacity} fit")
        if count != len(ids) and count % self._cache_grain:
            raise UsageError(f"this kind of context can be cut at multiples of {self._cache_grain} tokens, not at {count}")
        self._sequence.length, self._prefilled = 0, 0
        self._ids.clear()
        source.load(self.cache, count)
        self._sequence.length, self._prefilled = count, min(count, source.prefilled)
        self._ids.extend(ids[:count].tolist())

    def load(self, cache: KVCache, tokens: int) -> None:
        """Copies the first `tokens` tokens into another cache: a session is a source to restore from, too."""
        mine = used_arrays(self.cache, tokens)
        for name, array in used_arrays(cache, tokens).items():
            array[:] = mine[name]

    @property
    def ids(self) -> np.ndarray:
        """The tokens of the context, int64."""
        return np.array(self._ids, np.int64)

    @property
    def prefilled(self) -> int:
        """How many leading tokens prefill has computed; decode makes other bits."""
        return self._prefilled

    @property
    def prompt(self) -> np.ndarray:
        """Those tokens, int64."""
        return np.array(self._ids[: self._prefilled], np.int64)

    @property
    def prompt_end(self) -> int:
        """Where the prompt ends if the context ends there too and can be gone on with, else −1."""
        return self._prefilled if self.grain_at_end and self._prefilled == self.length else -1

    @property
    def cache(self) -> KVCache:
        return self._sequence.cache

    @property
    def grain(self) -> int:
        """A prompt can be cut at multiples of this many tokens, and the rest prefilled to the same bits."""
        return grain_of(self.cache, self._settings.prefill_batch if self._settings.sparse_attn else None)

    @property
    def grain_at_end(self) -> bool:
        """Whether prefill may go on, to the same bits, where a prompt ended, wherever that was: not if queries choose blocks together."""
        return not self._settings.sparse_attn

    @property
    def _cache_grain(self) -> int:
        return grain_of(self.cache, None)

    def logits(self, ids: Ids[int]) -> np.ndarray:
        """Add `ids` to the context. Returns float32 logits [n, vocab] after each of them."""
        extend = partial(self._sequence.extend, all_logits=True)
        found = []
        for batch in self._batches(ids):
            found.append(self._guard(partial(extend, batch)).copy())
            self._took(batch.tolist(), True)
        return np.concatenate(found)

    def watched(self) -> tuple[np.ndarray, np.ndarray, float] | None:
        """Of the last step, None if it was exact: which blocks were kept, bool [layers, kv_heads, blocks]; the share of attention that each
        block holds, float32 of the same shape, true if the oracle chose and estimated otherwise; the estimated share that the choice left
        out."""
        sequence = self._sequence
        if sequence.missed is None:
            return None
        blocks = -(-sequence.length // sequence.sparse_decode.block)
        kept, masses = sequence.kept_blocks[..., :blocks].astype(bool), sequence.block_masses[..., :blocks].copy()
        return kept, masses, float(sequence.missed.mean())

    def mark(self) -> Mark:
        """This point of the context, to come back to with `rewind`. Costs a copy of one page of the cache."""
        return self._sequence.mark()

    def rewind(self, mark: Mark) -> None:
        """Forget what came after `mark`, which this session or the one that it was `take_over` from has made."""
        self._sequence.rewind(mark)
        del self._ids[mark.length :]
        self._prefilled = min(self._prefilled, mark.length)

    def take_over(self, other: Session, mark: Mark) -> None:
        """Go on from `mark` of another session, with these settings. The cache is shared, not copied: use one of the two at a time.
        Raises UsageError where the caches are not of one kind, or where this session's capacity is too small for the mark."""
        self._sequence.take_over(other._sequence, mark)
        self._ids = other._ids[: mark.length]
        self._prefilled = min(other._prefilled, mark.length)

    def kv_bytes(self) -> int:
        """What the tokens in the cache take, without the empty rest of its last page."""
        return self._sequence.kv_bytes()

    def compile(self) -> None:
        """Compile the steps, or load them from the cache, ahead of their first use."""
        self._sequence.compile(self.reporter)

    def _took(self, ids: list[int], by_prefill: bool) -> None:
        """Notes tokens that have joined the context."""
        if by_prefill and self._prefilled == len(self._ids):
            self._prefilled += len(ids)
        self._ids += ids

    def _batches(self, ids: Ids[int]) -> list[np.ndarray]:
        """`ids`, checked, as mini-batches."""
        checked, size = np.asarray(self._checked(ids), np.int64), self._sequence.prefill_batch
        return [checked[first : first + size] for first in range(0, len(checked), size)]

    def _checked(self, ids: Ids[int]) -> list[int]:
        checked = check_ids(ids, self._sequence.model.config.vocab_size)
        if not checked:
            raise UsageError("no token ids given")
        return checked

    def _guard(self, run: Callable[[], np.ndarray]) -> np.ndarray:
        try:
            return run()
        except QwencError:
            layer = self._sequence.bad_layer
            if layer is not None:
                self.reporter.detail(f"the first layer whose output is not finite: {layer}")
            raise


class Shared:
    """Steps that several sessions take together."""

    def __init__(self, together: Together, like: Session):
        self._together, self._like = together, like._sequence

    def compile(self, reporter: Reporter) -> None:
        """Compile the step ahead of its first use."""
        self._together.compile(self._like, reporter)

    def step(self, sessions: Sequence[Session], tokens: Ids[int]) -> list[np.ndarray | QwencError]:
        """Session.step for each of several; the logits, or why there are none."""
        found = self._together.step([session._sequence for session in sessions], tokens)
        for session, token in zip(sessions, tokens, strict=True):
            session._took([token], False)
            session._charge(self._together.steps.timer, self._together.steps.step_ns, len(sessions))
        return found


def step_together(shared: Shared | None, sessions: Sequence[Session], tokens: Ids[int]) -> list[np.ndarray | QwencError]:
    """One token for each session, in one step if they share it, else one after the other. Logits stay valid until the next call."""
    if shared is not None and len(sessions) > 1:
        return shared.step(sessions, tokens)
    found: list[np.ndarray | QwencError] = []
    for session, token in zip(sessions, tokens, strict=True):
        try:
            found.append(session.step(token).copy())
        except QwencError as error:
            found.append(error)
    return found


def check_ids(ids: Ids[int], vocab_size: int) -> list[int]:
    """`ids` as plain integers. Raises UsageError for what is no whole number or not in the vocabulary: it would be read beyond the
    weights."""
    try:
        checked = [operator.index(i) for i in ids]
    except TypeError:
        raise UsageError(f"token ids must be whole numbers, not {ids!r:.60}") from None
    for i in checked:
        if not 0 <= i < vocab_size:
            raise UsageError(f"token id {i} is not in the model's vocabulary of {vocab_size}")
    return checked
