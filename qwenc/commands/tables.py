"""Records as a table for people, Markdown, CSV, JSON or JSON lines."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwenc.commands.screen import is_terminal
from qwenc.plain_json import to_json

FORMATS = ("table", "md", "csv", "json", "jsonl")


@dataclass(frozen=True, slots=True)
class Column:
    """title: of the table; show(record): the cell as text; left: aligned to the left."""

    title: str
    show: Callable[[Any], str]
    left: bool = False


def default_format(chosen: str | None) -> str:
    """`chosen`, else a table on a terminal and Markdown elsewhere."""
    return chosen or ("table" if is_terminal(sys.stdout) else "md")


def render(form: str, columns: Sequence[Column], rows: Sequence[Any], records: Sequence[Mapping[str, Any]], color: bool = False) -> str:
    """Text that ends with a line end. Table and Markdown show `columns` of `rows`; CSV and JSON hold every field of `records`."""
    if form == "table":
        return terminal_table(columns, rows, color)
    if form == "md":
        return markdown(columns, rows)
    if form == "csv":
        return to_csv(records)
    if form == "jsonl":
        return "".join(to_json(dict(record)) for record in records)
    return json.dumps([json.loads(to_json(dict(record))) for record in records], indent=2, ensure_ascii=False) + "\n"


def markdown(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    lines = [[column.title for column in columns], [":--" if column.left else "--:" for column in columns]]
    lines += [[column.show(row).replace("|", "\\|") for column in columns] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_csv(records: Sequence[Mapping[str, Any]]) -> str:
    out = io.StringIO()
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)
    return out.getvalue()


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The record with pairs (lowest, highest) as two fields and objects as name_field: what a CSV can hold."""
    out: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{name}_")
        elif name.endswith("_spread"):
            out[f"{prefix}{name.removesuffix('spread')}low"], out[f"{prefix}{name.removesuffix('spread')}high"] = value or (None, None)
        elif isinstance(value, (list, tuple)):
            out[prefix + name] = " ".join(map(str, value))
        else:
            out[prefix + name] = value
    return out


def terminal_table(columns: Sequence[Column], rows: Sequence[Any], color: bool = False) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    cells = [[column.show(row) for column in columns] for row in rows]
    widths = [max([len(line) for line in column.title.split("\n")] + [len(row[i]) for row in cells]) for i, column in enumerate(columns)]
    for column in columns:
        table.add_column(Text(column.title), justify="left" if column.left else "right", no_wrap=True)
    for row in cells:
        table.add_row(*map(Text, row))
    out = io.StringIO()
    # as wide as the table: a cell that a narrow terminal cuts off says nothing; the terminal wraps or scrolls
    console = Console(file=out, width=sum(widths) + 3 * len(widths) + 2, force_terminal=color, no_color=not color, highlight=False)
    console.print(table)
    return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


# ---- cells ----------------------------------------------------------------------------------------------------------------
NOTHING = "–"


def number(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def significant(value: float | None, digits: int = 3) -> str:
    """Three digits whatever the size: 0.0123, 1.23, 123, 12,300 (no exponent)."""
    if value is None:
        return NOTHING
    if value == 0:
        return "0"
    import math

    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{min(places, 6)}f}"


def percent(value: float | None, digits: int = 1) -> str:
    return NOTHING if value is None else f"{100 * value:.{digits}f}"


def with_spread(value: float | None, spread: tuple[float, float] | None, scale: float = 1.0) -> str:
    """Median and, where repeats differ, how far they lie apart: 1.23 (1.20–1.31)."""
    if value is None:
        return NOTHING
    text = significant(value * scale)
    if spread is None or spread[0] == spread[1]:
        return text
    return f"{text} ({significant(spread[0] * scale)}–{significant(spread[1] * scale)})"
