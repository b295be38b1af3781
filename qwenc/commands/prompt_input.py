"""Where the prompt comes from: the command line, a file or stdin, as the bytes are, in UTF-8. Every mistake is a UsageError."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from qwenc.commands.screen import is_terminal
from qwenc.errors import UsageError
from qwenc.text.files import decode, read_all, read_text, strict_json, text_of

HINT = 'qwenc "a prompt", or qwenc -h for help'


def read_prompt(argument: str | None, option: str | None, file: str | None) -> str:
    """The one prompt given; "-" (as PROMPT or file) or nothing at all means stdin, but never a terminal that nobody asked for."""
    given = [name for name, value in (("PROMPT", argument), ("-p", option), ("-f", file)) if value is not None]
    if len(given) > 1:
        raise UsageError(f"give one prompt, not {' and '.join(given)}")
    if option is not None:
        prompt = argument_text("the prompt", option)
    elif file is not None and file != "-":
        prompt = read_text(file, "the prompt")
    elif argument is not None and argument != "-":
        prompt = argument_text("the prompt", argument)
    elif not given and is_terminal(sys.stdin):
        raise UsageError(f"no prompt: try {HINT}")
    else:
        prompt = text_of(_read_stdin(), "stdin")
    if not prompt:
        raise UsageError(f"the prompt is empty{'' if given else f' (nothing on stdin): try {HINT}'}")
    return prompt


def argument_text(what: str, value: str) -> str:
    """A command-line value as text. Python smuggles bytes that are no UTF-8 through as lone surrogates; they are refused here."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return decode(os.fsencode(value), what)
    return value


def template_arguments(text: str | None) -> dict[str, Any] | None:
    """--chat-template-kwargs: a JSON object."""
    if text is None:
        return None
    try:
        value = strict_json(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"--chat-template-kwargs is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError("--chat-template-kwargs must be a JSON object, such as '{\"enable_thinking\": false}'")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"--chat-template-kwargs is no Unicode text: lone surrogate U+{ord(error.object[error.start]):04X}") from None
    return value


def _read_stdin() -> bytes:
    stream = getattr(sys.stdin, "buffer", None)
    if stream is None:
        raise UsageError(f"no prompt: stdin is closed; try {HINT}")
    try:
        return read_all(stream, "stdin", "the prompt")
    except OSError as error:
        raise UsageError(f"cannot read the prompt from stdin: {error.strerror}") from None
