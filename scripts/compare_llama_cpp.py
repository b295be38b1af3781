#!/usr/bin/env python3
"""Compare qwenc with llama.cpp and ik_llama.cpp on this machine: same shape, random 4-bit weights, same threads, one run.

    pip install '.[bench]'
    python scripts/compare_llama_cpp.py 0.6b --depths 0 512

Each engine lives in a process of its own, and rounds alternate between them, so that a noisy neighbour meets all of them alike.
Measured per KV type and depth (tokens already in the context): prefill of 512 tokens, and single decode steps. Besides: the rate at
which the same threads read memory. Flash attention is on. Prints a Markdown table (median, and spread as lowest to highest round);
--json keeps all rounds.

The weights are written to --models-dir on first use. Engines may live in other Pythons: --llama-python, --ik-python, --qwenc-python.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ENGINES = ("llama", "ik", "qwenc")
QWENC_KV = {"f16": "f32", "q8_0": "q8"}


class Worker:
    """An engine in a process of its own, spoken to in JSON lines."""

    def __init__(self, kind: str, python: str, options: dict[str, Any]):
        self.kind = kind
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the worker)
        code = f"import sys; sys.path.insert(0, {str(HERE)!r}); sys.path.insert(1, {str(HERE.parent)!r}); "
        code += f"import compare_workers; compare_workers.serve({kind!r})"
        self.process = subprocess.Popen([python, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)
        self.name = self.ask({"open": options})["name"]

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin and self.process.stdout
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            tail = "".join(self.log.readlines()[-8:])
            raise SystemExit(f"the {self.kind} worker ended (exit {self.process.wait()}):\n{tail}")
        return json.loads(line)

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        self.process.wait()
        self.log.close()


def need_gguf(args: argparse.Namespace) -> Path:
    path = args.models_dir / f"{args.shape}-q4_0.gguf"
    if not path.exists():
        subprocess.run([args.llama_python, str(HERE / "random_gguf.py"), args.shape, str(path)], check=True, stdout=sys.stderr)
    return path


def need_packed(args: argparse.Namespace) -> Path:
    path = args.models_dir / f"{args.shape}-{args.wmode}.qwenc"
    if not path.exists():
        command = [args.qwenc_python, str(HERE / "make_random_packed.py"), args.shape, str(path), "--wmode", args.wmode]
        subprocess.run(command, check=True, stdout=sys.stderr)
    return path


def open_workers(args: argparse.Namespace) -> dict[str, Worker]:
    """Start the engines asked for. One row of the table each; qwenc's KV type is fixed when it loads, so it gets a worker per type."""
    args.models_dir.mkdir(parents=True, exist_ok=True)
    capacity = max(args.depths) + args.prefill + args.decode + 16
    common = {"threads": args.threads, "capacity": -(-capacity // 256) * 256}
    workers = {}
    for kind in args.engines:
        if kind == "qwenc":
            for kv in args.kv:
                settings = {"wmode": args.wmode, "kv": QWENC_KV[kv]}
                options = {"model": str(need_packed(args)), "settings": settings, **common}
                workers[f"qwenc/{kv}"] = Worker(kind, args.qwenc_python, options)
        else:
            python = args.llama_python if kind == "llama" else args.ik_python
            workers[kind] = Worker(kind, python, {"model": str(need_gguf(args)), **common})
    return workers


def run_rounds(args: argparse.Namespace, workers: dict[str, Worker]) -> list[dict[str, Any]]:
    """Every measurement of every round, in the order taken. The first round warms up and is thrown away."""
    samples = []
    for round_ in range(args.rounds + 1):
        for kv in args.kv:
            for depth in args.depths:
                for key, worker in workers.items():
                    if "/" in key and not key.endswith(f"/{kv}"):
                        continue
                    request = {"depth": depth, "kv": kv, "prefill": args.prefill, "decode": args.decode}
                    wait_until_quiet(args.wait_quiet)
                    answer = worker.ask(request)
                    sample = {"round": round_, "engine": worker.name, "kv": QWENC_KV[kv] if worker.kind == "qwenc" else kv, "depth": depth}
                    sample["prefill_tok_s"] = args.prefill / answer["prefill_s"][0]
                    sample["decode_tok_s"] = 1 / statistics.median(answer["step_s"])
                    print(f"round {round_} {sample['engine']} {kv} depth {depth}: prefill {sample['prefill_tok_s']:.1f}, "
                          f"decode {sample['decode_tok_s']:.2f} tok/s", file=sys.stderr, flush=True)  # fmt: skip
                    if round_ > 0:
                        samples.append({**sample, "asked_kv": kv})
    return samples


def wait_until_quiet(limit: float) -> None:
    """Wait, at most `limit` seconds, for a second in which all CPUs together were busy for less than 5 % (Linux)."""
    end = time.monotonic() + limit
    while time.monotonic() < end:
        before = cpu_times()
        time.sleep(1)
        busy, total = (now - then for now, then in zip(cpu_times(), before, strict=True))
        if busy < 0.05 * total:
            return


def cpu_times() -> tuple[int, int]:
    """(busy, all) clock ticks of all CPUs since boot."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # all but idle and iowait


def cell(values: list[float], base: float | None) -> str:
    """`median (lowest to highest) ×ratio`."""
    text = f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
    return text if base is None else f"{text} ×{statistics.median(values) / base:.2f}"


def markdown(args: argparse.Namespace, samples: list[dict[str, Any]], rates: list[float]) -> str:
    """The table. Ratios are against the first engine's median in the same setting."""
    groups: dict[tuple[str, int], dict[tuple[str, str], list[dict[str, Any]]]] = {}
    for sample in samples:
        row = groups.setdefault((sample["asked_kv"], sample["depth"]), {}).setdefault((sample["engine"], sample["kv"]), [])
        row.append(sample)
    lines = [
        f"Shape {args.shape}, random weights: Q4_0 against qwenc `--wmode {args.wmode}`.",
        f"{args.threads} threads of {cpu_name()}, {args.rounds} rounds.",
        f"Memory read by the same threads: median {statistics.median(rates):.1f} GB/s, best {max(rates):.1f}.",
        "",
        f"| depth | KV | engine | prefill {args.prefill}, tok/s | decode, tok/s |",
        "|--:|---|---|--:|--:|",
    ]
    for (_, depth), rows in groups.items():
        base: dict[str, float] = {}
        for (engine, kv), row in rows.items():
            cells = []
            for field in ("prefill_tok_s", "decode_tok_s"):
                values = [sample[field] for sample in row]
                cells.append(cell(values, base.get(field)))
                base.setdefault(field, statistics.median(values))
            lines.append(f"| {depth} | {kv} | {engine} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines)


def cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
        return next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=("0.6b", "2b"))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES), help="default: all three")
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 512], metavar="N")
    parser.add_argument(
        "--kv", nargs="+", choices=tuple(QWENC_KV), default=list(QWENC_KV), help="qwenc answers f16 with f32, q8_0 with its q8"
    )
    parser.add_argument("--wmode", choices=("q4", "q8", "dual"), default="q4", help="qwenc's weight format (default q4)")
    parser.add_argument("--prefill", type=int, default=512, metavar="N", help="tokens per prefill (default 512)")
    parser.add_argument("--decode", type=int, default=32, metavar="N", help="timed decode steps (default 32)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--wait-quiet", type=float, default=0, metavar="S", help="before each measurement, wait up to S s for an idle machine"
    )
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--models-dir", type=Path, default=Path("models"))
    for kind in ENGINES:
        parser.add_argument(f"--{kind}-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="OUT")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    stream = [args.qwenc_python, "-c", f"import sys, json; sys.path.insert(0, {str(HERE)!r}); import stream_rate; "
              f"print(json.dumps(stream_rate.stream_rate({args.threads})))"]  # fmt: skip
    rates = json.loads(subprocess.run(stream, check=True, capture_output=True, text=True).stdout)
    workers = open_workers(args)
    try:
        samples = run_rounds(args, workers)
    finally:
        for worker in workers.values():
            worker.close()
    print(markdown(args, samples, rates))
    if args.json:
        machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "threads": args.threads}
        record = {"shape": args.shape, "wmode": args.wmode, "machine": machine, "stream_gb_s": rates, "samples": samples}
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
