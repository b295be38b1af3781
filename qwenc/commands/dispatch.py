"""The command `qwenc` and its outermost layer: every way to end becomes an exit code and at most one line on stderr."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import click

from qwenc.commands.convert import convert
from qwenc.commands.env import env
from qwenc.commands.info import info
from qwenc.commands.params import DefaultGroup, debugging
from qwenc.commands.run import INTERRUPTED, run
from qwenc.commands.screen import ClosedPipe, one_line, say, say_traceback, silence
from qwenc.errors import QwencError

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


for command in (run, info, env, convert):
    cli.add_command(command)


def main() -> NoReturn:
    """The console script."""
    code = run_command(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            silence(stream)
    sys.exit(code)


def run_command(args: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    try:
        if "_QWENC_COMPLETE" in os.environ:
            cli.main(args, prog_name="qwenc")
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
        line, code = _explain(error)
        say(f"qwenc: error: {line}")
        return code


def _explain(error: Exception) -> tuple[str, int]:
    """(one line, exit code) of a failure."""
    if isinstance(error, QwencError):
        return str(error), error.exit_code
    if isinstance(error, click.ClickException):
        return _usage_text(error), error.exit_code
    if isinstance(error, ModuleNotFoundError):
        return f"the Python package {error.name} is missing: install qwenc with what it needs (pip install .)", FAILED
    if isinstance(error, MemoryError):
        return f"out of memory{': ' if str(error) else ''}{error}", FAILED
    if isinstance(error, OSError) and error.strerror:
        return error.strerror + (f": {error.filename}" if error.filename else ""), FAILED
    return f"internal error ({type(error).__name__}: {one_line(str(error))}); QWENC_DEBUG=1 shows where", FAILED


def _usage_text(error: click.ClickException) -> str:
    text = error.format_message()
    return text.rstrip(".") + (": quote a prompt of several words" if "unexpected extra argument" in text else "")
