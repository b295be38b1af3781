"""Chat templates (Jinja) rendered as transformers renders them, and chats encoded so that no turn can forge a control token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from qwenc.errors import QwencError, UsageError
from qwenc.text.tokenizer import Tokenizer, token_text

Message = Mapping[str, Any]  # {"role": "system" | "user" | "assistant" | "tool", "content": text, …}

TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
RESERVED = ("messages", "add_generation_prompt")


class ChatTemplate:
    """A template's source and the named tokens it may print (`eos_token` …)."""

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self.tokens = dict(tokens or {})

    def render(self, messages: Sequence[Message], variables: Mapping[str, Any] | None = None, *, add_generation_prompt: bool = True) -> str:
        """The chat as one text. `variables` are the template's own, such as enable_thinking. Raises QwencError, UsageError."""
        variables = variables or {}
        for name in RESERVED:
            if name in variables:
                raise UsageError(f"chat template argument {name!r} is set by qwenc and cannot be given")
        given: dict[str, Any] = {"tools": None, "documents": None, **self.tokens, **variables}
        try:
            text = _compile(self.source).render(messages=messages, add_generation_prompt=add_generation_prompt, **given)
            text.encode()  # no lone surrogates: no tokenizer takes them
            return text
        except UnicodeEncodeError as error:
            code = ord(error.object[error.start])
            raise QwencError(f"the chat template failed: it makes text that is not Unicode (lone surrogate U+{code:04X})") from None
        except Exception as error:  # the template is a program from the checkpoint: it may fail in any way
            raise QwencError(f"the chat template failed: {type(error).__name__}: {error}") from error

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of the chat. Control tokens come from the template only.

        A chat that spells no control token is encoded whole, as transformers does. Otherwise each spelled one is broken by a
        noncharacter before rendering, the template's own are wrapped in it afterwards, and the tokenizer heeds only the wrapped ones.
        Assistant turns are the model's own and may hold unspecial control tokens (`<think>`, `<tool_call>`) as the model writes them.
        `variables` come from whoever runs the model and are trusted.
        """
        specials = [text for text, id in tokenizer.control_tokens.items() if id in tokenizer.special_ids]
        spelled = {"assistant": _any_of(specials)}
        spelled_elsewhere = _any_of(tokenizer.control_tokens)
        patterns = [spelled.get(message.get("role", ""), spelled_elsewhere) for message in messages]
        if not any(pattern.search(text) for message, pattern in zip(messages, patterns, strict=True) for text in _strings(message)):
            return tokenizer.encode(self.render(messages, variables, add_generation_prompt=add_generation_prompt), special=True)
        mark = _unused_noncharacter([*_strings(messages), *_strings(variables), self.source])
        broken = [_break(message, pattern, mark) for message, pattern in zip(messages, patterns, strict=True)]
        text = self.render(broken, variables, add_generation_prompt=add_generation_prompt)
        pieces = _any_of(tokenizer.control_tokens, capture=True).split(text)  # text, control token, text, …
        sealed = [f"{mark}{piece}{mark}" if place % 2 else piece.replace(mark, "") for place, piece in enumerate(pieces)]
        return tokenizer.encode_sealed("".join(sealed), mark)


def find_template(jinja_text: str | None, tokenizer_config: Mapping[str, Any]) -> ChatTemplate | None:
    """The checkpoint's template: chat_template.jinja before tokenizer_config.json; None if there is none.

    Of several named templates "default" is taken, else the first.
    """
    source: Any = jinja_text if jinja_text else tokenizer_config.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default") or next(iter(named.values()), None)
    if not isinstance(source, str) or not source:
        return None
    texts = {name: token_text(tokenizer_config.get(name)) for name in TOKEN_VARIABLES}
    return ChatTemplate(source, {name: text for name, text in texts.items() if text is not None})


def _any_of(texts: Iterable[str], capture: bool = False) -> re.Pattern[str]:
    """A pattern that matches any of `texts`, longest first; one that never matches if there are none."""
    either = "|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)"
    return re.compile(f"({either})" if capture else either)


def _strings(value: Any) -> Iterator[str]:
    """Every string inside `value`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def _break(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """`value` with `mark` put after the first character of every match in every string."""
    if isinstance(value, str):
        while pattern.search(value):  # again: breaking one match can leave another that overlapped it
            value = pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
        return value
    if isinstance(value, Mapping):
        return {key: _break(item, pattern, mark) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_break(item, pattern, mark) for item in value]
    return value


def _unused_noncharacter(texts: Sequence[str]) -> str:
    """A Unicode noncharacter that none of `texts` holds: they are no part of real text."""
    for code in _noncharacters():
        if not any(chr(code) in text for text in texts):
            return chr(code)
    raise UsageError("the prompt holds every Unicode noncharacter; qwenc needs one to keep its control tokens apart")


def _noncharacters() -> Iterator[int]:
    yield from range(0xFDD0, 0xFDF0)
    for plane in range(1, 17):
        yield from (plane << 16 | 0xFFFE, plane << 16 | 0xFFFF)


@lru_cache(maxsize=8)
def _compile(source: str) -> Any:
    """The compiled template, in a sandbox: templates come with checkpoints and are not trusted."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %} … {% endgeneration %} marks the assistant's text for training; here it only holds its body."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = tojson  # Jinja's own escapes < and > for HTML
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(source)
