"""`qwenc warmup`: compile ahead what a first run would compile."""

from __future__ import annotations

import sys

import click

from qwenc.commands.params import Command, FileName, color_option, option, quiet_option
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.screen import wants_color
from qwenc.settings import KV_TYPES, WMODES

EPILOG = """
Examples:
  qwenc warmup                          the default settings, dense models
  qwenc warmup --wmode q4 --moe         4-bit weights, models with experts
  qwenc warmup -m Qwen/Qwen3-0.6B       this model: also downloads and converts it
"""


@click.command(cls=Command, epilog=EPILOG, short_help="Compile the kernels ahead of the first run.")
@option("-m", "--model", type=FileName(), metavar="MODEL", help="For this model. Default: for every dense one.")
@option("--moe", is_flag=True, help="Without -m: for models with experts.")
@option("--wmode", type=click.Choice(WMODES), help="Weights of the runs to come. Default: as qwenc run does.")
@option("--kv", type=click.Choice(KV_TYPES), default=KV_TYPES[0], show_default=True, help="KV cache of the runs to come.")
@option("--sparse-attn", is_flag=True, help="The runs to come attend sparsely.")
@option("--offline", is_flag=True, help="Never ask the Hub.")
@quiet_option()
@color_option()
def warmup(model: str | None, moe: bool, wmode: str | None, kv: str, sparse_attn: bool, offline: bool, quiet: bool, color: str) -> None:
    """Compile the kernels for the settings given, as the first run with them would, and keep them in the cache."""
    reporter = ScreenReporter(quiet, color=wants_color(color, sys.stderr))
    from qwenc.warmup import warm_up

    try:
        seconds, compiled = warm_up(model, moe, {"wmode": wmode, "kv": kv, "sparse_attn": sparse_attn, "offline": offline}, reporter)
        reporter.note(f"compiled in {seconds:.1f} s" if compiled else "the kernels for these settings are in the cache already")
    finally:
        reporter.close()
