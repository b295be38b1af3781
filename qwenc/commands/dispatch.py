"""The command `qwenc` and its outermost layer: every way to end becomes an exit code and at most one line on stderr."""

from __future__ import annotations

import difflib
import os
import sys

import click

from qwenc.commands.batch import batch
from qwenc.commands.bench import bench
from qwenc.commands.convert import convert
from qwenc.commands.env import env
from qwenc.commands.info import info
from qwenc.commands.params import DefaultGroup, debugging
from qwenc.commands.quality import quality
from qwenc.commands.run import INTERRUPTED, run
from qwenc.commands.screen import ClosedPipe, one_line, say, say_traceback, silence
from qwenc.commands.sweep import sweep
from qwenc.commands.warmup import warmup
from qwenc.errors import QwencError, UsageError

FAILED = 1
CLOSED_PIPE = 0  # the reader has what it wanted: `qwenc … | head -1` succeeded

EPILOG = """
Examples:
  qwenc -m Qwen/Qwen3-0.6B "Why is the sky blue?"
  echo "Why is the sky blue?" | qwenc -m ./my-checkpoint
  qwenc convert ./my-checkpoint my.qwenc --wmode q4
  qwenc run -h                 every option of a run

A first word that names a command is that command: for the prompt "info" write qwenc -p info.
Shell completion: eval "$(_QWENC_COMPLETE=bash_source qwenc)" in ~/.bashrc (zsh_source, fish_source likewise).
"""


@click.group(cls=DefaultGroup, default="run", epilog=EPILOG)
def cli() -> None:
    """Run Qwen3-family checkpoints on a CPU."""


for command in (run, batch, info, env, convert, warmup, bench, sweep, quality):
    cli.add_command(command)


def flush() -> None:
    """Writes out what the standard streams hold; one that is broken is silenced."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            silence(stream)


def run_command(args: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    try:
        if os.environ.get("_QWENC_COMPLETE"):
            _complete(args, os.environ["_QWENC_COMPLETE"])
        with cli.make_context("qwenc", args) as ctx:
            cli.invoke(ctx)
        return 0
    except click.exceptions.Exit as ended:
        return ended.exit_code
    except ClosedPipe:
        return CLOSED_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    except Exception as error:
        if debugging() and not isinstance(error, click.ClickException):
            say_traceback()
        line, code = _explain(error, args)
        say(f"qwenc: error: {line}")
        return code


def _complete(args: list[str], instruction: str) -> None:
    """Shell completion, which exits by itself; click says nothing about an instruction that it does not know."""
    from click.shell_completion import get_completion_class

    shell, _, action = instruction.partition("_")
    if get_completion_class(shell) is None or action not in ("source", "complete"):
        raise UsageError(f"_QWENC_COMPLETE must be bash_source, zsh_source or fish_source, not {instruction!r}")
    cli.main(args, prog_name="qwenc")


def _explain(error: Exception, args: list[str]) -> tuple[str, int]:
    """(one line, exit code) of a failure."""
    if isinstance(error, QwencError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return _usage_text(error, args), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name} is missing: install qwenc with what it needs (pip install .)", FAILED
    if isinstance(error, MemoryError):
        return f"out of memory{': ' if str(error) else ''}{error}", FAILED
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else ""), FAILED
    return f"internal error ({type(error).__name__}: {one_line(str(error))}); QWENC_DEBUG=1 shows where", FAILED


def _usage_text(error: click.ClickException, args: list[str]) -> str:
    text = error.format_message()
    if "unexpected extra argument" not in text:
        return text.rstrip(".")
    near = difflib.get_close_matches(args[0], cli.commands, 1)
    if near and args[0] not in cli.commands:
        return f"{args[0]!r} is no command; did you mean {near[0]!r}? (Quote a prompt of several words)"
    return text.rstrip(".") + ": quote a prompt of several words"
