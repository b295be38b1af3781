"""`qwenc quality`: perplexity, divergence from exact attention, and needles."""

from __future__ import annotations

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
from qwenc.commands.study_options import (
    Chosen,
    ListOf,
    model_option,
    numbers_option,
    output_options,
    read_settings,
    setting_options,
    text_option,
)
from qwenc.commands.tables import Column, default_format, flat, number, percent, render, significant
from qwenc.errors import UsageError

METHODS = ("batch", "decode", "all")
EPILOG = """
Examples:
  qwenc quality -m MODEL -f text.txt -c 2048 --chunks 8                      perplexity
  qwenc quality -m MODEL -f text.txt -c 2048,8000 --sparse-attn on           sparse against exact attention
  qwenc quality -m MODEL -f text.txt --wmode f32,q8,q4 --kv f32,q8           the first of each list is the reference
  qwenc quality -m MODEL --needle -c 1024..8192*2 --sparse-attn on --plot needles.png

Methods. decode: the context by exact attention, then --scored tokens decoded under the setting. all: context and decoding both under the
setting. batch: the text in mini-batches under the setting, its second half scored, as perplexity is usually measured. Default: decode and
all if an arm is sparse (decode alone for needles), else batch. KL is KL(reference ‖ arm) in nats, ΔNLL the arm's minus the reference's.
"""


@click.command(cls=Command, epilog=EPILOG, short_help="Measure what settings cost in quality.")
@model_option()
@text_option("Text to score, or to hide needles in. Default: a built-in one, made of stock sentences.")
@numbers_option("-c", "--context", "contexts", least=2, default="2048", show_default=True, help="Tokens of context: a row for each.")
@option("--chunks", type=WholeNumber(1), default=4, show_default=True, metavar="N", help="Pieces of the text for each row.")
@option("--scored", type=WholeNumber(1), default=64, show_default=True, metavar="N", help="Tokens decoded after each context.")
@option("--method", "methods", type=ListOf(click.Choice(METHODS)), metavar="LIST", help="batch, decode, all (see below).")
@option("--reference", type=FileName(), metavar="DIR", help="Keep the reference's logits here, or use those that are there.")
@option("--needle", is_flag=True, help="Hide a fact at every depth of every context and ask for it.")
@option("--depths", type=ListOf(WholeNumber(0)), default="0,25,50,75,100", show_default=True, metavar="LIST", help="Depths in percent.")
@option("--tries", type=WholeNumber(1), default=1, show_default=True, metavar="N", help="Needles for each depth and context.")
@option("--plot", type=FileName(), metavar="PATH", help="Draw the needles as heat maps: .png, .svg or .pdf (extra `plot`).")
@setting_options()
@output_options
@click.pass_context
def quality(ctx: click.Context, **values: Any) -> None:
    """Score a text with a model: perplexity, and how far every setting's predictions are from those of exact attention."""
    chosen = read_settings(values)
    form = default_format(values["output"])
    _check(values)
    reporter = ScreenReporter(values["quiet"], values["verbose"], wants_color(values["color"], sys.stderr))
    study, references = (_needles if values["needle"] else _text)(chosen, values, reporter)
    interrupted = False
    try:
        study.run()
    except KeyboardInterrupt:
        interrupted = True
    finally:
        reporter.close()
        if references is not None:
            references.close()
    (_show_needles if values["needle"] else _show_text)(study, chosen, values, form, reporter)
    if interrupted:
        ctx.exit(INTERRUPTED)


def _check(values: dict[str, Any]) -> None:
    if values["plot"]:
        from qwenc.commands.plots import check_plot

        if not values["needle"]:
            raise UsageError("--plot draws needles: it goes with --needle")
        check_plot(values["plot"])
    if values["needle"] and values["reference"]:
        raise UsageError("--reference has no meaning with --needle, which compares answers")
    if values["needle"] and values["methods"] and (len(values["methods"]) > 1 or values["methods"] == ["batch"]):
        raise UsageError("--needle takes one --method: decode or all")
    if max(values["depths"]) > 100:
        raise UsageError(f"--depths are percentages, not {max(values['depths'])}")


def _source(values: dict[str, Any]) -> dict[str, Any]:
    file = values["file"]
    return {"text": read_prompt(None, None, file) if file else None, "text_name": file or ""}


def _text(chosen: Chosen, values: dict[str, Any], reporter: ScreenReporter) -> tuple[Any, Any]:
    from qwenc.study.quality import Plan, Quality, with_reference
    from qwenc.study.reference import References

    arms = with_reference(chosen.arms())
    methods = values["methods"] or (["decode", "all"] if any(arm.sparse for arm in arms) else ["batch"])
    if methods == ["decode"] and not any(arm.sparse for arm in arms):
        raise UsageError("--method decode compares sparse attention after an exact context, and none is asked for; see --method all")
    plan = Plan(
        arms=arms,
        contexts=sorted(values["contexts"]),
        chunks=values["chunks"],
        scored=values["scored"],
        methods=methods,
        **_source(values),
    )
    references = References(values["reference"])
    return Quality(plan, chosen.open_engine, references, reporter), references


