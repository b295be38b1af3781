"""A model, loaded: the library's public face."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Sequence as Ids
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qwenc.checkpoint.fingerprint import fingerprint
from qwenc.checkpoint.locate import load_packed
from qwenc.checkpoint.packed import Packed
from qwenc.checkpoint.pages import read_ahead
from qwenc.errors import QwencError, UsageError
from qwenc.generation import Generation, Step, log_probability
from qwenc.machine.cpus import choose_cpus
from qwenc.machine.later import Later
from qwenc.report import SILENT, Reporter
from qwenc.sampling import Sampler, SamplingParams
from qwenc.settings import Settings
from qwenc.text.prompt import encode_messages, encode_prompt, resolve_eos
from qwenc.text.stream import StopStrings, TextOutput
from qwenc.text.template import ChatTemplate, find_template
from qwenc.text.tokenizer import Tokenizer
from qwenc.timing import Timings

if TYPE_CHECKING:
    from qwenc.kv_store.reuse import Reuse
    from qwenc.lanes import Lanes
    from qwenc.session import Session

NO_TOKENIZER = "this checkpoint has no tokenizer: the library takes token ids, `qwenc bench` needs none"


def load(model: str | Path, *, reporter: Reporter = SILENT, **settings: Any) -> Engine:
    """Open a packed file, a checkpoint folder (converted once into the cache) or a Hub id. `settings`: fields of qwenc.settings.Settings.

    Raises QwencError for a model that cannot be found, read or held, UsageError for a setting out of range.
    """
    began = time.perf_counter()
    checked = Settings.from_dict(settings)
    packed = load_packed(model, checked, reporter)
    return Engine(packed, checked, reporter, began)


class Engine:
    """A loaded model on its threads. Use it as a context manager, or call `close`. One call at a time."""

    def __init__(self, packed: Packed, settings: Settings, reporter: Reporter = SILENT, began: float | None = None):
        began = time.perf_counter() if began is None else began
        self.wmode = settings.wmode or packed.wmode
        self.packed, self.settings, self.reporter = packed, replace(settings, wmode=self.wmode), reporter
        self.config = packed.config
        self.timings = Timings()  # of the generation that runs now or ran last
        if packed.mapped:
            read_ahead(packed.data)
        reading = Later(lambda: _read_tokenizer(packed))  # in Rust, while this thread imports the compiler
        choice = choose_cpus(settings.threads, settings.cpus)
        if choice.note:
            reporter.note(choice.note)
        reporter.detail(choice.describe())
        trained = self.config.max_position_embeddings
        if settings.ctx_size and settings.ctx_size > trained:
            reporter.note(f"a context of {settings.ctx_size} tokens is more than the {trained} that the model was made for")
        self.threads = choice.threads

        from qwenc.machine.team import ThreadTeam
        from qwenc.model.forward import Model

        self._compiled = False
        self._reuse: Reuse | None = None
        self._output: TextOutput | None = None  # of the generation that runs now or ran last
        self.tokenizer: Tokenizer | None = reading.result()
        self.template: ChatTemplate | None = None
        if self.tokenizer is not None:
            self.template = find_template(packed.chat_template, packed.tokenizer_config)
        self.eos_ids = resolve_eos(packed.generation_config, packed.config_json, self.tokenizer)
        within = choice.cores if settings.cpus else ()
        self._team = ThreadTeam(choice.cores, pin=settings.pin, within=within)  # from here on nothing fails that would leave it behind
        self.cores = list(choice.cores) if settings.pin and not self._team.pin_error else []  # that the threads are pinned to
        if self._team.pin_error:
            reporter.note(self._team.pin_error)
        self._model = Model(packed, self.wmode, self._team)
        self.load_s = time.perf_counter() - began

    @property
    def has_chat_template(self) -> bool:
        return self.template is not None

    @property
    def context_size(self) -> int:
        """Most tokens of prompt and answer together."""
        return self.settings.ctx_size or self.config.max_position_embeddings

    def encode_prompt(
        self,
        text: str,
        *,
        raw: bool = False,
        system: str | None = None,
        think: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a prompt: one chat turn if the model has a template and raw is False. Raises UsageError for an empty one."""
        _check_text("prompt", text)
        if system is not None:
            _check_text("system", system)
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            raise UsageError(f"chat_template_kwargs must be a mapping, not {chat_template_kwargs!r:.60}")
        if self.tokenizer is None:
            raise UsageError(NO_TOKENIZER)
        return encode_prompt(
            self.tokenizer, self.template, text, raw=raw, system=system, think=think, chat_template_kwargs=chat_template_kwargs
        )

    def encode_messages(
        self, messages: Sequence[Mapping[str, Any]], *, think: bool | None = None, chat_template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a chat of several turns, each {"role": …, "content": text}, up to where the model answers. Raises UsageError."""
        if self.tokenizer is None:
            raise UsageError(NO_TOKENIZER)
        return encode_messages(self.tokenizer, self.template, messages, think=think, chat_template_kwargs=chat_template_kwargs)

    def session(
        self, capacity: int | None = None, settings: Settings | None = None, *, watch: bool = False, beside: Session | None = None
    ) -> Session:
        """A context of up to `capacity` tokens (default, and at most: context_size) to drive by hand: prefill(ids), step(id).

        settings: other ones than the engine's, on the same weights and threads. watch: keep what sparse attention chooses (for
        `Session.watched`). beside: a session whose buffers it may share, since both are never in use at the same time. Raises UsageError
        for settings that need an engine of their own.
        """
        from qwenc.session import Session

        chosen = self.settings if settings is None else settings
        for name in ("wmode", "threads", "pin", "mmap", "ctx_size"):
            if getattr(chosen, name) not in (None, getattr(self.settings, name)):
                raise UsageError(f"a session runs with its engine's {name}, {getattr(self.settings, name)!r}")

        size = self.context_size if capacity is None else capacity
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= self.context_size:
            raise UsageError(f"a session holds 1 to {self.context_size} tokens (ctx_size), not {size!r}")
        return Session(self._model, size, chosen, self.reporter, beside, watch=watch)

    def logits(self, ids: Ids[int]) -> np.ndarray:
        """Teacher-forced logits float32 [n, vocab]: row i follows ids[i]. Raises UsageError for ids that the model does not have or
        that do not fit into the context."""
        checked = self._prompt_ids(ids)
        return self.session(len(checked)).logits(checked)

    def held_text(self) -> str:
        """What the last generation had generated but not yet yielded (an unfinished character, the beginning of a stop string), for one
        that was cut short; "" after one that ended."""
        return self._output.flush() if self._output else ""

    def generate(
        self,
        prompt: str | Ids[int],
        *,
        raw: bool = False,
        system: str | None = None,
        think: bool | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        dec_prof: bool = False,
        **arguments: Any,
    ) -> Iterator[Step]:
        """Complete a prompt (text, or token ids as they are). Yields a Step per token; the last one tells why it ended and what it took.

        arguments: max_tokens, temp … ignore_eos, see `prepare`. qwenc.text.prompt.encode_prompt tells what raw … chat_template_kwargs mean;
        dec_prof adds a TokenTiming to every step. Raises what `prepare` raises, and QwencError for logits that are not finite.
        """
        if isinstance(prompt, str):
            prompt = self.encode_prompt(prompt, raw=raw, system=system, think=think, chat_template_kwargs=chat_template_kwargs)
        return self._steps(self.prepare(prompt, **arguments), dec_prof)

    def prepare(
        self,
        prompt: Ids[int],
        *,
        max_tokens: int = 256,
        temp: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        repeat_penalty: float = 1.0,
        seed: int | None = None,
        stop: Sequence[str] = (),
        ignore_eos: bool = False,
    ) -> Generation:
        """A completion of the token ids `prompt` that is checked and not begun.

        Greedy unless temp is above 0; qwenc.sampling.SamplingParams tells what temp … seed mean.
        Ends at an end-of-sequence id (unless ignore_eos), at a stop string, after max_tokens, or when the context is full.
        Raises UsageError for an empty prompt, one longer than the context, or an argument out of range.
        """
        sampling = SamplingParams(temp, top_k, top_p, min_p, repeat_penalty, seed)
        ids = self._prompt_ids(prompt)
        stop = stop or ()
        if stop and self.tokenizer is None:
            raise UsageError("stop strings need a tokenizer, and this checkpoint has none")
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
            raise UsageError(f"max_tokens must be a whole number of at least 0, not {max_tokens!r}")
        StopStrings(stop)
        output = TextOutput(self.tokenizer, stop) if self.tokenizer else None
        ends = frozenset() if ignore_eos else self.eos_ids
        room = min(max_tokens, self.context_size - len(ids))
        return Generation(ids, room, Sampler(sampling, self._vocab_limit), output, ends)

    @property
    def bytes_per_token(self) -> int:
        """What a token takes in the KV cache."""
        from qwenc.attention.cache import bytes_per_token

        config, kv, sparse = self.config, self.settings.kv, self.settings.sparse_attn
        return bytes_per_token(kv, config.num_hidden_layers, config.num_key_value_heads, config.padded_head_dim, sparse=sparse)

    def lanes(self, count: int | None = None) -> Lanes:
        """Room for `count` completions at a time (None: as many as pay)."""
        from qwenc.lanes import Lanes

        return Lanes(self, count)

    def identity(self) -> dict[str, Any]:
        """What the tokens of an answer depend on besides the prompt and its settings: the model's content and how it is run."""
        return {**self.settings.deciding(), "model": self._fingerprint, "ctx_size": self.context_size}

    @cached_property
    def _fingerprint(self) -> str:
        return fingerprint(self.packed)

    def close(self) -> None:
        """End the threads."""
        self._team.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # ---- inside ---------------------------------------------------------------------------------------------------------------
    def _steps(self, generation: Generation, dec_prof: bool) -> Iterator[Step]:
        session = self.session(len(generation.ids) + generation.room)
        self.timings = timings = session.timings
        timings.load_s = self.load_s
        timings.compile_s = self.compile(session)
        self._output = generation.output
        logits = self.prefill(session, generation.ids)
        while True:
            step = generation.take(logits, timings, session.last if dec_prof else None)
            yield step
            if step.finish_reason or step.id is None:
                return
            logits = session.step(step.id)

    def prefill(self, session: Session, ids: list[int], beside: Iterable[Session] = ()) -> np.ndarray:
        """Session.prefill into an empty session, less what is saved already: in other sessions, in prompt_cache or disk_kv."""
        if self._reuse is None:
            from qwenc.kv_store.reuse import Reuse

            self._reuse = Reuse(self.settings, self._prompt_identity, self.reporter)
        return self._reuse.prefill(session, ids, beside)

    def _prompt_identity(self) -> dict[str, Any]:
        """What the keys and values of a prompt depend on, bit by bit, besides its ids."""
        from qwenc.kernels.jit import kernels_name

        rope = hashlib.sha256(self._model.inv_freq.tobytes() + repr(self._model.rope_scaling).encode()).hexdigest()[:16]
        return {**{name: value for name, value in self.identity().items() if name != "ctx_size"}, "rope": rope, "kernels": kernels_name()}

    def compile(self, session: Session) -> float:
        """Compile the steps ahead of their first use. Seconds that it took; 0 after the first time."""
        if self._compiled:
            return 0.0
        began = time.perf_counter()
        session.compile()
        self._compiled = True
        return time.perf_counter() - began

    @property
    def _vocab_limit(self) -> int | None:
        """Ids that may be sampled: the tokenizer's, where it is smaller than the (padded) vocabulary."""
        return min(self.tokenizer.vocab_size, self.config.vocab_size) if self.tokenizer else None

    def _prompt_ids(self, ids: Ids[int]) -> list[int]:
        """`ids`, checked. Raises UsageError for none at all, or more than the context holds."""
        from qwenc.session import check_ids

        checked = check_ids(ids, self.config.vocab_size)
        if not checked:
            raise UsageError("the prompt is empty")
        if len(checked) > self.context_size:
            raise UsageError(f"the prompt has {len(checked)} tokens, the context holds {self.context_size} (--ctx-size, ctx_size)")
        return checked


def _check_text(name: str, value: Any) -> None:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be text, not {value!r:.60}")


def _read_tokenizer(packed: Packed) -> Tokenizer | None:
    data = packed.tokenizer_json
    return None if data is None else Tokenizer(data, packed.tokenizer_config)


__all__ = ["Engine", "QwencError", "Step", "load", "log_probability"]
