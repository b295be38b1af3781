"""The options of `qwenc run` and `qwenc batch`, in the order of their help, and the records they become."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import click

from qwenc.commands.engine_options import engine_options, engine_settings
from qwenc.commands.params import FileName, WholeNumber, color_option, json_option, option, option_name, quiet_option, verbose_option
from qwenc.commands.prompt_input import argument_text, read_prompt, template_arguments
from qwenc.errors import UsageError
from qwenc.resources import EMBEDDED

_PROMPT = (
    click.argument("argument", metavar="[PROMPT]", required=False),
    option(
        "-p", "--prompt", "prompt_option", metavar="TEXT", help="The prompt, even one that is named like a command or starts with a dash."
    ),
    option(
        *("-f", "--file"),
        type=FileName(),
        metavar="PATH",
        help="Read the prompt from a UTF-8 file: its bytes as they are, less a byte order mark. - is stdin.",
    ),
)
_MODEL = (
    option(
        *("-m", "--model"),
        type=FileName(),
        metavar="MODEL",
        help="Checkpoint folder, packed file or Hub id (Qwen/Qwen3-0.6B). Default: embedded, the small model that comes with qwenc.",
    ),
)
_CHAT = (
    option("-s", "--system", metavar="TEXT", help="System prompt of the chat."),
    option("--think/--no-think", default=None, help="Turn the template's thinking on or off. Default: as the template does."),
    option("--chat-template-kwargs", metavar="JSON", help="More variables for the chat template, a JSON object; they win over --think."),
    option("--raw", is_flag=True, help="Complete the text as it is: no chat template, and control tokens spelled in it count."),
)
_LENGTH = (
    option("-n", "--max-tokens", type=WholeNumber(0), default=256, show_default=True, metavar="N", help="Most tokens to generate."),
    option(
        "-c", "--ctx-size", type=WholeNumber(1), metavar="N", help="Most tokens of prompt and answer. Default: what the model was made for."
    ),
    option("--stop", multiple=True, metavar="TEXT", help="End before this text; repeatable. It may span tokens."),
    option("--ignore-eos", is_flag=True, help="Generate on past the model's end tokens."),
)
_SAMPLING = (
    option("--temp", type=float, default=0.0, show_default=True, metavar="T", help="Temperature; 0 is greedy."),
    option("--top-k", type=WholeNumber(0), default=0, show_default=True, metavar="K", help="Draw from the K likeliest tokens; 0 is off."),
    option("--top-p", type=float, default=1.0, show_default=True, metavar="P", help="Draw from the fewest tokens that reach P; 1 is off."),
    option("--min-p", type=float, default=0.0, show_default=True, metavar="P", help="Drop tokens below P times the likeliest; 0 is off."),
    option("--repeat-penalty", type=float, default=1.0, show_default=True, metavar="X", help="Penalise tokens seen before; 1 is off."),
    option("--seed", type=WholeNumber(0, bits=64), metavar="N", help="Make draws repeatable. Default: a fresh one, shown with -v."),
)
_PRINT = (
    option("--echo", is_flag=True, help="Print the prompt before the answer."),
    option("--no-stream", is_flag=True, help="Print the answer when it is complete."),
    json_option("Print one JSON object: text, ids, finish_reason, usage, timings, settings."),
    *(verbose_option(), quiet_option(), color_option()),
    option("--dec-prof", is_flag=True, help="A [DEC-SINGLE] line per token on stderr (also with VLLM_DEC_PROF set)."),
)


RUN = (*_PROMPT, *_MODEL, *_CHAT, *_LENGTH, *_SAMPLING, *_PRINT)
_FILES = (
    click.argument("source", metavar="[IN]", required=False, type=FileName()),
    option("-o", "--out", default="-", metavar="OUT", type=FileName(), help="Results, one JSON object a line. Default: stdout."),
    option("--format", "form", type=click.Choice(("jsonl", "lines")), default="jsonl", show_default=True, help="What a line of IN is."),
    option("--resume", is_flag=True, help="Go on with the OUT of an earlier run: answer what it has not answered."),
    option("--force", is_flag=True, help="Replace OUT if it exists."),
    option("--fail-fast", is_flag=True, help="Begin no item after one has failed."),
    option(
        "--parallel",
        type=WholeNumber(1),
        metavar="N",
        help="Most items answered together, sharing each read of the weights. Default: 8, fewer where memory is short.",
    ),
    option("--prefix-file", type=FileName(), metavar="PATH", help="Text that comes before every prompt; it is computed once."),
    option("--log-every", type=WholeNumber(0), default=0, metavar="N", help="A line on stderr after every N items."),
)
BATCH = (*_FILES, *_MODEL, *_CHAT, *_LENGTH, *_SAMPLING, verbose_option(), quiet_option(), color_option())


def with_options(options: Iterable[Callable]) -> Callable:
    """Decorates a command with `options`, shown in this order, and then those of the engine."""

    def decorate(function: Callable) -> Callable:
        function = engine_options(function)
        for add in reversed([*options]):
            function = add(function)
        return function

    return decorate


@dataclass(frozen=True, slots=True)
class Common:
    """What every command that generates was asked for, checked. `settings` are keyword arguments of qwenc.load, `sampling` of
    SamplingParams."""

    model: str
    model_given: bool
    system: str | None
    think: bool | None
    chat_template_kwargs: dict[str, Any] | None
    raw: bool
    max_tokens: int
    stop: tuple[str, ...]
    ignore_eos: bool
    sampling: dict[str, Any]
    settings: dict[str, Any]
    verbose: bool
    quiet: bool
    color: str


@dataclass(frozen=True, slots=True)
class RunOptions(Common):
    """What one run was asked for."""

    prompt: str
    echo: bool
    stream: bool
    as_json: bool
    dec_prof: bool


def read_options(ctx: click.Context) -> RunOptions:
    """The parsed command line of a run. Raises UsageError; reads the prompt, but loads nothing."""
    values = without_overruled_variables(ctx)
    common = read_common(values)
    return RunOptions(
        **{field.name: getattr(common, field.name) for field in fields(Common)},
        prompt=read_prompt(values["argument"], values["prompt_option"], values["file"]),
        echo=values["echo"],
        stream=not (values["no_stream"] or values["as_json"]),
        as_json=values["as_json"],
        dec_prof=values["dec_prof"] or "VLLM_DEC_PROF" in os.environ,
    )


def read_common(values: dict[str, Any]) -> Common:
    """The options that commands share. Raises UsageError."""
    if values["verbose"] and values["quiet"]:
        raise UsageError("-v and -q exclude each other")
    for name, value in (("system", "-s"), ("think", "--think"), ("chat_template_kwargs", "--chat-template-kwargs")):
        if values["raw"] and values[name] is not None:
            raise UsageError(f"--raw leaves the chat template out, so {value} has no meaning with it")
    settings = engine_settings(values)
    sampling = {name: values[name] for name in ("temp", "top_k", "top_p", "min_p", "repeat_penalty", "seed")}
    _check_sampling(sampling)
    stops = tuple(argument_text("--stop", stop) for stop in values["stop"])
    if "" in stops:
        raise UsageError("--stop must be text of at least one character")
    chat_template_kwargs = template_arguments(values["chat_template_kwargs"])
    system = None if values["system"] is None else argument_text("the system prompt", values["system"])
    if values["model"] == "":
        raise UsageError("-m names no model: give it a checkpoint folder, a packed file or a Hub id")
    return Common(
        model=str(EMBEDDED) if values["model"] is None else values["model"],
        model_given=values["model"] is not None,
        system=system,
        think=values["think"],
        chat_template_kwargs=chat_template_kwargs,
        raw=values["raw"],
        max_tokens=values["max_tokens"],
        stop=stops,
        ignore_eos=values["ignore_eos"],
        sampling=sampling,
        settings=settings,
        verbose=values["verbose"],
        quiet=values["quiet"],
        color=values["color"],
    )


def without_overruled_variables(ctx: click.Context) -> dict[str, Any]:
    """The values, without those that come from the environment and that the command line contradicts.

    A prompt on the command line beats QWENC_PROMPT and QWENC_FILE, --raw beats QWENC_SYSTEM and the like, -q beats QWENC_VERBOSE.
    """
    values = dict(ctx.params)
    source = {name: ctx.get_parameter_source(name) for name in values}
    from_environment = {name for name in values if source[name] is click.core.ParameterSource.ENVIRONMENT}
    prompts = ("argument", "prompt_option", "file")
    if any(values.get(name) is not None and name not in from_environment for name in prompts):
        values |= {name: None for name in prompts if name in from_environment}
    if values["raw"] and "raw" not in from_environment:
        values |= {name: None for name in ("system", "think", "chat_template_kwargs") if name in from_environment}
    for name, rival in (("quiet", "verbose"), ("verbose", "quiet")):
        if values[name] and name not in from_environment and rival in from_environment:
            values[rival] = False
    return values


def _check_sampling(sampling: dict[str, Any]) -> None:
    from qwenc.sampling import SamplingParams  # numpy: not for --help

    try:
        SamplingParams(**sampling)
    except UsageError as error:
        named, _, rest = str(error).partition(" ")
        raise UsageError(f"{option_name(named) if named in sampling else named} {rest}") from None
