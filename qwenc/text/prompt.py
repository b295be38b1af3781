"""From a prompt to the ids that the model is fed, and the ids that end its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qwenc.errors import UsageError
from qwenc.text.template import ChatTemplate
from qwenc.text.tokenizer import Tokenizer


def encode_prompt(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    text: str,
    *,
    raw: bool = False,
    system: str | None = None,
    think: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a one-turn chat, or of the text alone with raw=True or without a template. Never empty. Raises UsageError.

    A raw prompt is the user's own whole input: control tokens in it count, and the tokenizer's start token is put before it if it has
    one. In a chat, control tokens in `text` and `system` are plain text. `chat_template_kwargs` win over `think`.
    """
    if not text:
        raise UsageError("the prompt is empty")
    _refuse_surrogates("prompt", text)
    _refuse_surrogates("system prompt", system or "")
    if raw or template is None:
        if system is not None or think is not None or chat_template_kwargs:
            why = "--raw leaves it out" if raw else "this checkpoint has none"
            raise UsageError(f"a system prompt, thinking and template arguments need the chat template: {why}")
        ids = tokenizer.encode_with_bos(text)
    else:
        turns = [{"role": "user", "content": text}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        variables: dict[str, Any] = {} if think is None else {"enable_thinking": think}
        ids = template.encode(tokenizer, turns, variables | dict(chat_template_kwargs or {}))
    if not ids:
        raise UsageError("the prompt is empty: it holds no token")
    return ids


def encode_messages(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[Mapping[str, Any]],
    *,
    think: bool | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[int]:
    """Ids of a chat of several turns, up to where the model answers. Never empty. Raises UsageError.

    A message is {"role": text, "content": text}; what else it holds goes to the template. Control tokens in it are plain text.
    """
    if template is None:
        raise UsageError("messages need a chat template, and this checkpoint has none")
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence) or not messages:
        raise UsageError("messages must be a list of at least one message")
    for place, message in enumerate(messages, 1):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise UsageError(f"message {place} must be an object with a role and a content")
        if not isinstance(message.get("content"), str):
            raise UsageError(f"the content of message {place} must be text")
        _refuse_surrogates(f"content of message {place}", message["content"])
    variables: dict[str, Any] = {} if think is None else {"enable_thinking": think}
    ids = template.encode(tokenizer, messages, variables | dict(chat_template_kwargs or {}))
    if not ids:
        raise UsageError("the messages hold no token")
    return ids


def resolve_eos(
    generation_config: Mapping[str, Any] | None, config_json: Mapping[str, Any] | None, tokenizer: Tokenizer | None
) -> frozenset[int]:
    """Every id that ends a generation: generation_config.json, config.json (or its text_config) and the tokenizer's eos_token united.

    Checkpoints disagree with themselves, and an end that is missed runs on to the token limit, so all of them count.
    """
    config = config_json or {}
    inner = config.get("text_config")
    sources = [generation_config or {}, config, inner if isinstance(inner, Mapping) else {}]
    ids = {id for source in sources for id in _ids(source.get("eos_token_id"))}
    return frozenset(ids | (tokenizer.eos_ids if tokenizer is not None else frozenset()))


def _refuse_surrogates(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the {what} is no Unicode text: lone surrogate U+{ord(text[error.start]):04X} at character {error.start}"
        ) from None


def _ids(value: Any) -> list[int]:
    """An id or a list of ids as a list; anything else holds none."""
    values = value if isinstance(value, list) else [value]
    return [id for id in values if isinstance(id, int) and not isinstance(id, bool) and id >= 0]
