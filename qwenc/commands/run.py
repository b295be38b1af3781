"""`qwenc run`: one prompt in, its completion on stdout as it comes."""

from __future__ import annotations

import contextlib
import secrets
import sys
from dataclasses import asdict
from typing import Any

import click

from qwenc.commands.main import INTERRUPTED
from qwenc.commands.options import RUN, RunOptions, read_options, with_options
from qwenc.commands.outcome import Outcome, summary_line, timings_record
from qwenc.commands.params import Command, option_name
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.screen import say, wants_color, write_out
from qwenc.plain_json import to_json
from qwenc.resources import EMBEDDED_NOTE

EPILOG = """
Examples:
  qwenc -m Qwen/Qwen3-0.6B "Why is the sky blue?"
  qwenc -m ./smollm2 --raw -n 64 "Once upon a time"
  git diff | qwenc -s "Write a commit message for this diff."     (with QWENC_MODEL set)
  qwenc -f question.txt --json --temp 0.7 --top-p 0.8 --seed 1 > answer.json

Every option can be set as a variable QWENC_<OPTION>: QWENC_MODEL, QWENC_MAX_TOKENS, QWENC_THINK=0 …; the command line wins. stdout
holds the model's text only; a line end is added if it has none (--json has the text to the byte). With --echo the prompt comes first,
as it was given (in a chat on its own line). Exit codes: 0 done (or the reader of stdout left), 1 failure, 2 wrong usage, 130 Ctrl-C
(what was generated stays).
"""


@click.command(cls=Command, epilog=EPILOG, short_help="Complete a prompt (the default command).")
@with_options(RUN)
@click.pass_context
def run(ctx: click.Context, **_values: Any) -> None:
    """Complete PROMPT with a model. Without a prompt, or with -, it is read from stdin."""
    options = read_options(ctx)
    color = wants_color(options.color, sys.stderr)
    reporter = ScreenReporter(options.quiet, options.verbose, color)
    import qwenc.engine
    from qwenc.sampling import SamplingParams

    sampling = SamplingParams(**options.sampling)
    if sampling.seed is None and sampling.temp > 0:
        sampling = SamplingParams(**options.sampling | {"seed": secrets.randbits(32)})
        reporter.detail(f"seed {sampling.seed}")
    note_idle_options(options.settings, options.sampling, reporter)
    try:
        with qwenc.engine.load(options.model, reporter=reporter, **options.settings) as engine:
            if not options.model_given:
                reporter.note(EMBEDDED_NOTE)
            outcome = _generate(engine, options, sampling, reporter)
            record = _record(outcome, engine, options, sampling)
            _print_end(outcome, record, options)
            if not options.quiet:
                _report(outcome, engine, color)
    finally:
        reporter.close()
    if outcome.finish_reason == "interrupt":
        ctx.exit(INTERRUPTED)


def note_idle_options(settings: dict[str, Any], sampling: dict[str, Any], reporter: ScreenReporter) -> None:
    """Names the options given that do nothing: those of sparse attention where it is off, those of drawing where nothing is drawn."""
    from qwenc.sampling import GREEDY_BELOW, SamplingParams
    from qwenc.settings import Settings

    if not settings.get("sparse_attn"):
        of_sparse = [name for name in settings if name.startswith("sparse_") and name != "sparse_attn"]
        _note_idle(of_sparse, settings, Settings(), "without --sparse-attn", reporter)
    if sampling["temp"] < GREEDY_BELOW:
        reason = "at --temp 0, which always takes the likeliest token"
        _note_idle(["seed", "top_k", "top_p", "min_p"], sampling, SamplingParams(), reason, reporter)


def _note_idle(names: list[str], given: dict[str, Any], default: Any, reason: str, reporter: ScreenReporter) -> None:
    idle = [option_name(name) for name in names if given[name] != getattr(default, name)]
    if idle:
        reporter.note(f"{', '.join(idle)} {'has' if len(idle) == 1 else 'have'} no effect {reason}")


def _generate(engine: Any, options: RunOptions, sampling: Any, reporter: ScreenReporter) -> Outcome:
    """Runs to the end or to Ctrl-C, printing as it goes unless the options say otherwise."""
    chat = {"system": options.system, "think": options.think, "chat_template_kwargs": options.chat_template_kwargs}
    ids = engine.encode_prompt(options.prompt, raw=options.raw, **chat)
    cache = f"{engine.settings.kv} KV cache"
    reporter.detail(f"prompt of {len(ids)} tokens, context of {engine.context_size}, {cache}; ends at ids {sorted(engine.eos_ids)}")
    outcome = Outcome(prompt_tokens=len(ids))
    if options.echo:
        in_chat = engine.has_chat_template and not options.raw
        outcome.texts.append(options.prompt + ("\n" if in_chat and not options.prompt.endswith("\n") else ""))
        if options.stream:
            write_out(outcome.texts[0])
    steps = engine.generate(
        ids,
        max_tokens=options.max_tokens,
        **asdict(sampling),
        stop=options.stop,
        ignore_eos=options.ignore_eos,
        dec_prof=options.dec_prof,
    )
    try:
        with contextlib.closing(steps):
            for step in steps:
                outcome.add(step)
                reporter.close()
                if step.text and options.stream:
                    write_out(step.text)
                if step.token_timing is not None and options.dec_prof and not options.quiet:
                    say(step.token_timing.line())
    except KeyboardInterrupt:
        outcome.finish_reason, outcome.timings = "interrupt", engine.timings
        held = engine.held_text()  # what might have grown into a stop string, or half a character
        if held:
            outcome.texts.append(held)
            if options.stream:
                write_out(held)
    except Exception:
        if options.stream:
            _end_line(outcome.text)  # so that the error does not hang on the text
        raise
    return outcome


def _print_end(outcome: Outcome, record: dict[str, Any], options: RunOptions) -> None:
    """What was not streamed, and the line end that the text lacks: the last line of a text file ends too."""
    if options.as_json:
        write_out(to_json(record))
        return
    if not options.stream:
        write_out(outcome.text)
    _end_line(outcome.text)


def _end_line(text: str) -> None:
    if text and not text.endswith("\n"):
        write_out("\n")


def _report(outcome: Outcome, engine: Any, color: bool) -> None:
    """The timing lines, never coloured since scripts parse them, and the summary."""
    if outcome.timings is not None:
        for line in (*outcome.timings.prefill.lines(), *outcome.timings.decode.lines()):
            say(line)
    say(summary_line(outcome, engine.threads, engine.cores), dim=color)


def _record(outcome: Outcome, engine: Any, options: RunOptions, sampling: Any) -> dict[str, Any]:
    """The object that --json prints."""
    chat = {"raw": options.raw, "system": options.system, "think": options.think, "chat_template_kwargs": options.chat_template_kwargs}
    generation = {"max_tokens": options.max_tokens, "stop": list(options.stop), "ignore_eos": options.ignore_eos, "echo": options.echo}
    resolved = {"threads": engine.threads, "cores": list(engine.cores), "ctx_size": engine.context_size}
    return {
        "text": outcome.text,
        "ids": outcome.ids,
        "finish_reason": outcome.finish_reason,
        "usage": {"prompt_tokens": outcome.prompt_tokens, "completion_tokens": len(outcome.ids)},
        "timings": timings_record(outcome),
        "settings": {"model": options.model, **asdict(engine.settings), **resolved, **asdict(sampling), **generation, **chat},
    }
