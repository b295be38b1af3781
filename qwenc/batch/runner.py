"""The loop of a batch: items in, records out. An item that fails becomes an error record and harms no other."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from qwenc.batch.items import SAMPLING, BadItem, Item, parse
from qwenc.batch.lines import Line, LineReader, No
from qwenc.errors import QwencError
from qwenc.sampling import GREEDY_BELOW
from qwenc.text.files import read_text
from qwenc.timing import Timings


@dataclass(frozen=True, slots=True)
class Defaults:
    """What an item has that says nothing else. `prefix` comes before every prompt (not before messages)."""

    system: str | None = None
    think: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    raw: bool = False
    prefix: str = ""
    max_tokens: int = 256
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    sampling: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Tally:
    """What a run came to. items: lines with an item, good or bad; done: answered now; skipped: answered before; first_error: the line
    and the reason of the first failure; cached_tokens: of the prompts, taken from a cache. timings: summed over the items. seconds: since
    the first item was begun."""

    items: int = 0
    done: int = 0
    failed: int = 0
    skipped: int = 0
    first_error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: Timings = field(default_factory=Timings)
    seconds: float = 0.0


class Results(Protocol):
    """Where records go: batch/results.py."""

    def answered(self, item: Item) -> bool: ...
    def begin(self, line: int) -> None: ...
    def write(self, line: int, record: dict[str, Any]) -> None: ...


@dataclass(slots=True)
class _Work:
    item: Item
    seed: int | None
    texts: list[str] = field(default_factory=list)


class Runner:
    """Answers the items of `reader` with `engine`, at most `count` at a time. `told` is called after every item and every few steps.

    `stop` may be set from outside (a signal): no item is begun any more, those at work are finished.
    """

    def __init__(
        self,
        engine: Any,
        reader: LineReader,
        results: Results,
        *,
        form: str,
        defaults: Defaults,
        count: int | None = None,
        fail_fast: bool = False,
        told: Callable[[Tally], None] = lambda tally: None,
    ) -> None:
        self.tally = Tally()
        self.stop = False
        self._waiting = False  # for a line, with no item at work
        self._engine, self._reader, self._results = engine, reader, results
        self._form, self._defaults, self._fail_fast, self._told = form, defaults, fail_fast, told
        self._lanes = engine.lanes(count)
        self._seen: dict[str | int, int] = {}  # id -> line
        self._pending: tuple[_Work, list[int], dict[str, Any]] | None = None  # read, and waiting for memory
        self._ended = False
        self._began: float | None = None

    @property
    def idle(self) -> bool:
        """Whether nothing is lost by leaving at once: before the first token (kernels may be compiling) and while input is awaited."""
        return self._waiting or not self.tally.completion_tokens

    def run(self) -> Tally:
        """Until the input ends or `stop` is set. Raises QwencError if input or output fails."""
        while True:
            while not (self.stop or (self._ended and not self._pending)) and self._lanes.free:
                if self._pending is not None:
                    if not self._start(*self._pending):
                        break
                    continue
                self._waiting = not self._lanes.working
                line = self._reader.next(wait=self._waiting)
                self._waiting = False
                if not isinstance(line, Line):
                    self._ended = line is No.END
                    break
                self._handle(line)
            if self._lanes.working:
                self._advance()
            elif self.stop or (self._ended and not self._pending):
                return self.tally

    def _handle(self, line: Line) -> None:
        """Skips the item of a line, begins it, or writes down why it cannot be."""
        self.tally.items += 1
        try:
            item = parse(line, self._form)
            first = self._seen.setdefault(item.id, item.line)
            if first != item.line:
                raise BadItem(item.line, f"the id {item.id!r} is that of line {first} too", item.id)
        except BadItem as bad:
            self._results.begin(line.number)
            self._fail(bad.line, bad.id, str(bad))
            return
        if self._results.answered(item):
            self.tally.skipped += 1
            self._tell()
            return
        self._results.begin(item.line)
        self._begin(item)

    def _begin(self, item: Item) -> None:
        self._began = self._began or time.perf_counter()
        try:
            arguments = self._arguments(item)
            ids = self._encode(item)
        except (QwencError, MemoryError) as error:
            self._fail(item.line, item.id, str(error) or "out of memory")
        else:
            self._start(_Work(item, arguments["seed"]), ids, arguments)

    def _start(self, work: _Work, ids: list[int], arguments: dict[str, Any]) -> bool:
        """Puts an item to work, or has it wait (and returns False) if there is no memory for it beside the others."""
        self._pending = None
        if not self._lanes.fits(len(ids) + arguments["max_tokens"]):
            self._pending = (work, ids, arguments)
            return False
        try:
            self._take(work, self._lanes.start(work, ids, **arguments))
            self._tell()
        except (QwencError, MemoryError) as error:
            self._fail(work.item.line, work.item.id, str(error) or "out of memory")
        return True

    def _advance(self) -> None:
        """One token more for every item at work."""
        for work, step in self._lanes.step():
            if isinstance(step, QwencError):
                self._fail(work.item.line, work.item.id, str(step))
            else:
                self._take(work, step)
        self._tell()

    def _take(self, work: _Work, step: Any) -> None:
        work.texts.append(step.text)
        if step.id is not None:
            self.tally.completion_tokens += 1
        if step.finish_reason is None:
            return
        self._results.write(work.item.line, _record(work, step))
        tally = self.tally
        tally.done += 1
        tally.prompt_tokens += step.usage[0]
        tally.cached_tokens += step.usage[0] - step.timings.prefill.n
        _add(tally.timings.prefill, step.timings.prefill)
        _add(tally.timings.decode, step.timings.decode)

    def _fail(self, line: int, id: str | int | None, reason: str) -> None:
        self._results.write(line, {"id": id, "line": line, "error": reason})
        self.tally.failed += 1
        self.tally.first_error = self.tally.first_error or f"line {line}: {reason}"
        self.stop = self.stop or self._fail_fast
        self._tell()

    def _tell(self) -> None:
        self.tally.seconds = time.perf_counter() - self._began if self._began else 0.0
        self._told(self.tally)

    def _encode(self, item: Item) -> list[int]:
        """The prompt's ids. The item's own chat settings win over the defaults, and `raw` leaves those out."""
        own, defaults = item.settings, self._defaults
        kind, value = item.prompt
        kwargs = own.get("chat_template_kwargs", defaults.chat_template_kwargs)
        chat: dict[str, Any] = {"think": own.get("think", defaults.think), "chat_template_kwargs": kwargs}
        system = own.get("system", defaults.system)
        if kind == "messages":
            if system is not None and not (isinstance(value[0], dict) and value[0].get("role") == "system"):
                value = [{"role": "system", "content": system}, *value]
            return self._engine.encode_messages(value, **chat)
        text = defaults.prefix + (read_text(value, "the prompt") if kind == "prompt_file" else value)
        raw = own.get("raw", defaults.raw and not any(name in own for name in ("system", "think", "chat_template_kwargs")))
        if raw:
            return self._engine.encode_prompt(text, raw=True)
        return self._engine.encode_prompt(text, raw=False, system=system, **chat)

    def _arguments(self, item: Item) -> dict[str, Any]:
        """Of Engine.prepare. An item that draws and has no seed gets one, which its record tells."""
        own, defaults = item.settings, self._defaults
        arguments = defaults.sampling | {name: own[name] for name in SAMPLING if name in own}
        if arguments.get("temp", 0.0) < GREEDY_BELOW:
            arguments["seed"] = None
        elif arguments.get("seed") is None:
            arguments["seed"] = secrets.randbits(32)
        for name in ("max_tokens", "stop", "ignore_eos"):
            arguments[name] = own.get(name, getattr(defaults, name))
        return arguments


def _record(work: _Work, step: Any) -> dict[str, Any]:
    """The result line of a finished item."""
    timings, (prompt, completion) = step.timings, step.usage
    prefill, decode = timings.prefill, timings.decode
    record: dict[str, Any] = {"id": work.item.id, "text": "".join(work.texts), "finish_reason": step.finish_reason}
    record["usage"] = {"prompt_tokens": prompt, "completion_tokens": completion}
    record["timings"] = {
        "cached_tokens": prompt - prefill.n,
        "prefill_ms": round(prefill.total_ms, 3),
        "decode_ms": round(decode.total_ms, 3),
        "prefill_tok_s": _rate(prefill.n, prefill.total_ms),
        "decode_tok_s": _rate(decode.n, decode.total_ms),
    }
    if work.seed is not None:
        record["seed"] = work.seed
    if work.item.meta is not None:
        record["meta"] = work.item.meta
    return record | {"item": work.item.digest}


def _rate(count: int, ms: float) -> float | None:
    return round(1e3 * count / ms, 2) if count and ms else None


def _add(total: Any, part: Any) -> None:
    """Adds every field of a timing."""
    for name in total.__slots__:
        setattr(total, name, getattr(total, name) + getattr(part, name))
