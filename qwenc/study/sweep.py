"""A sweep: every arm at every context length, a few times over, in an order that treats them alike.

Order: repeats, then engines (weights, threads), then lengths, then arms, which take turns in going first. So whatever drifts (heat, other
programs) meets every arm. Arms whose prefill is the same computation share one, and their rows say so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import numpy as np

from qwenc.errors import UsageError
from qwenc.report import Reporter
from qwenc.study import measure
from qwenc.study.arms import Arm, baseline, prefill_key
from qwenc.study.divergence import diverge
from qwenc.study.journal import Journal
from qwenc.study.progress import Inner
from qwenc.study.texts import Text, text_ids

BUSY = 0.7  # of its threads' time: a study that got less was disturbed


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure. lengths: tokens of context, ascending; decode: tokens decoded after them; text: None for the built-in one."""

    arms: Sequence[Arm]
    lengths: Sequence[int]
    repeats: int = 3
    decode: int = 32
    share_prefill: bool = True
    text: str | None = None
    text_name: str = ""

    def total_tokens(self) -> int:
        return self.repeats * len(self.arms) * sum(self.lengths)


@dataclass(slots=True)
class Sample:
    """One measurement, as the journal holds it: milliseconds and bytes. prefill: None where `prefill_of` names the arm whose prefill this
    one went on from. kl and same_top (means over the decoded tokens) against the baseline arm, in the first repeat only."""

    arm: dict[str, Any]
    n: int
    repeat: int
    decode: dict[str, Any]
    prefill: dict[str, float] | None = None
    prefill_of: str | None = None
    kl: float | None = None
    same_top: float | None = None
    delta_nll: float | None = None

    @property
    def place(self) -> tuple:
        return (tuple(sorted((name, repr(value)) for name, value in self.arm.items())), self.n, self.repeat)


