"""What settings cost in quality: predictions under each of them against those of exact attention, on the same text.

Three methods. `decode`: the context by exact attention, then tokens decoded under the setting, as in a chat whose prompt was read exactly.
`all`: context and decoding both under the setting. `batch`: the whole text in mini-batches under the setting, its second half scored, as
perplexity is usually measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from qwenc.errors import UsageError
from qwenc.report import Reporter
from qwenc.settings import Settings
from qwenc.study.arms import Arm, exact, prefill_key
from qwenc.study.divergence import Divergence, diverge
from qwenc.study.measure import Filled, decode, fill, share
from qwenc.study.progress import Inner
from qwenc.study.recall import recall
from qwenc.study.reference import References
from qwenc.study.sweep import OneEngine, grouped, identity
from qwenc.study.texts import Text, text_ids

METHODS = ("batch", "decode", "all")
AT_ONCE = 256  # tokens whose logits are held at once
NEVER = 2**31 - 1  # tokens: a prefill that is never sparse


@dataclass(frozen=True, slots=True)
class Plan:
    """arms: the first is the reference, with exact attention. contexts: tokens of context, one bucket each. chunks: pieces of the text per
    bucket. scored: tokens decoded after each context (`decode`, `all`)."""

    arms: Sequence[Arm]
    contexts: Sequence[int]
    chunks: int
    scored: int
    methods: Sequence[str]
    text: str | None = None
    text_name: str = ""

    @property
    def stride(self) -> int:
        """Tokens from one piece of the text to the next, whatever the context: the pieces of all buckets begin at the same places."""
        return max(self.contexts) + self.scored + 1

    @property
    def tokens(self) -> int:
        return self.stride * self.chunks

    def piece(self, context: int, chunk: int) -> slice:
        """Of the text: the context of a piece, what is scored after it, and the last one's right answer."""
        return slice(chunk * self.stride, chunk * self.stride + context + self.scored + 1)

    def pairs(self) -> list[tuple[str, Arm]]:
        """(method, arm) in order. An exact arm decodes as it prefills: `decode` would say again what `all` says."""
        found = []
        for method in self.methods:
            found += [(method, arm) for arm in self.arms if method != "decode" or arm.sparse]
        return found


@dataclass(slots=True)
class Tally:
    """Everything seen of one arm by one method in one bucket."""

    parts: list[Divergence] = field(default_factory=list)
    recalls: list[tuple[float, float, float]] = field(default_factory=list)

    def column(self, name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in self.parts])


@dataclass(frozen=True, slots=True)
class Row:
    """Over all scored tokens of a bucket. kl in nats; delta_nll: arm − reference, with its standard error; recall: attention mass that the
    chosen blocks hold, estimated_recall: what the choice itself believes of that, oracle_recall: the most that as many could."""

    method: str
    arm: str
    context: int
    tokens: int
    perplexity: float
    reference_perplexity: float
    kl: float
    kl_p99: float
    same_top: float
    delta_nll: float
    delta_nll_error: float
    recall: float | None
    estimated_recall: float | None
    oracle_recall: float | None