def _needles(chosen: Chosen, values: dict[str, Any], reporter: ScreenReporter) -> tuple[Any, Any]:
    from qwenc.study.needles import Needles, Plan
    from qwenc.study.quality import with_reference

    plan = Plan(
        arms=with_reference(chosen.arms()),
        lengths=sorted(values["contexts"]),
        depths=[depth / 100 for depth in values["depths"]],
        tries=values["tries"],
        method=(values["methods"] or ["decode"])[0],
        **_source(values),
    )
    return Needles(plan, chosen.open_engine, reporter), None


QUALITY_COLUMNS = (
    Column("context", lambda row: f"{row.context:,}"),
    Column("method", lambda row: row.method, left=True),
    Column("arm", lambda row: row.arm, left=True),
    Column("tokens", lambda row: f"{row.tokens:,}"),
    Column("perplexity", lambda row: significant(row.perplexity, 4)),
    Column("KL", lambda row: significant(row.kl)),
    Column("KL 99 %", lambda row: significant(row.kl_p99)),
    Column("same top %", lambda row: percent(row.same_top)),
    Column("ΔNLL", lambda row: f"{row.delta_nll:+.4f} ± {row.delta_nll_error:.4f}"),
    Column("recall", lambda row: number(row.recall, 3)),
    Column("estimated", lambda row: number(row.estimated_recall, 3)),
    Column("oracle", lambda row: number(row.oracle_recall, 3)),
)


def _show_text(study: Any, chosen: Chosen, values: dict[str, Any], form: str, reporter: ScreenReporter) -> None:
    rows = study.rows()
    if not rows:
        return
    settings = {arm.label: arm.key() for arm in study.plan.arms}
    facts = {"model": chosen.model, "text": study.source, "reference": study.plan.arms[0].label}
    records = [{**facts, **settings[row.arm], **asdict(row)} for row in rows]
    columns = [column for column in QUALITY_COLUMNS if any(column.show(row) != "–" for row in rows)]
    reporter.note(f"{study.source}; compared with {study.plan.arms[0].label}")
    write_out(render(form, columns, rows, [flat(record) for record in records] if form == "csv" else records))


def _show_needles(study: Any, chosen: Chosen, values: dict[str, Any], form: str, reporter: ScreenReporter) -> None:
    grids = study.grids()
    if not grids:
        return
    plan = study.plan
    how = "the text read by exact attention" if plan.method == "decode" else "everything under the setting"
    reporter.note(f"{study.source}; {how}; needles found of {plan.tries}; kept: of those that {plan.arms[0].label} finds")
    if form in ("table", "md"):
        write_out("\n".join(_grid_table(grid, plan, form) for grid in grids))
    else:
        settings = {arm.label: arm.key() for arm in plan.arms}
        records = [
            {"model": chosen.model, "text": study.source, "method": plan.method, **settings[grid.arm], "arm": grid.arm}
            | {"context": length, "depth": depth, "found": grid.found[y][x], "tries": plan.tries}
            for grid in grids
            for y, depth in enumerate(plan.depths)
            for x, length in enumerate(plan.lengths)
        ]
        write_out(render(form, (), (), records))
    if values["plot"]:
        from qwenc.commands.plots import plot_needles

        shares = [[[(cell or 0) / plan.tries for cell in row] for row in grid.found] for grid in grids]
        drawn = [(grid.arm, plan.lengths, plan.depths, share) for grid, share in zip(grids, shares, strict=True)]
        plot_needles(drawn, values["plot"], title=f"Needles found: {Path(chosen.model).name}, {how}")
        reporter.note(f"wrote {values['plot']}")


def _grid_table(grid: Any, plan: Any, form: str) -> str:
    """Depth by length. One try: o found, . lost."""

    def cell(value: int | None) -> str:
        if value is None:
            return "–"
        return ("." if value == 0 else "o") if plan.tries == 1 else f"{value}/{plan.tries}"

    lengths = [
        Column(f"{length:,}", lambda row, place=place: cell(row[1][place]))  # type: ignore[misc]
        for place, length in enumerate(plan.lengths)
    ]
    depths = Column("depth", lambda row: f"{row[0]:.0%}")
    rows = list(zip(plan.depths, grid.found, strict=True))
    kept = "" if grid.arm == plan.arms[0].label else f", {grid.kept} of the {grid.exact} that {plan.arms[0].label} finds"
    whole = len(plan.depths) * len(plan.lengths) * plan.tries
    return f"{grid.arm}: {grid.total} of {whole} found{kept}\n\n" + render(form, [depths, *lengths], rows, [])
