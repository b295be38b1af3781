"""`qwenc batch`: many prompts in, one result line each."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from qwenc.commands.batch_progress import BatchProgress, report
from qwenc.commands.interrupts import Interrupts
from qwenc.commands.main import INTERRUPTED
from qwenc.commands.options import BATCH, Common, read_common, with_options, without_overruled_variables
from qwenc.commands.params import Command
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.run import note_idle_options
from qwenc.commands.screen import is_terminal, wants_color, write_out
from qwenc.errors import QwencError, UsageError
from qwenc.resources import EMBEDDED_NOTE
from qwenc.text.files import read_text

EPILOG = """
A line of IN is a JSON object: "prompt", "messages" or "prompt_file", and what is its own: "id" (text or a whole number; default: the line's
number), "system", "think", "chat_template_kwargs", "raw", "max_tokens", "stop", "ignore_eos", "temp", "top_k", "top_p", "min_p",
"repeat_penalty", "seed", and "meta", which is handed on. With --format lines every line is a prompt. Blank lines are skipped; CRLF and
a byte order mark are no part of a line. A result is {"id", "text", "finish_reason", "usage", "timings", …}, a failure {"id", "line",
"error"}. It depends on its item alone, not on the order, its neighbours, --parallel, threads or --resume.

Examples:
  qwenc batch questions.jsonl -o answers.jsonl -m Qwen/Qwen3-0.6B
  qwenc batch questions.jsonl -o answers.jsonl --resume          (with QWENC_MODEL set)
  seq 9 | sed 's/.*/What is & times 7?/' | qwenc batch --format lines - | jq -r .text

