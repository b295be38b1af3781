"""What a run came to: its summary line and the timings of its JSON object."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from qwenc.machine.cpus import show_cores
from qwenc.machine.memory import peak_rss_bytes
from qwenc.timing import Timings


@dataclass(slots=True)
class Outcome:
    """Filled while a run goes on. finish_reason: "stop", "length" or "interrupt". timings: of the engine, at the end."""

    prompt_tokens: int = 0
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    finish_reason: str = "interrupt"
    timings: Timings | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed in this run, known at its end."""
        return max(0, self.prompt_tokens - self.timings.prefill.n) if self.timings and self.finish_reason != "interrupt" else 0

    def add(self, step: Any) -> None:
        """Takes one record of Engine.generate."""
        if step.id is not None:
            self.ids.append(step.id)
        if step.text:
            self.texts.append(step.text)
        if step.finish_reason is not None:
            self.finish_reason, self.timings = step.finish_reason, step.timings
            if step.usage is not None:
                self.prompt_tokens = step.usage[0]

    def rates(self) -> tuple[float | None, float | None]:
        """Tokens per second of prefill and of decode; None where nothing was computed."""
        if self.timings is None:
            return None, None
        prefill, decode = self.timings.prefill, self.timings.decode
        return _rate(prefill.n, prefill.total_ms / 1e3), _rate(decode.n, decode.total_ms / 1e3)


def summary_line(outcome: Outcome, threads: int, cores: Sequence[int]) -> str:
    """One line for people: load, JIT, prefill and decode rates, peak memory, threads and cores."""
    prefill, decode = outcome.rates()
    parts = []
    if outcome.timings is not None:
        parts += [f"load {outcome.timings.load_s:.2f} s", f"JIT {outcome.timings.compile_s:.2f} s"]
    timed = outcome.timings.decode.n if outcome.timings is not None else 0  # the first token comes with the prefill: one less
    cached = f", {outcome.cached_tokens} cached" if outcome.cached_tokens else ""
    parts.append(f"prefill {outcome.prompt_tokens} tok{cached}{_show_rate(prefill)}")
    parts.append(f"decode {len(outcome.ids)} tok{_show_rate(decode, f' over {timed} timed')}")
    decoded = outcome.timings.decode if outcome.timings is not None else None
    if decoded is not None and decoded.sparse_n:
        parts.append(f"sparse attention left out {decoded.missed_mean:.1%} (worst {decoded.missed_worst:.1%})")
    peak = peak_rss_bytes()
    if peak is not None:
        parts.append(f"peak RSS {show_bytes(peak)}")
    parts.append(f"{threads} thread{'' if threads == 1 else 's'}" + (f" on cores {show_cores(cores)}" if cores else ", not pinned"))
    return f"qwenc: {', '.join(parts)} [{outcome.finish_reason}]"


def timings_record(outcome: Outcome) -> dict[str, Any]:
    """The timings as JSON values: everything the log lines say, rates and peak memory."""
    prefill_rate, decode_rate = outcome.rates()
    record: dict[str, Any] = {"prefill_tok_s": prefill_rate, "decode_tok_s": decode_rate, "peak_rss_bytes": peak_rss_bytes()}
    if outcome.timings is not None:
        prefill, decode = outcome.timings.prefill, outcome.timings.decode
        record |= {
            "load_s": outcome.timings.load_s,
            "compile_s": outcome.timings.compile_s,
            "cached_tokens": outcome.cached_tokens,
            "prefill": asdict(prefill) | {"gemm_ms": prefill.gemm_ms, "other_ms": prefill.other_ms},
            "decode": asdict(decode) | {"other_ms": decode.other_ms, "missed_mean": decode.missed_mean if decode.sparse_n else None},
        }
    return record


def show_bytes(count: float) -> str:
    """Decimal units, three digits: 1.23 GB."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}" if count < 1000 * size else f"{count / size:.0f} {unit}"
    return f"{count:.0f} B"


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count > 0 and seconds > 0 else None


def _show_rate(rate: float | None, of: str = "") -> str:
    return "" if rate is None else f" ({rate:.1f} tok/s{of})"