@dataclass(slots=True)
class Sweep:
    """Runs a plan. open_engine(settings): loads an engine; open_journal(conditions): where the samples go. After `run`, or whatever
    ended it, `samples` holds what is known."""

    plan: Plan
    open_engine: Callable[[Any, Reporter], Any]
    open_journal: Callable[[dict[str, Any]], Journal]
    reporter: Reporter
    samples: dict[tuple, Sample] = field(default_factory=dict)
    source: str = ""
    threads: dict[int | None, int] = field(default_factory=dict)  # by the setting
    machine: dict[str, Any] = field(default_factory=dict)
    _done: int = 0  # tokens of context

    def run(self) -> None:
        journal, text = None, None
        engines = OneEngine(self.open_engine, Inner(self.reporter, self._tell))
        try:
            for repeat in range(self.plan.repeats):
                for arms in grouped(self.plan.arms, lambda arm: arm.engine_key):
                    if journal is not None and not self._missing(arms, repeat):
                        self._advance(arms, self.plan.lengths)
                        continue
                    engine = engines.get(arms[0])
                    self.threads[arms[0].settings.threads] = engine.threads
                    if journal is None or text is None:
                        self._check_room(engine)
                        text = text_ids(engine, max(self.plan.lengths) + self.plan.decode + 1, self.plan.text, self.plan.text_name)
                        self.source = text.source
                        journal = self.open_journal(self._conditions(engine, text))
                        self._take(journal.records)
                    self._run_engine(engine, arms, repeat, text, journal, engines.warm)
        finally:
            engines.close()
            if journal is not None:
                journal.close()
            self.reporter.progress("sweep", 1, 1)

    def _conditions(self, engine: Any, text: Text) -> dict[str, Any]:
        from qwenc.machine.topology import cpu_name
        from qwenc.version import __version__

        self.machine = {"qwenc": __version__, "cpu": cpu_name(), "layers": engine.config.num_hidden_layers}
        return {
            "model": identity(engine),
            "decode": self.plan.decode,
            "text": text.digest,
            "share_prefill": self.plan.share_prefill,
            **self.machine,
        }

    def _take(self, records: Iterable[dict[str, Any]]) -> None:
        for record in records:
            sample = Sample(**record)
            self.samples[sample.place] = sample

    def _missing(self, arms: Sequence[Arm], repeat: int) -> bool:
        return any(self.sample(arm, n, repeat) is None for arm in arms for n in self.plan.lengths)

    def sample(self, arm: Arm, n: int, repeat: int) -> Sample | None:
        return self.samples.get(Sample(arm.key(), n, repeat, {}).place)

    def disturbed(self) -> int:
        """Measurements during which something else used the cores."""
        return sum(sample.decode.get("cores", 1e9) < BUSY * self.threads.get(sample.arm["threads"], 0) for sample in self.samples.values())

    # ---- one engine ------------------------------------------------------------------------------------------------------------
    def _run_engine(self, engine: Any, arms: Sequence[Arm], repeat: int, text: Text, journal: Journal, warm: set[Arm]) -> None:
        for arm in arms:
            if arm not in warm and any(self._missing([arm], later) for later in range(repeat, self.plan.repeats)):
                measure.warm_up(engine, arm.settings, text.ids)
                warm.add(arm)
        for n in self.plan.lengths:
            sharing = grouped(arms, partial(_prefill_key, n=n))
            groups = sharing if self.plan.share_prefill else [[arm] for arm in arms]
            turn = repeat % len(groups)
            references: dict[Arm, np.ndarray] = {}
            for group in groups[turn:] + groups[:turn]:
                todo = [arm for arm in group if self.sample(arm, n, repeat) is None]
                if todo:
                    self._run_group(engine, todo, group[0], n, repeat, text, journal, references)
                self._advance(group, [n])

    def _run_group(
        self,
        engine: Any,
        todo: Sequence[Arm],
        leader: Arm,
        n: int,
        repeat: int,
        text: Text,
        journal: Journal,
        references: dict[Arm, np.ndarray],
    ) -> None:
        """Arms that share a prefill: its first arm measures it."""
        compare = repeat == 0
        if compare:
            self._reference(engine, todo[0], n, text, references)
        following = text.ids[n : n + self.plan.decode]
        filled = measure.fill(engine, leader.settings, text.ids[:n], self.plan.decode)
        for arm in todo:
            ready = filled if arm is leader else measure.share(engine, arm.settings, filled, self.plan.decode)
            seen, logits = measure.decode(ready, following, keep=compare)
            sample = Sample(arm.key(), n, repeat, asdict(seen))
            if arm is leader:
                timing = filled.timing
                sample.prefill = {name: getattr(timing, name) for name in ("n", "total_ms", "gemm_ms", "attn_ms", "other_ms")}
            else:
                sample.prefill_of = leader.label
            if logits is not None:
                self._compare(sample, arm, logits, text.ids[n + 1 : n + 1 + self.plan.decode], references)
            journal.add(asdict(sample))
            self.samples[sample.place] = sample

    def _reference(self, engine: Any, arm: Arm, n: int, text: Text, references: dict[Arm, np.ndarray]) -> None:
        """The logits that `arm` is compared with, computed here where a study that is resumed no longer has them."""
        base = baseline(arm, self.plan.arms)
        if base is None or base in references or self.sample(base, n, 0) is None:
            return
        filled = measure.fill(engine, base.settings, text.ids[:n], self.plan.decode)
        _, logits = measure.decode(filled, text.ids[n : n + self.plan.decode], keep=True)
        assert logits is not None
        references[base] = logits

    def _compare(self, sample: Sample, arm: Arm, logits: np.ndarray, targets: Sequence[int], references: dict[Arm, np.ndarray]) -> None:
        base = baseline(arm, self.plan.arms)
        if base is arm:
            references[arm] = logits
        if base is None or base not in references:
            return
        found = diverge(references[base], logits, targets)
        sample.kl, sample.same_top = float(found.kl.mean()), float(found.same_top.mean())
        sample.delta_nll = float((found.nll - found.reference_nll).mean())

    # ---- progress --------------------------------------------------------------------------------------------------------------
    def _advance(self, arms: Sequence[Arm], lengths: Sequence[int]) -> None:
        self._done += len(arms) * sum(lengths)
        self._tell(0)

    def _tell(self, more: float) -> None:
        total = self.plan.total_tokens()
        self.reporter.progress("sweep", min(self._done + more, total - 1), total, "tokens")

    def _check_room(self, engine: Any) -> None:
        needed = max(self.plan.lengths) + self.plan.decode
        if needed > engine.context_size:
            raise UsageError(
                f"n={max(self.plan.lengths)} and {self.plan.decode} decoded tokens need a context of {needed}, "
                f"this model has {engine.context_size} (--ctx-size)"
            )


def _prefill_key(arm: Arm, n: int) -> tuple:
    return prefill_key(arm.settings, n)


class OneEngine:
    """The engine of the arm that runs: loaded when it is asked for, and closed when another is. `warm`: arms that it is warm for."""

    def __init__(self, open_engine: Callable[[Any, Reporter], Any], reporter: Reporter):
        self._open, self._reporter = open_engine, reporter
        self._engine: Any = None
        self._key: tuple | None = None
        self.warm: set[Arm] = set()

    def get(self, arm: Arm) -> Any:
        if self._engine is None or self._key != arm.engine_key:
            self.close()
            self._engine, self._key = self._open(arm.settings, self._reporter).__enter__(), arm.engine_key
        return self._engine

    def close(self) -> None:
        engine, self._engine = self._engine, None
        self.warm.clear()
        if engine is not None:
            engine.__exit__(None, None, None)


def identity(engine: Any) -> str:
    """What tells one model from another: its name and a hash of what it was made of."""
    packed = engine.packed
    source = packed.metadata.get("source") or packed.path.name
    return f"{source} {packed.metadata.get('source_hash', packed.file_bytes)}"


def grouped(arms: Sequence[Arm], key: Callable[[Arm], Any]) -> list[list[Arm]]:
    """The arms by key, in the order of their first appearance."""
    groups: dict[Any, list[Arm]] = {}
    for arm in arms:
        groups.setdefault(key(arm), []).append(arm)
    return list(groups.values())
