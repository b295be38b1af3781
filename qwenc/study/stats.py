"""Medians, spreads, and the two lines through a sweep: exact attention grows with n, sparse attention nearly stands still."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, lowest and highest of some repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Line:
    """y = level + slope·x, by least squares over the points given."""

    level: float
    slope: float

    def at(self, x: float) -> float:
        return self.level + self.slope * x


def fit_line(x: Sequence[float], y: Sequence[float]) -> Line | None:
    """None for fewer than two different x."""
    if len(set(x)) < 2:
        return None
    slope, level = np.polyfit(np.asarray(x, np.float64), np.asarray(y, np.float64), 1)
    return Line(float(level), float(slope))


def crossing(a: Line, b: Line) -> float | None:
    """The x beyond which `b` stays below `a`; None if it never does."""
    if b.slope >= a.slope:
        return None
    return max(0.0, (b.level - a.level) / (a.slope - b.slope))