Exit codes: 0 all answered, 1 an item failed (or input or output did), 2 wrong usage, 130 Ctrl-C, 143 SIGTERM. Ctrl-C finishes the items
at work and writes them; a second one stops at once.
"""


@click.command(cls=Command, epilog=EPILOG, short_help="Answer a file of prompts, one result line each.")
@with_options(BATCH)
@click.pass_context
def batch(ctx: click.Context, **_values: Any) -> None:
    """Answer every line of IN (JSONL; - or nothing is stdin) with a model."""
    values = without_overruled_variables(ctx)
    common = read_common(values)
    out = _output(values["out"])
    if out is None and (values["resume"] or values["force"]):
        raise UsageError("--resume and --force need a file for the results: -o OUT")
    if values["resume"] and values["force"]:
        raise UsageError("--resume and --force exclude each other")
    reporter = ScreenReporter(common.quiet, common.verbose, wants_color(common.color, sys.stderr))
    interrupts = Interrupts(reporter.note)
    try:
        with interrupts, _input(values["source"]) as (source, name):
            _check_files(source, out, values)
            prefix = _prefix(values["prefix_file"], out)
            note_idle_options(common.settings, common.sampling, reporter)
            tally, engine = _answer(common, values, (source, name, out, prefix), interrupts, reporter)
        if not common.quiet:
            report(tally, engine, reporter.color)
    except KeyboardInterrupt:
        ctx.exit(interrupts.exit_code or INTERRUPTED)
    finally:
        reporter.close()
    if interrupts.exit_code:
        ctx.exit(interrupts.exit_code)
    if tally.failed:
        ctx.exit(QwencError.exit_code)


def _answer(
    common: Common, values: dict[str, Any], files: tuple[int, str, Path | None, str], interrupts: Interrupts, reporter: ScreenReporter
) -> tuple[Any, Any]:
    """Loads the model and runs the batch to its end or to an interrupt. Returns the tally and the engine, which is closed."""
    import qwenc.engine
    from qwenc.batch.lines import LineReader
    from qwenc.batch.runner import Defaults, Runner

    source, name, out, prefix = files
    defaults = Defaults(
        **{
            field: getattr(common, field)
            for field in ("system", "think", "chat_template_kwargs", "raw", "max_tokens", "stop", "ignore_eos")
        },
        prefix=prefix,
        sampling=common.sampling,
    )
    with qwenc.engine.load(common.model, reporter=reporter, **common.settings) as engine:
        if not common.model_given:
            reporter.note(EMBEDDED_NOTE)
        reader = LineReader(source, name)
        with _results(out, _identity(engine, common, prefix), values, reporter) as results:
            progress = BatchProgress(reporter, _count(source, values), values["log_every"], interrupts.tell)
            runner = Runner(
                engine,
                reader,
                results,
                form=values["form"],
                defaults=defaults,
                count=values["parallel"],
                fail_fast=values["fail_fast"],
                told=progress.show,
            )
            interrupts.runner = runner
            try:
                runner.run()
            except KeyboardInterrupt:
                if not runner.idle:
                    raise
            results.settle(complete=not (interrupts.exit_code or runner.stop))
        reporter.close()
        return runner.tally, engine


def _identity(engine: Any, common: Common, prefix: str) -> dict[str, Any]:
    """What the results depend on besides the items: what --resume compares."""
    from qwenc.version import __version__

    return {
        "version": __version__,
        **engine.identity(),
        **{name: getattr(common, name) for name in ("system", "think", "raw", "max_tokens", "stop", "ignore_eos")},
        **common.sampling,
        "chat_template_kwargs": common.chat_template_kwargs,
        "prefix_file": hashlib.sha256(prefix.encode()).hexdigest() if prefix else None,
    }


@contextlib.contextmanager
def _input(source: str | None) -> Iterator[tuple[int, str]]:
    """(open descriptor, name) of IN."""
    if source in (None, "-"):
        if source is None and is_terminal(sys.stdin):
            raise UsageError("no input: give a file of prompts, or - for stdin")
        try:
            os.fstat(0)
        except OSError:
            raise UsageError("no input: stdin is closed") from None
        yield 0, "stdin"
        return
    try:
        fd = os.open(str(source), os.O_RDONLY)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {source}: {getattr(error, 'strerror', None) or error}") from None
    try:
        yield fd, str(source)
    finally:
        os.close(fd)


def _output(name: str) -> Path | None:
    """OUT; None for stdout. What a symbolic link leads to is written, unless it is a device (/dev/stdout)."""
    if name == "-":
        return None
    path = Path(name)
    return Path(os.path.realpath(path)) if path.is_file() or not path.exists() else path


def _check_files(source: int, out: Path | None, values: dict[str, Any]) -> None:
    """What can be told before the model is loaded. Raises UsageError."""
    status = os.fstat(source)
    if stat.S_ISDIR(status.st_mode):
        raise UsageError(f"cannot read {values['source']}: it is a directory")
    with contextlib.suppress(OSError, ValueError, AttributeError):
        target = os.fstat(sys.stdout.fileno()) if out is None else os.stat(out)
        if stat.S_ISREG(target.st_mode) and os.path.samestat(status, target):
            raise UsageError(f"the input and the output are one file, {values['source'] or 'stdin'}: give another -o OUT")
        if out is not None and stat.S_ISDIR(target.st_mode):
            raise UsageError(f"cannot write {out}: it is a directory")
        if out is not None and not stat.S_ISREG(target.st_mode) and values["resume"]:
            raise UsageError(f"{out} is no file that a run could go on with")
        if out is not None and stat.S_ISREG(target.st_mode) and target.st_size and not (values["resume"] or values["force"]):
            raise UsageError(f"{out} exists: --resume goes on with it, --force replaces it")


def _prefix(path: str | None, out: Path | None) -> str:
    if path is None:
        return ""
    if out is not None and os.path.realpath(path) == str(out):
        raise UsageError(f"--prefix-file and the output are one file, {path}")
    return read_text(path, "the prefix")


@contextlib.contextmanager
def _results(out: Path | None, identity: dict[str, Any], values: dict[str, Any], reporter: ScreenReporter) -> Iterator[Any]:
    """Where the records go; closed in the end."""
    from qwenc.batch.results import FileResults, StreamResults

    if out is None:
        yield StreamResults(write_out)
    elif out.exists() and not out.is_file():
        with contextlib.closing(_Device(out)) as device:
            yield StreamResults(device.put)
    else:
        resume = values["resume"]
        opened = FileResults.resume(out, identity, reporter.note) if resume else FileResults.create(out, identity, values["force"])
        with contextlib.closing(opened) as results:
            yield results


class _Device:
    """A pipe or a device that was named as OUT."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115 (closed by whoever opened it)
        except OSError as error:
            raise QwencError(f"cannot write {path}: {error.strerror}") from None

    def put(self, line: str) -> None:
        view = memoryview(line.encode())
        try:
            while view:
                view = view[self._file.write(view) or 0 :]
        except OSError as error:
            raise QwencError(f"cannot write {self._path}: {error.strerror}") from None

    def close(self) -> None:
        self._file.close()


def _count(source: int, values: dict[str, Any]) -> int | None:
    """Items in IN, where it can be told and somebody will see it."""
    from qwenc.batch.lines import count_lines

    if not stat.S_ISREG(os.fstat(source).st_mode) or not values["source"] or values["source"] == "-":
        return None
    return count_lines(values["source"]) if values["log_every"] or is_terminal(sys.stderr) else None
