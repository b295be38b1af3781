"""Charts of plain characters, for a terminal without pictures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from qwenc.commands.tables import significant
from qwenc.study.rows import Curve

WIDTH, HEIGHT = 64, 16
MARKS = "ox+*#@%&"


def attention_chart(curves: Sequence[Curve], log: bool = False, width: int = WIDTH, height: int = HEIGHT) -> str:
    """Attention ms per token against n: a mark per measurement, dots along the fitted lines, and what the lines say. Nothing but ASCII in
    the plot, so that every terminal shows it."""
    drawn = [curve for curve in curves if any(value > 0 for value in curve.attn_ms)]
    if not drawn:
        return "no measurements to draw\n"
    x_of = _scale([n for curve in drawn for n in curve.n], width, log)
    y_of = _scale([value for curve in drawn for value in curve.high if value > 0], height, log)
    field = [[" "] * width for _ in range(height)]

    def put(x: float, y: float, mark: str, over: bool) -> None:
        column, row = x_of.place(x), y_of.place(y)
        if column is not None and row is not None and (over or field[height - 1 - row][column] == " "):
            field[height - 1 - row][column] = mark

    for curve in drawn:
        if curve.line is not None:
            for column in range(width):
                x = x_of.value(column)
                if curve.begins < x <= curve.n[-1] and x >= curve.n[0]:
                    put(x, curve.line.at(x), ".", over=False)
    for place, curve in enumerate(drawn):
        for x, y in zip(curve.n, curve.attn_ms, strict=True):
            put(x, y, MARKS[place % len(MARKS)], over=True)
    return _framed(field, x_of, y_of, drawn)


class _scale:
    """Maps numbers to `cells` cells, from zero or, with log, from the smallest."""

    def __init__(self, values: Sequence[float], cells: int, log: bool):
        self.cells = cells
        self.to: Callable[[float], float] = math.log if log else float
        self.back: Callable[[float], float] = math.exp if log else float
        self.low = self.to(min(values)) if log else 0.0
        self.high = self.to(max(values))
        if self.high <= self.low:
            self.low, self.high = (self.low - 1, self.high + 1) if log else (0.0, max(self.high, 1.0))

    def place(self, value: float) -> int | None:
        if self.to is math.log and value <= 0:
            return None
        cell = round((self.to(value) - self.low) / (self.high - self.low) * (self.cells - 1))
        return cell if 0 <= cell < self.cells else None

    def value(self, cell: float) -> float:
        return self.back(self.low + cell / (self.cells - 1) * (self.high - self.low))


def _framed(field: list[list[str]], x_of: _scale, y_of: _scale, curves: Sequence[Curve]) -> str:
    height, width = len(field), len(field[0])
    every = 5
    labels = [significant(y_of.value(height - 1 - row)) if (height - 1 - row) % every == 0 else "" for row in range(height)]
    margin = max(map(len, labels))
    lines = ["attention, ms per token"]
    lines += [f"{label:>{margin}} |{''.join(row)}".rstrip() for label, row in zip(labels, field, strict=True)]
    lines.append(f"{'':>{margin}} +{'-' * width}")
    lines.append(f"{'':>{margin}}  {_ticks(x_of, width)}".rstrip())
    lines.append(f"{'':>{margin}}  {'n, tokens of context':^{width}}".rstrip())
    lines += [f"  {MARKS[place % len(MARKS)]} {curve.arm}{describe(curve)}" for place, curve in enumerate(curves)]
    return "\n".join(lines) + "\n"


def _ticks(x_of: _scale, width: int) -> str:
    line = [" "] * width
    for cell in (0, width // 3, 2 * width // 3, width - 1):
        label = f"{x_of.value(cell):,.0f}"
        start = min(max(0, cell - len(label) // 2), width - len(label))
        line[start : start + len(label)] = label
    return "".join(line)


def describe(curve: Curve) -> str:
    """What the fitted line says, for a legend."""
    if curve.line is None:
        return ""
    rise = 1e3 * curve.line.slope
    sign = "+" if rise >= 0 else "−"
    beyond = f" beyond n = {curve.begins:,}" if curve.begins else ""
    return f": {significant(curve.line.level)} ms {sign} {significant(abs(rise))} ms per 1,000 tokens{beyond}"
