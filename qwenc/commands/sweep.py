"""`qwenc sweep`: one prompt under many settings, in one table."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from qwenc.commands.main import INTERRUPTED
from qwenc.commands.params import Command, FileName, WholeNumber, option
from qwenc.commands.progress import ScreenReporter
from qwenc.commands.prompt_input import read_prompt
from qwenc.commands.screen import wants_color, write_out
from qwenc.commands.study_options import Chosen, model_option, numbers_option, output_options, read_settings, setting_options, text_option
from qwenc.commands.tables import default_format, flat, render
from qwenc.errors import UsageError

EPILOG = """
Examples:
  qwenc sweep -m MODEL --n 506,2046,4059 --sparse-attn off,on
  qwenc sweep -m MODEL --n 512..16384*2 --sparse-k 8,16,32 --kv q8,q4 --plot curve.svg
  qwenc sweep -m MODEL --n 506,2046,4059 --tables       beside the figures of the RK3588

A list is 8,16,32, or a range 512..16384*2 or 0..4096+1024. Every combination is an arm; all arms see the same text; they take turns, and
the first exact one is what the others are compared with. Arms whose prefill is the same computation share one, marked = (--fresh-prefill:
each its own). Ctrl-C prints the rows so far; --resume goes on where a sweep ended, whatever ended it.
"""


@click.command(cls=Command, epilog=EPILOG, short_help="Measure speed and quality under many settings.")
@model_option()
@numbers_option("-n", "--n", "lengths", least=1, default="506,2046,4059", show_default=True, help="Tokens of context before decoding.")
@option("--decode", type=WholeNumber(1), default=32, show_default=True, metavar="N", help="Tokens decoded at each length.")
@option(
    "-r", "--repeats", type=WholeNumber(1), default=3, show_default=True, metavar="N", help="Times each is measured: median and spread."
)
@text_option("Text, cut at each length. Default: a built-in one; random tokens for a model without a tokenizer.")
@option("--fresh-prefill", is_flag=True, help="Every arm prefills by itself.")
@option("--resume", is_flag=True, help="Go on with the sweep of these settings that was cut short.")
@option("--journal", type=FileName(), metavar="PATH", help="Keep the measurements here. Default: in the cache.")
@option("--tables", is_flag=True, help="Print prefill and decode, exact against sparse, beside the reference's RK3588 figures.")
@option("--chart", is_flag=True, help="Draw attention against n in the terminal, under the table.")
@option("--plot", type=FileName(), metavar="PATH", help="Draw the same into a .png, .svg or .pdf file (extra `plot`).")
@option("--log-axes", is_flag=True, help="Logarithmic axes in both.")
@setting_options(sparse_attn=[False, True])
@output_options
@click.pass_context
def sweep(ctx: click.Context, **values: Any) -> None:
    """Measure every combination of settings at every context length: prefill, decode, attention, memory, and how far the predictions
    are from those of exact attention."""
    chosen = read_settings(values)
    form = default_format(values["output"])
    if (values["tables"] or values["chart"]) and form not in ("table", "md"):
        raise UsageError("--tables and --chart are for people: they go with -o table or md")
    if values["plot"]:
        from qwenc.commands.plots import check_plot

        check_plot(values["plot"])
    study, reporter = prepare(chosen, values)
    interrupted = False
    try:
        study.run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        reporter.close()
    show(study, chosen, form, values, reporter)
    if interrupted:
        reporter.note("interrupted: --resume goes on from here")
        ctx.exit(INTERRUPTED)


def prepare(chosen: Chosen, values: dict[str, Any]) -> tuple[Any, ScreenReporter]:
    from qwenc.study.journal import Journal
    from qwenc.study.sweep import Plan, Sweep

    plan = Plan(
        arms=chosen.arms(),
        lengths=sorted(values["lengths"]),
        repeats=values["repeats"],
        decode=values["decode"],
        share_prefill=not values["fresh_prefill"],
        text=read_prompt(None, None, values["file"]) if values["file"] else None,
        text_name=values["file"] or "",
    )
    reporter = ScreenReporter(values["quiet"], values["verbose"], wants_color(values["color"], sys.stderr))

    def open_journal(conditions: dict[str, Any]) -> Journal:
        path = Path(values["journal"]) if values["journal"] else _default_journal(plan, conditions)
        journal = Journal(path, conditions, resume=values["resume"])
        reporter.note(
            f"{len(journal.records)} measurements are there; more go to {path}" if journal.records else f"measurements go to {path}"
        )
        return journal

    return Sweep(plan, chosen.open_engine, open_journal, reporter), reporter


def _default_journal(plan: Any, conditions: dict[str, Any]) -> Path:
    from qwenc.machine.folders import cache_root

    whole = json.dumps([conditions, [arm.key() for arm in plan.arms], list(plan.lengths), plan.repeats], sort_keys=True)
    return cache_root() / "sweeps" / f"{hashlib.sha256(whole.encode()).hexdigest()[:16]}.jsonl"


def show(study: Any, chosen: Chosen, form: str, values: dict[str, Any], reporter: ScreenReporter) -> None:
    """The table, then whatever else was asked for."""
    from qwenc.commands.sweep_tables import legend, reference_tables, tables
    from qwenc.study.rows import curves_of, rows_of

    rows = rows_of(study)
    if not rows:
        return
    settings = {arm.label: arm.key() for arm in study.plan.arms}
    facts = {"model": chosen.model, "text": study.source, **study.machine}
    reporter.note(legend(study))
    if study.disturbed():
        reporter.note(
            f"something else used the cores during {study.disturbed()} of {len(study.samples)} measurements: do not trust the times"
        )
    if form in ("table", "md"):
        parts = tables(rows, form)
    else:
        records = [{**facts, **settings[row.arm], **asdict(row)} for row in rows]
        parts = [render(form, (), (), [flat(record) for record in records] if form == "csv" else records)]
    if values["tables"]:
        parts += reference_tables(study, rows, form)
    curves = curves_of(study, rows)
    if values["chart"]:
        from qwenc.commands.charts import attention_chart

        chart = attention_chart(curves, log=values["log_axes"])
        parts.append(f"```\n{chart}```\n" if form == "md" else chart)
    write_out("\n".join(parts))
    if values["plot"]:
        from qwenc.commands.plots import plot_attention

        plot_attention(curves, values["plot"], log=values["log_axes"], title=f"{Path(chosen.model).name}, {study.machine.get('cpu', '')}")
        reporter.note(f"wrote {values['plot']}")