@dataclass(slots=True)
class Quality:
    """Runs a plan; `rows` says what is known, also after it was cut short."""

    plan: Plan
    open_engine: Callable[[Any, Reporter], Any]
    references: References
    reporter: Reporter
    tallies: dict[tuple[str, Arm, int], Tally] = field(default_factory=dict)
    source: str = ""
    _done: float = 0

    def run(self) -> None:
        engines = OneEngine(self.open_engine, Inner(self.reporter, self._tell))
        text = None
        try:
            for arms in grouped(self.plan.arms, lambda arm: arm.engine_key):
                engine = engines.get(arms[0])
                if engine.wmode == "dual" and "batch" in self.plan.methods:
                    self.reporter.note(
                        "dual reads its 8-bit weights in mini-batches: the method `all` judges the 4-bit ones, read in decode"
                    )
                if text is None:
                    text = self._begin(engine)
                for context in self.plan.contexts:
                    for chunk in range(self.plan.chunks):
                        self._chunk(engine, arms, context, chunk, text.ids[self.plan.piece(context, chunk)])
        finally:
            engines.close()
            self.reporter.progress("quality", 1, 1)

    def rows(self) -> list[Row]:
        found = []
        for context in self.plan.contexts:
            for method, arm in self.plan.pairs():
                tally = self.tallies.get((method, arm, context))
                if tally is not None and tally.parts:
                    found.append(row_of(method, arm, context, tally))
        return found

    def _begin(self, engine: Any) -> Text:
        longest = max(self.plan.contexts) + self.plan.scored
        if longest > engine.context_size:
            raise UsageError(
                f"{max(self.plan.contexts)} tokens and {self.plan.scored} scored after them need a context of {longest}, "
                f"this model has {engine.context_size} (--ctx-size)"
            )
        text = text_ids(engine, self.plan.tokens, self.plan.text, self.plan.text_name)
        self.source = text.source
        reference = asdict(self.plan.arms[0].settings) | {"threads": None, "pin": True, "offline": False, "ctx_size": None}
        conditions = {"model": identity(engine), "scored": self.plan.scored, "settings": reference}
        self.references.open(
            conditions | {"wmode": engine.wmode, "text": text.digest, "chunks": self.plan.chunks, "stride": self.plan.stride}
        )
        return text

    # ---- one piece of the text ---------------------------------------------------------------------------------------------------
    def _chunk(self, engine: Any, arms: Sequence[Arm], context: int, chunk: int, ids: Sequence[int]) -> None:
        filled: dict[tuple, Any] = {}
        for method, arm in self.plan.pairs():
            if arm not in arms:
                continue
            reference = self._reference(engine, method, context, chunk, ids, filled)
            tally = self.tallies.setdefault((method, arm, context), Tally())
            if method == "batch":
                self._batch(engine, arm, context, ids, reference, tally)
            else:
                self._decode(engine, arm, method, context, ids, reference, tally, filled)
            self._done += context
            self._tell(0)

    def _reference(self, engine: Any, method: str, context: int, chunk: int, ids: Sequence[int], filled: dict[tuple, Any]) -> np.ndarray:
        """What exact attention says; computed by the first engine, which is the reference's own."""
        arm = self.plan.arms[0]
        name = f"{'batch' if method == 'batch' else 'decode'}-{context}-{chunk}"
        found = self.references.get(name)
        if found is not None:
            return found
        if method == "batch":
            session = engine.session(context, settings=arm.settings)
            if context // 2:
                session.prefill(ids[: context // 2])
            return self.references.put(name, session.logits(ids[context // 2 : context]))
        ready = self._context(engine, arm.settings, "all", ids[:context], filled)
        _, logits = decode(ready, ids[context : context + self.plan.scored], keep=True)
        assert logits is not None
        return self.references.put(name, logits)

    def _batch(self, engine: Any, arm: Arm, context: int, ids: Sequence[int], reference: np.ndarray, tally: Tally) -> None:
        half = context // 2
        if arm is self.plan.arms[0]:
            tally.parts.append(diverge(reference, reference, ids[half + 1 : context + 1]))
            return
        session = engine.session(context, settings=arm.settings)
        if half:
            session.prefill(ids[:half])
        for first in range(half, context, AT_ONCE):
            end = min(context, first + AT_ONCE)
            got = session.logits(ids[first:end])
            tally.parts.append(diverge(reference[first - half : end - half], got, ids[first + 1 : end + 1]))

    def _decode(
        self,
        engine: Any,
        arm: Arm,
        method: str,
        context: int,
        ids: Sequence[int],
        reference: np.ndarray,
        tally: Tally,
        filled: dict[tuple, Any],
    ) -> None:
        targets = ids[context + 1 : context + 1 + self.plan.scored]
        if arm is self.plan.arms[0]:
            tally.parts.append(diverge(reference, reference, targets))
            return
        watch = method == "decode" and can_recall(arm.settings)
        ready = self._context(engine, arm.settings, method, ids[:context], filled, watch=watch)
        kept: list | None = [] if watch else None
        following = ids[context : context + self.plan.scored]
        _, logits = decode(ready, following, keep=True, seen=kept)
        assert logits is not None
        tally.parts.append(diverge(reference, logits, targets))
        if kept is not None:
            masses = self._masses(engine, arm.settings, ids[:context], following, filled)
            for choice, mass in zip(kept, masses, strict=True):
                if choice is not None and mass is not None:
                    tally.recalls.append((*recall(choice[0], mass), 1 - choice[2]))

    def _masses(
        self, engine: Any, settings: Settings, ids: Sequence[int], following: Sequence[int], filled: dict[tuple, Any]
    ) -> list[np.ndarray | None]:
        """The true share of attention of every block at every step, float32 [layers, kv_heads, blocks]: an oracle that keeps all blocks but
        one decodes the same tokens."""
        oracle = oracle_of(settings, len(ids))
        key = ("masses", oracle)
        if key not in filled:
            ready = self._context(engine, oracle, "decode", ids, filled, watch=True)
            seen: list = []
            decode(ready, following, keep=False, seen=seen)
            filled[key] = [None if step is None else step[1] for step in seen]
        return filled[key]

    def _context(
        self, engine: Any, settings: Settings, method: str, ids: Sequence[int], filled: dict[tuple, Any], *, watch: bool = False
    ) -> Filled:
        """A session after the context, which one with the same prefill may have computed already."""
        before = exact_prefill(settings) if method == "decode" else settings
        key = prefill_key(before, len(ids))
        if key not in filled:
            filled[key] = fill(engine, before, ids, self.plan.scored)
        return share(engine, settings, filled[key], self.plan.scored, watch=watch)

    def _tell(self, more: float) -> None:
        total = len(self.plan.pairs()) * self.plan.chunks * sum(self.plan.contexts)
        self.reporter.progress("quality", min(self._done + more, total - 1), total, "tokens")


def exact_prefill(settings: Settings) -> Settings:
    """The same, with a prefill that is exact at any length; the cache stays of its kind."""
    return replace(settings, sparse_pf_min_ctx=NEVER) if settings.sparse_attn else settings


def can_recall(settings: Settings) -> bool:
    """Whether one choice of blocks serves a kv head, so that it can be held against the masses of that head."""
    return settings.sparse_attn and settings.sparse_score != "probe"


def oracle_of(settings: Settings, tokens: int) -> Settings:
    """Sparse attention that leaves out the one block of the least true mass, so that it knows the masses and is all but exact."""
    blocks = -(-(tokens + 1) // settings.sparse_block)
    settings = replace(settings, sparse_score="oracle", sparse_k=max(1, blocks - 1), sparse_ratio=0.0, sparse_mass=0.0, sparse_min_ctx=0)
    return replace(settings, sparse_pf_k=None, sparse_pf_group=None, sparse_pf_min_ctx=None)


def row_of(method: str, arm: Arm, context: int, tally: Tally) -> Row:
    kl, nll, reference = tally.column("kl"), tally.column("nll"), tally.column("reference_nll")
    change = nll - reference
    held = np.array(tally.recalls) if tally.recalls else None
    return Row(
        method=method,
        arm=arm.label,
        context=context,
        tokens=len(kl),
        perplexity=math.exp(min(float(nll.mean()), 700)),
        reference_perplexity=math.exp(min(float(reference.mean()), 700)),
        kl=float(kl.mean()),
        kl_p99=float(np.percentile(kl, 99)),
        same_top=float(tally.column("same_top").mean()),
        delta_nll=float(change.mean()),
        delta_nll_error=float(change.std(ddof=1) / math.sqrt(len(change))) if len(change) > 1 else math.nan,
        recall=None if held is None else float(held[:, 0].mean()),
        oracle_recall=None if held is None else float(held[:, 1].mean()),
        estimated_recall=None if held is None else float(held[:, 2].mean()),
    )


def with_reference(arms: Sequence[Arm]) -> list[Arm]:
    """The arms, the first of them exact: what the others are compared with is added where it is missing."""
    if not arms[0].sparse:
        return list(arms)
    return [Arm(exact(arms[0].settings), "exact"), *arms]
