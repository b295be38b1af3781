"""Text to token ids and back, over a checkpoint's tokenizer.json.

What counts as a CONTROL TOKEN: an added token that the tokenizer marks special (`<|im_end|>`), or any other added token spelled `<…>`
(`<think>`, `<tool_response>`, `<|fim_prefix|>`): both steer the model, so text that is not ours must not be able to write them.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator
from functools import cached_property, lru_cache
from typing import Any

from qwenc.errors import QwencError

_CANNOT_ENCODE = "this checkpoint's tokenizer cannot encode the prompt"


class Tokenizer:
    """A checkpoint's tokenizer. `config` is its tokenizer_config.json. Raises QwencError if the JSON is no tokenizer.

    vocab_size: ids at or above it mean nothing (models pad their vocabulary: 151936 rows for 151669 ids).
    special_ids: ids whose text is never shown. eos_ids: the id of the config's eos_token, if any.
    """

    def __init__(self, tokenizer_json: bytes, config: dict[str, Any] | None = None) -> None:
        from tokenizers import Tokenizer as Backend

        self.config = config or {}
        with _one_line_errors("tokenizer.json cannot be read"):
            _refuse_bad_charsmaps(bytes(tokenizer_json))
            self._backend = Backend.from_buffer(bytes(tokenizer_json))
            self._backend.no_truncation()  # a length limit saved by a training script must not cut prompts
            self._backend.no_padding()
            self._add_missing_tokens()
            self._added = self._backend.get_added_tokens_decoder()
            self.vocab_size = self._find_vocab_size()
            self.special_ids = frozenset(id for id, token in self._added.items() if token.special)
            self._to_bytes = _byte_rule(self._backend.decoder)
        self.token_bytes = lru_cache(maxsize=None)(self._token_bytes)

    # -- text to ids

    def encode(self, text: str, special: bool) -> list[int]:
        """Ids of `text` with nothing added. special=False: control tokens spelled in it are plain text."""
        if special:
            with _one_line_errors(_CANNOT_ENCODE):
                return self._backend.encode(text, add_special_tokens=False).ids
        return self._encode_guarded(text, *self._plain)

    def encode_with_bos(self, text: str) -> list[int]:
        """Ids of `text`, control tokens recognised, after the start token that the tokenizer adds by itself, if it adds one.

        A boolean `add_bos_token` in the config decides over the tokenizer's post-processor, as in transformers.
        """
        ids = self.encode(text, special=True)
        asked = self.config.get("add_bos_token")
        if asked is False:
            return ids
        prefix = self._start_ids()
        bos = self.config_id("bos_token")
        if asked is True and bos is not None and bos not in prefix:
            prefix = [bos, *prefix]
        return prefix + ids

    def encode_sealed(self, text: str, mark: str) -> list[int]:
        """Ids of `text` in which a control token counts only where it stands between two `mark` characters; every other is plain text."""
        return self._encode_guarded(text, *self._sealed(mark))

    def _encode_guarded(self, text: str, backend: Any, real: dict[int, int]) -> list[int]:
        """Encode with a backend from `_sealed`; refuses if the model itself (not an added token) spells a control token."""
        with _one_line_errors(_CANNOT_ENCODE):
            ids = backend.encode(text, add_special_tokens=False).ids
        control = set(self.control_tokens.values())
        for id in ids:
            if id in control and id not in real:
                raise QwencError(f"this tokenizer cannot write {self._added[id].content!r} as plain text")
        return [real.get(id, id) for id in ids]

    @cached_property
    def control_tokens(self) -> dict[str, int]:
        """Spelling to id of every control token (see the module's docstring), the longest first."""
        tokens = {token.content: id for id, token in self._added.items() if _is_control(token)}
        return dict(sorted(tokens.items(), key=lambda item: -len(item[0])))

    # -- ids to text

    def _token_bytes(self, id: int) -> bytes:
        """The bytes that token `id` stands for; b"" for special tokens and for ids that the tokenizer does not know."""
        if id in self.special_ids or not 0 <= id < self.vocab_size:
            return b""
        if id in self._added:
            return self._added[id].content.encode("utf-8", "replace")
        token = self._backend.id_to_token(id)
        return b"" if token is None else self._to_bytes(token)

    def decode(self, ids: list[int]) -> str:
        """Text of `ids`: special and unknown ids vanish, bytes that are no UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    # -- the config's named tokens

    def config_id(self, name: str) -> int | None:
        """Id of a token that tokenizer_config.json names, such as "eos_token"; None if it names none that exists."""
        text = token_text(self.config.get(name))
        if text is None:
            return None
        with _one_line_errors(f"tokenizer_config.json: {name} cannot be looked up"):
            return self._backend.token_to_id(text)

    @property
    def eos_ids(self) -> frozenset[int]:
        eos = self.config_id("eos_token")
        return frozenset() if eos is None else frozenset([eos])

    # -- building

    def _add_missing_tokens(self) -> None:
        """Tokens that only tokenizer_config.json declares are added when they continue the ids, as transformers does."""
        from tokenizers import AddedToken

        declared = self.config.get("added_tokens_decoder")
        if not isinstance(declared, dict):
            return
        for key in sorted((key for key in declared if key.isdecimal() and len(key) < 12), key=int):
            entry = declared[key]
            text = token_text(entry) if isinstance(entry, dict) else None
            if text and self._backend.token_to_id(text) is None and int(key) == self._backend.get_vocab_size():
                flags = {flag: bool(entry.get(flag)) for flag in ("lstrip", "rstrip", "single_word", "normalized", "special")}
                self._backend.add_tokens([AddedToken(text, **flags)])

    def _find_vocab_size(self) -> int:
        """One more than the largest id. The count of tokens, unless ids have gaps; only then the whole vocabulary is fetched."""
        count = self._backend.get_vocab_size()
        if not count:
            raise QwencError("its vocabulary is empty")
        around = self._backend.id_to_token(count - 1), self._backend.id_to_token(count)
        has_gaps = max(self._added, default=0) >= count or around[0] is None or around[1] is not None
        return max(self._backend.get_vocab().values()) + 1 if has_gaps else count

    def _start_ids(self) -> list[int]:
        """What the post-processor puts before a text (a llama's <s>); what it puts behind is not wanted before a completion."""
        with _one_line_errors(_CANNOT_ENCODE):
            _refuse_undefined_tokens(self._backend.post_processor)
            probe = self._backend.encode("a", add_special_tokens=True)
        first = probe.special_tokens_mask.index(0) if 0 in probe.special_tokens_mask else 0
        return probe.ids[:first]

    @cached_property
    def _plain(self) -> tuple[Any, dict[int, int]]:
        return self._sealed("")

    def _sealed(self, mark: str) -> tuple[Any, dict[int, int]]:
        """(backend, its ids → real ids): the same model, but control tokens are spelled between `mark`s; with mark "" there are none."""
        from tokenizers import Tokenizer as Backend

        backend: Any = Backend(self._backend.model)  # shares the model: cheap
        if self._backend.normalizer is not None:
            backend.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            backend.pre_tokenizer = self._backend.pre_tokenizer
        with _one_line_errors(_CANNOT_ENCODE):
            return backend, self._add_sealed(backend, mark)

    def _add_sealed(self, backend: Any, mark: str) -> dict[int, int]:
        """Adds the added tokens to `backend` as `_sealed` says; its ids → real ids."""
        from tokenizers import AddedToken

        real: dict[int, int] = {}
        for id, token in sorted(self._added.items()):
            if _is_control(token) and not mark:
                continue
            spelling = f"{mark}{token.content}{mark}" if _is_control(token) else token.content
            flags = {"lstrip": token.lstrip, "rstrip": token.rstrip, "single_word": token.single_word}
            backend.add_tokens([AddedToken(spelling, normalized=token.normalized and not _is_control(token), **flags)])
            stand_in = backend.token_to_id(spelling)
            if stand_in != id and self._backend.model.id_to_token(stand_in) is not None:
                raise QwencError(f"this tokenizer's ids have gaps, so {token.content!r} cannot be told from plain text")
            real[stand_in] = id
        return real


@contextlib.contextmanager
def _one_line_errors(what: str) -> Iterator[None]:
    """Turns whatever the tokenizers package raises into a QwencError: bare Exceptions, and Rust panics, which are not even those."""
    try:
        yield
    except MemoryError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # KeyboardInterrupt and SystemExit
        reason = " ".join(str(error).split()) or type(error).__name__
        raise QwencError(f"{what}: {reason if len(reason) <= 300 else reason[:297] + '...'}") from None


def _refuse_bad_charsmaps(tokenizer_json: bytes) -> None:
    """A Precompiled normalizer (of SentencePiece) that is malformed makes the Rust side panic, which prints a trace: refused before."""
    if b'"Precompiled"' not in tokenizer_json:
        return
    data = json.loads(tokenizer_json)
    for table in _tables(data.get("normalizer") if isinstance(data, dict) else None):
        if table.get("type") == "Precompiled":
            raw = base64.b64decode(table.get("precompiled_charsmap") or "", validate=True)
            size = int.from_bytes(raw[:4], "little")  # of the trie, in bytes; UTF-8 text follows
            if len(raw) < 4 or size % 4 or 4 + size > len(raw):
                raise QwencError("its precompiled_charsmap is malformed")
            raw[4 + size :].decode()


def _refuse_undefined_tokens(post_processor: Any) -> None:
    """A template that names a token which it does not define makes the Rust side panic, which prints a trace: refused before."""
    for table in _tables(json.loads(post_processor.__getstate__()) if post_processor is not None else None):
        if table.get("type") == "TemplateProcessing":
            for piece in table.get("single") or ():
                name = piece.get("SpecialToken", {}).get("id")
                if name is not None and name not in (table.get("special_tokens") or {}):
                    raise QwencError(f"its post-processor names the token {name!r} but does not define it")


def _tables(spec: Any) -> Iterator[dict]:
    """Every JSON object in `spec`, at any depth."""
    if isinstance(spec, dict):
        yield spec
    for item in spec.values() if isinstance(spec, dict) else spec if isinstance(spec, list) else ():
        yield from _tables(item)


def token_text(value: Any) -> str | None:
    """A token as tokenizer_config.json spells it: a string, or an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _is_control(token: Any) -> bool:
    text = token.content
    return len(text) > 1 and (token.special or (text[0] == "<" and text[-1] == ">"))


def _byte_rule(decoder: Any):
    """How token strings spell bytes, read off the tokenizer's decoder."""
    spec = "" if decoder is None else decoder.__getstate__().decode()
    kinds = {table.get("type") for table in _tables(json.loads(spec))} if spec else set()
    if "ByteLevel" in kinds:
        return _byte_level
    return _byte_fallback if "ByteFallback" in kinds else _metaspace


def _byte_level(token: str) -> bytes:
    """GPT-2's spelling: each character stands for one byte."""
    table = _byte_of_char()
    try:
        return bytes([table[char] for char in token])
    except KeyError:  # a token spelled as itself
        return token.encode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """Printable Latin-1 bytes are themselves, the other 68 follow from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _byte_fallback(token: str) -> bytes:
    """SentencePiece with bytes: `<0x0A>` is one byte, ▁ is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return _metaspace(token)


def _metaspace(token: str) -> bytes:
    return token.replace("\u2581", " ").encode("utf-8", "replace")
