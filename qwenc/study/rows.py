"""What the samples of a sweep come to: one row per arm and length."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from qwenc.model.sparse_plan import make_sparse
from qwenc.study.arms import Arm, baseline
from qwenc.study.stats import Line, Spread, fit_line
from qwenc.study.sweep import Sample, Sweep


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over the repeats, milliseconds and bytes; *_spread: lowest and highest. Shares are of the whole, 0 to 1. prefill_of: the arm
    whose prefill this one shares. ratios: times faster than the baseline arm; kl, same_top, delta_nll: against its predictions.
    None: not known, or nothing to compare with."""

    arm: str
    sparse: bool
    n: int
    repeats: int
    prefill_ms: float | None
    prefill_spread: tuple[float, float] | None
    prefill_tok_s: float | None
    prefill_gemm_share: float | None
    prefill_attn_share: float | None
    prefill_other_share: float | None
    prefill_ratio: float | None
    prefill_of: str | None
    attn_ms: float
    attn_spread: tuple[float, float]
    total_ms: float
    total_spread: tuple[float, float]
    rest_ms: float
    attn_share: float
    tok_s: float
    attn_ratio: float | None
    decode_ratio: float | None
    kv_bytes: int
    rss_bytes: int | None
    kl: float | None
    same_top: float | None
    delta_nll: float | None


def rows_of(sweep: Sweep) -> list[Row]:
    """Rows of every arm and length that has at least one sample, lengths first."""
    arms = sweep.plan.arms
    by_label = {arm.label: arm for arm in arms}
    rows = []
    for n in sweep.plan.lengths:
        for arm in arms:
            samples = _samples(sweep, arm, n)
            if not samples:
                continue
            shared = samples[0].prefill_of
            prefills = _prefills(_samples(sweep, by_label[shared], n) if shared in by_label else samples)
            base = baseline(arm, arms)
            base_samples = _samples(sweep, base, n) if base is not None else []
            rows.append(_row(arm, n, samples, prefills, shared, base_samples))
    return rows


def _samples(sweep: Sweep, arm: Arm, n: int) -> list[Sample]:
    found = (sweep.sample(arm, n, repeat) for repeat in range(sweep.plan.repeats))
    return [sample for sample in found if sample is not None]


def _prefills(samples: Sequence[Sample]) -> list[dict[str, float]]:
    return [sample.prefill for sample in samples if sample.prefill is not None]


def _row(
    arm: Arm, n: int, samples: Sequence[Sample], prefills: Sequence[dict[str, float]], shared: str | None, base: Sequence[Sample]
) -> Row:
    attn = Spread.of([sample.decode["attn_ms"] for sample in samples])
    total = Spread.of([sample.decode["total_ms"] for sample in samples])
    prefill = Spread.of([each["total_ms"] for each in prefills]) if prefills else None
    base_prefill = _median([each["total_ms"] for each in _prefills(base)])
    resident = [sample.decode["rss_bytes"] for sample in samples if sample.decode["rss_bytes"] is not None]
    compared = next((sample for sample in samples if sample.kl is not None), None)

    def share(name: str) -> float | None:
        return statistics.median(each[name] / each["total_ms"] for each in prefills) if prefills else None

    return Row(
        arm=arm.label,
        sparse=arm.sparse,
        n=n,
        repeats=len(samples),
        prefill_ms=prefill.median if prefill else None,
        prefill_spread=(prefill.low, prefill.high) if prefill else None,
        prefill_tok_s=1e3 * n / prefill.median if prefill else None,
        prefill_gemm_share=share("gemm_ms"),
        prefill_attn_share=share("attn_ms"),
        prefill_other_share=share("other_ms"),
        prefill_ratio=base_prefill / prefill.median if prefill and base_prefill else None,
        prefill_of=shared,
        attn_ms=attn.median,
        attn_spread=(attn.low, attn.high),
        total_ms=total.median,
        total_spread=(total.low, total.high),
        rest_ms=statistics.median(sample.decode["total_ms"] - sample.decode["attn_ms"] for sample in samples),
        attn_share=attn.median / total.median,
        tok_s=1e3 / total.median,
        attn_ratio=_ratio(base, "attn_ms", attn.median),
        decode_ratio=_ratio(base, "total_ms", total.median),
        kv_bytes=samples[-1].decode["kv_bytes"],
        rss_bytes=max(resident) if resident else None,
        kl=compared.kl if compared else None,
        same_top=compared.same_top if compared else None,
        delta_nll=compared.delta_nll if compared else None,
    )


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(base: Sequence[Sample], name: str, value: float) -> float | None:
    reference = _median([sample.decode[name] for sample in base])
    return reference / value if reference and value else None


@dataclass(frozen=True, slots=True)
class Curve:
    """Attention of one arm against context length: the points, and the line through those where the arm does what it is for (all of an
    exact arm's; those of a sparse arm beyond its budget of keys, where it leaves keys out)."""

    arm: str
    sparse: bool
    n: tuple[int, ...]
    attn_ms: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    begins: int
    line: Line | None


def curves_of(sweep: Sweep, rows: Sequence[Row]) -> list[Curve]:
    curves = []
    for arm in sweep.plan.arms:
        mine = [row for row in rows if row.arm == arm.label]
        if not mine:
            continue
        begins = sparse_from(arm) if arm.sparse else 0
        beyond = [row for row in mine if row.n > begins]
        curves.append(
            Curve(
                arm=arm.label,
                sparse=arm.sparse,
                n=tuple(row.n for row in mine),
                attn_ms=tuple(row.attn_ms for row in mine),
                low=tuple(row.attn_spread[0] for row in mine),
                high=tuple(row.attn_spread[1] for row in mine),
                begins=begins,
                line=fit_line([row.n for row in beyond], [row.attn_ms for row in beyond]),
            )
        )
    return curves


def sparse_from(arm: Arm) -> int:
    """The context up to which a sparse arm sees every key."""
    settings = arm.settings
    return max(settings.sparse_k * settings.sparse_block, make_sparse(settings, prefill=False).from_keys)
