"""Pictures by matplotlib (extra `plot`), in colours that colour-blind readers can tell apart, and with a marker for each curve."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwenc.commands.charts import describe
from qwenc.errors import QwencError, UsageError
from qwenc.study.rows import Curve

FORMATS = (".png", ".svg", ".pdf")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#F0E442")  # Okabe and Ito
MARKERS = "osD^vPX*"


def check_plot(path: str) -> None:
    """Whether a picture can be drawn, before anything is measured for it. Raises UsageError or QwencError."""
    if Path(path).suffix.lower() not in FORMATS:
        raise UsageError(f"--plot writes {', '.join(FORMATS)}, not {path!r}")
    parent = Path(path).parent
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise UsageError(f"--plot cannot write into {str(parent)!r}")
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise QwencError("--plot needs matplotlib: pip install 'qwenc[plot]'; --chart draws in the terminal without it")


def plot_attention(curves: Sequence[Curve], path: str, *, log: bool, title: str) -> None:
    """Attention ms per token against n: points with their spread, fitted lines."""
    figure, ((axes,),) = _figure(9.0, 5.4 + 0.22 * len(curves))
    for place, curve in enumerate(curves):
        colour, marker = COLOURS[place % len(COLOURS)], MARKERS[place % len(MARKERS)]
        spread = [
            [value - low for value, low in zip(curve.attn_ms, curve.low, strict=True)],
            [high - value for value, high in zip(curve.attn_ms, curve.high, strict=True)],
        ]
        axes.errorbar(
            curve.n,
            curve.attn_ms,
            spread,
            color=colour,
            marker=marker,
            markersize=6,
            markerfacecolor="none" if curve.sparse else colour,  # so that a point under another shows
            linestyle="none",
            capsize=3,
            label=_legend(curve),
        )
        if curve.line is not None:
            first = max(curve.begins, curve.n[0])
            points = [first + (curve.n[-1] - first) * i / 100 for i in range(101)]
            axes.plot(points, [curve.line.at(x) for x in points], color=colour, linewidth=1.4, linestyle="--" if curve.sparse else "-")
    if log:
        from matplotlib import ticker

        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        ticks = _apart(sorted({n for curve in curves for n in curve.n}))
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.xaxis.set_minor_locator(ticker.NullLocator())
        axes.yaxis.set_major_locator(ticker.LogLocator(base=10, subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(lambda value, _place: f"{value:g}")
        axes.yaxis.set_minor_locator(ticker.NullLocator())
    else:
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(lambda value, _place: f"{value:,.0f}")
    axes.set_xlabel("n, tokens of context")
    axes.set_ylabel("attention, ms per decoded token")
    axes.set_title(title)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=1, frameon=False)
    _save(figure, path)


def plot_needles(grids: Sequence[Any], path: str, *, title: str) -> None:
    """Heat maps side by side: share of needles found, by depth and length. grids: (label, lengths, depths, found [depth][length])."""
    columns = min(len(grids), 3)
    lines = -(-len(grids) // columns)
    width = max(3.2, 0.75 * max(len(lengths) for _, lengths, _, _ in grids) + 1.2)
    figure, axes = _figure(columns * width + 1.0, 1.4 + lines * (1.5 + 0.42 * len(grids[0][2])), lines, columns)
    image = None
    for place, (label, lengths, depths, found) in enumerate(grids):
        panel = axes[place // columns][place % columns]
        image = panel.imshow(found, vmin=0, vmax=1, cmap="cividis", aspect="auto")
        panel.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths], rotation=45 if len(lengths) > 4 else 0)
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        panel.set_title(label)
        panel.set_xlabel("tokens of context")
        panel.set_ylabel("depth of the needle")
        for y, row in enumerate(found):
            for x, value in enumerate(row):
                panel.text(x, y, f"{value:.0%}", ha="center", va="center", color="white" if value < 0.5 else "black")
    for place in range(len(grids), lines * columns):
        axes[place // columns][place % columns].set_axis_off()
    figure.suptitle(title)
    if image is not None:
        figure.colorbar(image, ax=axes.ravel().tolist(), label="found", shrink=0.8)
    _save(figure, path)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, Any]:
    """A figure that needs no display and touches no global state of matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, columns, squeeze=False)


def _legend(curve: Curve) -> str:
    return curve.arm + describe(curve)


def _apart(lengths: Sequence[int]) -> list[int]:
    """Those lengths, the longest among them, whose labels do not touch on a logarithmic axis."""
    kept: list[int] = []
    for n in reversed(lengths):
        if not kept or 1.35 * n <= kept[-1]:
            kept.append(n)
    return kept[::-1]


def _save(figure: Any, path: str) -> None:
    """The picture appears when it is complete."""
    part = Path(path).with_name(f".{Path(path).name}.{os.getpid()}.part")
    try:
        figure.savefig(part, format=Path(path).suffix[1:].lower(), dpi=150)
        os.replace(part, path)
    except OSError as error:
        raise QwencError(f"cannot write {path}: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
