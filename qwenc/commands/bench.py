"""`qwenc bench`: prompt processing and generation rates, with llama-bench's options and rows."""

from __future__ import annotations

import statistics
import sys
from typing import Any

import click

from qwenc.commands.main import INTERRUPTED
from qwenc.commands.outcome import show_bytes
from qwenc.commands.params import Command, WholeNumber, option
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.screen import wants_color, write_out
from qwenc.commands.study_options import Chosen, model_option, numbers_option, output_options, read_settings, setting_options
from qwenc.commands.tables import Column, default_format, flat, render

EPILOG = """
Examples:
  qwenc bench -m MODEL
  qwenc bench -m MODEL -p 512,2048 -n 128 -d 0,4096 -r 3
  qwenc bench -m MODEL -p 0 -n 64 -d 0..8192+2048 --kv q8,f32 -o jsonl

The grammar, the rows (pp512: 512 tokens of prompt, tg128: 128 generated, "@ d4096": after 4,096 tokens of context) and the names of the
JSON fields are llama-bench's. Lists are 512,1024 or ranges 128-1024*2, 0..8192+2048. Ctrl-C prints the rows that are done.
"""


@click.command(cls=Command, epilog=EPILOG, short_help="Measure speed as llama-bench does.")
@model_option()
@numbers_option("-p", "--n-prompt", "prompts", default="512", show_default=True, help="Tokens of prompt; 0 leaves these rows away.")
@numbers_option("-n", "--n-gen", "generations", default="128", show_default=True, help="Tokens to generate; 0 leaves these rows away.")
@numbers_option("-d", "--n-depth", "depths", default="0", show_default=True, help="Tokens of context before either.")
@option("-r", "--repetitions", type=WholeNumber(1), default=5, show_default=True, metavar="N", help="Times each row is measured.")
@setting_options()
@output_options
@click.pass_context
def bench(ctx: click.Context, **values: Any) -> None:
    """Measure tokens a second of prompt processing and of generation, mean ± standard deviation, on random tokens."""
    chosen = read_settings(values)
    form = default_format(values["output"])
    from qwenc.study.bench import Bench, tests_of

    reporter = ScreenReporter(values["quiet"], values["verbose"], wants_color(values["color"], sys.stderr))

    tests = tests_of(values["prompts"], values["generations"], values["depths"])
    study = Bench(chosen.arms(), tests, values["repetitions"], chosen.open_engine, reporter)
    results, interrupted = [], False
    try:
        for result in study.run():
            results.append(result)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        reporter.close()
    if results:
        records = [_record(result, chosen) for result in results]
        write_out(render(form, COLUMNS, results, [flat(record) for record in records] if form == "csv" else records))
    if interrupted:
        ctx.exit(INTERRUPTED)


COLUMNS = (
    Column("model", lambda result: result.model, left=True),
    Column("size", lambda result: show_bytes(result.file_bytes)),
    Column("params", lambda result: f"{result.parameters / 1e9:.2f} B" if result.parameters >= 1e9 else f"{result.parameters / 1e6:.2f} M"),
    Column("backend", lambda _result: "CPU", left=True),
    Column("threads", lambda result: str(result.threads)),
    Column("settings", lambda result: result.arm.label, left=True),
    Column("test", lambda result: result.test.name),
    Column("t/s", lambda result: f"{result.avg_ts:.2f} ± {result.stddev_ts:.2f}"),
)


def _record(result: Any, chosen: Chosen) -> dict[str, Any]:
    """Names and units of llama-bench's JSON, as far as they mean something here, and the settings."""
    from qwenc.machine.topology import cpu_name
    from qwenc.version import __version__

    ns, ts = result.samples_ns, result.samples_ts
    return {
        "build_commit": f"qwenc {__version__}",
        "cpu_info": cpu_name(),
        "backends": "CPU",
        "model_filename": chosen.model,
        "model_type": result.model,
        "model_size": result.file_bytes,
        "model_n_params": result.parameters,
        "n_batch": result.arm.settings.prefill_batch,
        "n_threads": result.threads,
        "n_prompt": result.test.prompt,
        "n_gen": result.test.generate,
        "n_depth": result.test.depth,
        "test": result.test.name,
        "test_time": result.test_time,
        "avg_ns": round(statistics.fmean(ns)),
        "stddev_ns": round(statistics.stdev(ns)) if len(ns) > 1 else 0,
        "avg_ts": result.avg_ts,
        "stddev_ts": result.stddev_ts,
        "samples_ns": list(ns),
        "samples_ts": ts,
        "settings": result.arm.key(),
    }
