"""The columns of a sweep, and its two tables in the reference's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qwenc.commands.outcome import show_bytes
from qwenc.commands.tables import NOTHING, Column, number, percent, render, significant, with_spread
from qwenc.study.rows import Row

PLACE = (Column("n", lambda row: f"{row.n:,}"), Column("arm", lambda row: row.arm, left=True))
PREFILL_COLUMNS = (
    Column("prefill s", lambda row: ("= " if row.prefill_of else "") + with_spread(row.prefill_ms, row.prefill_spread, 1e-3)),
    Column("tok/s", lambda row: number(row.prefill_tok_s, 0)),
    Column("GEMM %", lambda row: percent(row.prefill_gemm_share)),
    Column("ATTN %", lambda row: percent(row.prefill_attn_share)),
    Column("OTHER %", lambda row: percent(row.prefill_other_share)),
    Column("× exact", lambda row: number(row.prefill_ratio, 2)),
)
DECODE_COLUMNS = (
    Column("attn ms/tok", lambda row: with_spread(row.attn_ms, row.attn_spread)),
    Column("total ms/tok", lambda row: with_spread(row.total_ms, row.total_spread)),
    Column("total − attn", lambda row: significant(row.rest_ms)),
    Column("attn %", lambda row: percent(row.attn_share)),
    Column("tok/s", lambda row: number(row.tok_s)),
    Column("× exact", lambda row: number(row.decode_ratio, 2)),
    Column("KV", lambda row: show_bytes(row.kv_bytes)),
    Column("RSS", lambda row: NOTHING if row.rss_bytes is None else show_bytes(row.rss_bytes)),
    Column("KL", lambda row: NOTHING if row.kl is None else f"{row.kl:.4f}"),
    Column("same top %", lambda row: percent(row.same_top)),
)

# Published for Qwen3-VL-2B on an RK3588 with 4 threads: n → (exact, sparse).
RK3588_PREFILL_S = {506: (13.09, 13.65), 2046: (51.84, 51.50), 4059: (148.50, 106.11)}
RK3588_SHARES = {506: ((87.8, 9.0), (85.8, 11.1)), 2046: ((61.2, 35.9), (61.8, 34.9)), 4059: ((39.1, 58.9), (54.3, 42.6))}
RK3588_ATTN_MS = {506: (9.7, 13.4), 2046: (48.9, 39.1), 4059: (110.7, 55.4)}
RK3588_TOTAL_MS = {506: (52.5, 56.6), 2046: (92.3, 82.3), 4059: (155.2, 100.0)}


def tables(rows: Sequence[Row], form: str) -> list[str]:
    """The rows for people: prefill, then decode, memory and quality. Columns that say nothing are left away."""
    parts = []
    for columns in (PREFILL_COLUMNS, DECODE_COLUMNS):
        telling = [column for column in columns if any(column.show(row) != NOTHING for row in rows)]
        parts.append(render(form, [*PLACE, *telling], rows, []))
    return parts


def legend(study: Any) -> str:
    """What the table's numbers are, in one line."""
    from qwenc.study.arms import always_exact

    plan = study.plan
    short = {arm.label: [f"{n:,}" for n in plan.lengths if always_exact(arm.settings, n + plan.decode)] for arm in plan.arms}
    same = "".join(f"; too short for a choice, so {label} decoded exactly: {', '.join(at)}" for label, at in short.items() if at)
    repeats = "one measurement" if plan.repeats == 1 else f"medians of {plan.repeats} (lowest–highest)"
    return (
        f"{study.source}; {repeats}; decode: medians over {plan.decode} tokens after n; × exact: times faster than the first exact arm of "
        f"the same weights and threads, KL and same top against it; = is the prefill of an arm above{same}"
    )


def reference_tables(study: Any, rows: Sequence[Row], form: str) -> list[str]:
    """Tables A and B of each sparse arm beside its exact one and the RK3588's figures."""
    from qwenc.study.arms import baseline

    found = {(row.arm, row.n): row for row in rows}
    out = []
    for arm in study.plan.arms:
        base = baseline(arm, study.plan.arms)
        if not arm.sparse or base is None:
            continue
        pairs = [(found[base.label, n], found[arm.label, n]) for n in study.plan.lengths if {(base.label, n), (arm.label, n)} <= set(found)]
        if pairs:
            out.append(f"Table A, prefill: {base.label} → {arm.label}\n\n" + render(form, TABLE_A, pairs, []))
            out.append(f"Table B, decode per token: {base.label} → {arm.label}\n\n" + render(form, TABLE_B, pairs, []))
    return out


def _change(before: float | None, after: float | None) -> str:
    return NOTHING if not before or after is None else f"{100 * (after / before - 1):+.1f} %"


def _shares(row: Row) -> str:
    return " / ".join(percent(value) for value in (row.prefill_gemm_share, row.prefill_attn_share, row.prefill_other_share))


def _published(table: dict[int, tuple[float, float]], digits: int) -> Any:
    def show(pair: tuple[Row, Row]) -> str:
        values = table.get(pair[0].n)
        return NOTHING if values is None else f"{values[0]:.{digits}f} → {values[1]:.{digits}f}"

    return show


def _published_change(pair: tuple[Row, Row]) -> str:
    return _change(*RK3588_PREFILL_S.get(pair[0].n, (None, None)))


def _published_shares(pair: tuple[Row, Row]) -> str:
    found = RK3588_SHARES.get(pair[0].n)
    return NOTHING if found is None else " → ".join(f"{gemm} / {attn}" for gemm, attn in found)


def _seconds(value: float | None) -> str:
    return significant(None if value is None else value / 1e3)


TABLE_A = (
    Column("n", lambda pair: f"{pair[0].n:,}"),
    Column("exact s", lambda pair: _seconds(pair[0].prefill_ms)),
    Column("sparse s", lambda pair: _seconds(pair[1].prefill_ms)),
    Column("change", lambda pair: _change(pair[0].prefill_ms, pair[1].prefill_ms)),
    Column("exact GEMM / ATTN / OTHER %", lambda pair: _shares(pair[0])),
    Column("sparse GEMM / ATTN / OTHER %", lambda pair: _shares(pair[1])),
    Column("RK3588 s", _published(RK3588_PREFILL_S, 2)),
    Column("RK3588 change", _published_change),
    Column("RK3588 GEMM / ATTN %", _published_shares),
)
TABLE_B = (
    Column("n", lambda pair: f"{pair[0].n:,}"),
    Column("attn exact ms", lambda pair: significant(pair[0].attn_ms)),
    Column("attn sparse ms", lambda pair: significant(pair[1].attn_ms)),
    Column("total exact ms", lambda pair: significant(pair[0].total_ms)),
    Column("total sparse ms", lambda pair: significant(pair[1].total_ms)),
    Column("change", lambda pair: _change(pair[0].total_ms, pair[1].total_ms)),
    Column("total − attn exact", lambda pair: significant(pair[0].rest_ms)),
    Column("total − attn sparse", lambda pair: significant(pair[1].rest_ms)),
    Column("RK3588 attn ms", _published(RK3588_ATTN_MS, 1)),
    Column("RK3588 total ms", _published(RK3588_TOTAL_MS, 1)),
)
