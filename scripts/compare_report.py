"""The Markdown of compare_llama_cpp.py, made from its record (what --json writes). `python scripts/compare_report.py RECORD.json`."""

from __future__ import annotations

import json
import platform
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEERS = ("llama", "ik")


def markdown(record: dict[str, Any]) -> str:
    machine, rates = record["machine"], record["stream_gb_s"]
    lines = [
        f"Shape {record['shape']}, random weights: Q4_0 against qwenc `--wmode {record['wmode']}`; {machine['threads']} threads of "
        f"{machine['cpu']}; medians of {record['rounds']} alternating rounds (lowest to highest).",
        f"Memory read by the same threads in the same rounds: {spread(rates)} GB/s.",
        "",
        *depth_table(record),
        "",
        *ratio_table(record),
    ]
    if record["starts"]:
        lines += ["", *start_table(record)]
    disturbed = sum(sample["foreign_cpu"] > 0.05 for sample in record["samples"])
    if disturbed:
        lines += ["", f"{disturbed} of {len(record['samples'])} samples were disturbed: something else used more than 5 % of the CPUs."]
    return "\n".join(lines)


def depth_table(record: dict[str, Any]) -> list[str]:
    lines = [
        f"| depth | engine | KV | prefill {record['prefill']}, tok/s | decode, tok/s | of the memory rate | peak RSS |",
        "|--:|---|---|--:|--:|--:|--:|",
    ]
    for (depth, _, kv), row in groups(record, lambda sample: (sample["depth"], sample["kind"], sample["kv"])).items():
        cells = [spread([sample[field] for sample in row]) for field in ("prefill_tok_s", "decode_tok_s")]
        shares = [sample["decode_tok_s"] * sample["step_bytes"] / 1e9 / sample["stream_gb_s"] for sample in row if sample["step_bytes"]]
        share = f"{100 * statistics.median(shares):.0f} %" if shares else ""
        lines.append(f"| {depth} | {row[0]['engine']} | {kv} | {cells[0]} | {cells[1]} | {share} | {row[0]['peak_rss'] / 1e6:.0f} MB |")
    return lines


def ratio_table(record: dict[str, Any]) -> list[str]:
    """qwenc against the better peer with its better KV type, per depth and for prefill and decode each."""
    lines = ["| depth | qwenc's KV | prefill against the better peer | decode against the better peer |", "|--:|---|--:|--:|"]
    medians: dict[tuple[int, str, str], dict[str, float]] = {}
    for key, row in groups(record, lambda sample: (sample["depth"], sample["kind"], sample["kv"])).items():
        medians[key] = {field: statistics.median(sample[field] for sample in row) for field in ("prefill_tok_s", "decode_tok_s")}
    for (depth, kind, kv), own in medians.items():
        if kind != "qwenc":
            continue
        cells = []
        for field, value in own.items():
            rivals = {f"{k}, {t}": row[field] for (d, k, t), row in medians.items() if d == depth and k in PEERS}
            if rivals:
                best = max(rivals, key=lambda name: rivals[name])
                cells.append(f"×{value / rivals[best]:.2f} ({value:.1f} to {rivals[best]:.1f}: {best})")
            else:
                cells.append("")
        lines.append(f"| {depth} | {kv} | {cells[0]} | {cells[1]} |")
    return lines


def start_table(record: dict[str, Any]) -> list[str]:
    lines = ["| whole process, 16-token prompt | first token, s | peak RSS |", "|---|--:|--:|"]
    for kind, row in groups({"samples": record["starts"]}, lambda sample: sample["kind"]).items():
        peak = statistics.median(sample["peak_rss"] for sample in row)
        lines.append(f"| {kind} | {spread([sample['first_token_s'] for sample in row], 2)} | {peak / 1e6:.0f} MB |")
    return lines


def groups(record: dict[str, Any], key: Callable[[dict[str, Any]], Any]) -> dict[Any, list[dict[str, Any]]]:
    found: dict[Any, list[dict[str, Any]]] = {}
    for sample in record["samples"]:
        found.setdefault(key(sample), []).append(sample)
    return found


def spread(values: list[float], digits: int = 1) -> str:
    """`median (lowest to highest)`."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text())))
