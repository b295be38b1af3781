"""One line of input as a checked item: the prompt and the settings that are its own."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from qwenc.batch.lines import LONGEST, Line
from qwenc.errors import UsageError
from qwenc.sampling import SamplingParams
from qwenc.text.files import strict_json

FORMATS = ("jsonl", "lines")
SAMPLING = ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")
PROMPTS = ("prompt", "messages", "prompt_file")
CHAT = ("system", "think", "chat_template_kwargs")
KNOWN = ("id", *PROMPTS, *CHAT, "raw", "max_tokens", "stop", "ignore_eos", *SAMPLING, "meta")
DEEPEST = 100  # levels of a JSON value


@dataclass(frozen=True, slots=True)
class Item:
    """line: its number. settings: what it sets itself, by name; prompt is one of PROMPTS as (name, value). digest: names all of these.
    meta: handed on to the result."""

    line: int
    id: str | int
    prompt: tuple[str, Any]
    settings: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    meta: Any = None


class BadItem(Exception):
    """A line that is no item; str() says why. id: its id, if that much could be read."""

    def __init__(self, line: int, reason: str, id: str | int | None = None) -> None:
        super().__init__(reason)
        self.line, self.id = line, id


def parse(line: Line, form: str) -> Item:
    """The item of a line, in one of FORMATS. Raises BadItem."""
    if line.data is None:
        raise BadItem(line.number, f"the line is longer than {LONGEST >> 20} MiB")
    try:
        text = line.data.decode()
    except UnicodeDecodeError as error:
        raise BadItem(line.number, f"not UTF-8: byte 0x{line.data[error.start]:02x} at offset {error.start} of the line") from None
    if form == "lines":
        return Item(line.number, line.number, ("prompt", text), digest=_digest({"prompt": text}))
    value = _parse_json(line.number, text)
    id = value.get("id", line.number)
    if isinstance(id, bool) or not isinstance(id, (str, int)) or (isinstance(id, str) and not _is_unicode(id)):
        raise BadItem(line.number, "id must be text or a whole number")
    try:
        return _item(line.number, id, value)
    except UsageError as error:
        raise BadItem(line.number, str(error), id) from None


def _parse_json(number: int, text: str) -> dict[str, Any]:
    try:
        value = strict_json(text)
    except RecursionError:
        raise BadItem(number, "not JSON: it nests too deep") from None
    except ValueError as error:
        raise BadItem(number, f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise BadItem(number, 'must be a JSON object, such as {"id": "a", "prompt": "Why is the sky blue?"}')
    return value


def _item(line: int, id: str | int, value: dict[str, Any]) -> Item:
    for name in value:
        if name not in KNOWN:
            near = difflib.get_close_matches(name, KNOWN, 1)
            hint = f"; did you mean {near[0]!r}?" if near else " (what is yours goes into 'meta')"
            raise UsageError(f"unknown key {name!r:.60}{hint}")
    given = {name: setting for name, setting in value.items() if setting is not None}
    prompts = [name for name in PROMPTS if name in given]
    if len(prompts) != 1:
        raise UsageError(f"give one of prompt, messages and prompt_file, not {' and '.join(prompts) or 'none of them'}")
    name = prompts[0]
    wanted = list if name == "messages" else str
    if not isinstance(given[name], wanted) or not given[name]:
        raise UsageError(f"{name} must be {'a list of messages' if wanted is list else 'text'}, not {_show(given[name])}")
    settings = {key: given[key] for key in given if key not in ("id", "meta", *PROMPTS)}
    _check(settings, name)
    if isinstance(settings.get("stop"), str):
        settings["stop"] = [settings["stop"]]
    return Item(line, id, (name, given[name]), settings, _digest({name: given[name], **settings}), given.get("meta"))


CHECKS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "system": ("text", lambda value: isinstance(value, str)),
    "think": ("true or false", lambda value: isinstance(value, bool)),
    "chat_template_kwargs": ("an object", lambda value: isinstance(value, dict)),
    "raw": ("true or false", lambda value: isinstance(value, bool)),
    "ignore_eos": ("true or false", lambda value: isinstance(value, bool)),
    "max_tokens": (
        "a whole number of at least 0",
        lambda value: isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 31,
    ),
    "stop": ("text, or a list of texts, of at least one character", lambda value: _is_stop(value)),
}


def _check(settings: dict[str, Any], prompt: str) -> None:
    for name, (kind, holds) in CHECKS.items():
        if name in settings and not holds(settings[name]):
            raise UsageError(f"{name} must be {kind}, not {_show(settings[name])}")
    SamplingParams(**{name: settings[name] for name in SAMPLING if name in settings})
    if settings.get("raw"):
        for name in (*CHAT, *(["messages"] if prompt == "messages" else [])):
            if name in settings or name == prompt:
                raise UsageError(f"raw leaves the chat template out, so {name} has no meaning with it")
    if prompt == "messages" and "system" in settings:
        raise UsageError("messages hold their own system message: give system there")


def _is_stop(value: Any) -> bool:
    texts = [value] if isinstance(value, str) else value
    return isinstance(texts, list) and all(isinstance(text, str) and text for text in texts)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(value: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]


def _show(value: Any) -> str:
    shown = json.dumps(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}…"
