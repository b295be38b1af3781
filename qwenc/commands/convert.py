"""`qwenc convert MODEL OUT`: one packed file that maps in place."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from qwenc.commands.outcome import show_bytes
from qwenc.commands.params import Command, FileName, color_option, option, quiet_option
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.screen import wants_color
from qwenc.errors import QwencError, UsageError
from qwenc.settings import WMODES

EPILOG = """
Example:
  qwenc convert ./Qwen3-0.6B qwen3.qwenc --wmode q4 && qwenc -m qwen3.qwenc "Why is the sky blue?"
"""


@click.command(cls=Command, epilog=EPILOG, short_help="Write a checkpoint as one packed file.")
@click.argument("model", type=FileName())
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@option("--wmode", type=click.Choice(WMODES), default=WMODES[0], show_default=True, help="Weights: dual holds both q8 and q4.")
@option("--force", is_flag=True, help="Replace OUT if it exists.")
@option("--offline", is_flag=True, help="Never ask the Hub.")
@quiet_option()
@color_option()
def convert(model: str, out: Path, wmode: str, force: bool, offline: bool, quiet: bool, color: str) -> None:
    """Write MODEL, a checkpoint folder or Hub id, as the packed file OUT. OUT appears only when it is complete.

    If OUT is a symbolic link, the file that it leads to is written. A device, a pipe or a file of the checkpoint itself is never replaced.
    """
    if out.is_file() and not force:
        raise UsageError(f"{out} exists; --force replaces it")
    reporter = ScreenReporter(quiet, color=wants_color(color, sys.stderr))
    from qwenc.checkpoint.convert import convert as write_packed
    from qwenc.checkpoint.locate import find

    try:
        found = find(model, offline, reporter)
        if not found.is_dir():
            raise QwencError(f"{found}: is a file; convert takes a checkpoint folder or a Hub id")
        written = write_packed(found, out, wmode, reporter)
        reporter.note(f"wrote {written}: {show_bytes(written.stat().st_size)}")
    finally:
        reporter.close()
