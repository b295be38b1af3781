#!/usr/bin/env python3
"""Compare qwenc with llama.cpp and ik_llama.cpp on this machine: same shape, random 4-bit weights, same threads, one run.

    pip install '.[bench]'
    python scripts/compare_llama_cpp.py 2b

Each engine, with each type of KV cache, lives in a process of its own, and rounds alternate between them at each depth, so that a noisy
neighbour meets all of them alike; so does the measurement of the rate at which the same threads read memory. Flash attention is on, weights
are repacked.
At every depth (tokens already in the context): single decode steps, then a prefill of 512 tokens. Besides, in fresh processes: the time
to the first token of a 16-token prompt, everything included. A sample during which something else used the CPUs is taken again.

Prints Markdown: medians and their spread, the share of the memory rate that decode reaches (bytes that must be read / time / rate), and
qwenc against the better of its peers; --json keeps every sample. The weights are written to --models-dir on first use. Engines may live
in other Pythons: --llama-python, --ik-python, --qwenc-python, …
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from compare_report import cpu_name, markdown
from random_gguf import SHAPES

HERE = Path(__file__).resolve().parent

PEERS = ("llama", "ik")
EXTRA = ("transformers", "openvino")
KINDS = (*PEERS, "qwenc", *EXTRA)
BITS = {"q4": 4.5, "dual": 4.5, "q8": 8.5}  # that decode reads of a weight
TYPES = ("f16", "q8_0")  # of the peers' KV cache
KV_BYTES = {"f16": 2.0, "q8_0": 34 / 32, "f32": 4.0}  # of one number
STREAM_PASSES = 3


@dataclass
class Entry:
    """One row of the table: an engine with a type of KV cache. options: what its worker is opened with."""

    kind: str
    kv: str
    python: str
    options: dict[str, Any]


class Worker:
    """An engine in a process of its own, spoken to in JSON lines."""

    def __init__(self, kind: str, python: str):
        self.kind = kind
        self.log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (closed with the worker)
        code = f"import compare_workers; compare_workers.serve({kind!r})"
        command = [python, "-c", f"{_paths()}; {code}"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True)

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


def _paths() -> str:
    return f"import sys; sys.path[:0] = [{str(HERE)!r}, {str(HERE.parent)!r}]"


# ---- what is compared -----------------------------------------------------------------------------------------------------
def entries(args: argparse.Namespace) -> list[Entry]:
    """The rows asked for; their weights are written first."""
    args.models_dir.mkdir(parents=True, exist_ok=True)
    capacity = max(args.depths) + max(args.prefill, args.decode + 1) + 16
    common = {"threads": args.threads, "capacity": -(-capacity // 256) * 256, "shape": args.shape}
    found = []
    for kind in (*args.engines, *(extra for extra in EXTRA if getattr(args, extra))):
        python = getattr(args, f"{kind}_python")
        if kind == "qwenc":
            model = str(need_packed(args))
            for kv in args.qwenc_kv:
                for mapped, sparse in itertools.product(
                    (True, False) if args.no_mmap else (True,), (False, True) if args.sparse else (False,)
                ):
                    settings = {"wmode": args.wmode, "kv": kv, "sparse_attn": sparse, "mmap": mapped}
                    label = " ".join([kv, *(["--no-mmap"] if not mapped else []), *(["sparse"] if sparse else [])])
                    found.append(Entry(kind, label, python, {"model": model, "settings": settings, **common}))
        elif kind in PEERS:
            model = str(need_gguf(args))
            wanted = [kv.split(":")[-1] for kv in args.kv if kv.split(":")[0] in (kind, kv)]
            found += [Entry(kind, kv, python, {"model": model, "kv": kv, **common}) for kv in wanted]
        else:
            model = str((args.models_dir / f"{args.shape}-openvino-int4").resolve())
            found.append(Entry(kind, "f32" if kind == "transformers" else "its own", python, {"model": model, **common}))
    return found


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


def step_bytes(shape: str, bits: float, kv_bytes: float | None, depth: int) -> float | None:
    """What one decode step must read; kv_bytes: of one token, all layers."""
    if kv_bytes is None:
        return None
    s = SHAPES[shape]
    attention = s.hidden * s.head_dim * (2 * s.heads + 2 * s.kv_heads)
    weights = s.layers * (attention + 3 * s.hidden * s.ffn) + s.vocab * s.hidden
    return weights * bits / 8 + depth * kv_bytes


# ---- depths ---------------------------------------------------------------------------------------------------------------
def run_rounds(args: argparse.Namespace, rows: list[Entry]) -> tuple[list[dict[str, Any]], list[float]]:
    """(samples in the order taken, stream rates in GB/s). The first round at each depth warms up and is thrown away."""
    workers = [Worker(row.kind, row.python) for row in rows]
    stream = Worker("stream", args.qwenc_python)
    samples: list[dict[str, Any]] = []
    rates: list[float] = []
    try:
        opened = [worker.ask({"open": row.options}) for worker, row in zip(workers, rows, strict=True)]
        for depth in args.depths:  # outside, so that a context is filled once
            for round_ in range(args.rounds + 1):
                rate = stream.ask({"stream": STREAM_PASSES, "threads": args.threads})["rates"]
                rates += rate if round_ else []
                for row, worker, told in zip(rows, workers, opened, strict=True):
                    sample = {"round": round_, "engine": told["name"], "kind": row.kind, "kv": row.kv, "depth": depth}
                    sample |= take(args, worker, depth) | {"stream_gb_s": statistics.median(rate)}
                    kv_bytes = told["kv_bytes"]
                    if kv_bytes is None and row.kv in KV_BYTES:
                        s = SHAPES[args.shape]
                        kv_bytes = 2 * KV_BYTES[row.kv] * s.layers * s.kv_heads * s.head_dim
                    bits = {"transformers": 32.0, "openvino": 4.125}.get(row.kind, BITS[args.wmode] if row.kind == "qwenc" else 4.5)
                    bytes_read = step_bytes(args.shape, bits, kv_bytes, depth)
                    sample["step_bytes"] = None if row.kv.endswith("sparse") else bytes_read
                    tell(sample)
                    samples += [sample] if round_ else []
        for row, worker in zip(rows, workers, strict=True):
            peak = worker.ask({"peak": True})["peak_rss"]
            for sample in samples:
                if (sample["kind"], sample["kv"]) == (row.kind, row.kv):
                    sample["peak_rss"] = peak
    finally:
        for worker in (*workers, stream):
            worker.close()
    return samples, rates


def take(args: argparse.Namespace, worker: Worker, depth: int) -> dict[str, Any]:
    """One sample, taken again (at most --retries times) when something else used more than 5 % of the CPUs meanwhile."""
    for attempt in range(args.retries + 1):
        wait_until_quiet(args.wait_quiet)
        before, own = cpu_times(), own_ticks(worker)
        answer = worker.ask({"depth": depth, "prefill": args.prefill, "decode": args.decode})
        busy, total = (now - then for now, then in zip(cpu_times(), before, strict=True))
        foreign = max(0.0, (busy - (own_ticks(worker) - own)) / max(1, total))
        if foreign <= 0.05 or attempt == args.retries:
            break
    steps = answer["step_s"]
    return {"prefill_tok_s": args.prefill / answer["prefill_s"], "decode_tok_s": 1 / statistics.median(steps), "foreign_cpu": foreign}


def tell(sample: dict[str, Any]) -> None:
    text = f"round {sample['round']} depth {sample['depth']} {sample['engine']} {sample['kv']}: prefill {sample['prefill_tok_s']:.1f}, "
    text += f"decode {sample['decode_tok_s']:.2f} tok/s, memory {sample['stream_gb_s']:.1f} GB/s"
    print(text + (f", others used {sample['foreign_cpu']:.0%}" if sample["foreign_cpu"] > 0.05 else ""), file=sys.stderr, flush=True)


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
    """(busy, all) clock ticks of all CPUs since boot; zeros where the system does not tell."""
    try:
        ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return 0, 0
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # all but idle and iowait


def own_ticks(worker: Worker) -> int:
    """Clock ticks that the worker has used."""
    try:
        fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


# ---- start-up -------------------------------------------------------------------------------------------------------------
def run_starts(args: argparse.Namespace, rows: list[Entry]) -> list[dict[str, Any]]:
    """Whole lives of fresh processes, alternating: seconds until the first token of a 16-token prompt, and peak memory."""
    commands: dict[str, list[str]] = {}
    for row in rows:
        if row.kind in (*PEERS, "qwenc") and row.kind not in commands:
            options = json.dumps({**row.options, "prompt": 16, "capacity": 256})
            code = f"{_paths()}; import compare_workers; compare_workers.first_token({row.kind!r}, {options!r})"
            commands[row.kind] = [row.python, "-c", code]
            if row.kind == "qwenc" and args.tokenizer:
                path = args.models_dir / f"{args.shape}-{args.wmode}-tokenizer.qwenc"
                if not path.exists():
                    make = [row.python, str(HERE / "make_random_packed.py"), args.shape, str(path), "--wmode", args.wmode]
                    subprocess.run([*make, "--tokenizer", str(args.tokenizer)], check=True, stdout=sys.stderr)
                run = ["-q", "--raw", "--ignore-eos", "-n", "8", "-t", str(args.threads), "-m", str(path), PROMPT]
                commands["qwenc command"] = [row.python, str(HERE.parent / "cli.py"), *run]
    found = []
    for round_ in range(args.rounds + 1):
        for kind, command in commands.items():
            wait_until_quiet(args.wait_quiet)
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            assert process.stdout
            first = process.stdout.read(1)
            seconds = time.perf_counter() - began
            process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            if not first or process.returncode:
                raise SystemExit(f"{kind} said nothing (exit {process.returncode}): {' '.join(command)}")
            if round_:
                found.append({"kind": kind, "first_token_s": seconds, "peak_rss": 1024 * usage.ru_maxrss})
    return found


PROMPT = "The quick brown fox jumps over the lazy dog and then runs far away into the"  # 16 tokens of Qwen3's tokenizer


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=tuple(SHAPES))
    parser.add_argument("--engines", nargs="+", choices=(*PEERS, "qwenc"), default=[*PEERS, "qwenc"], help="default: all three")
    parser.add_argument("--transformers", action="store_true", help="transformers in float32, too")
    parser.add_argument("--openvino", action="store_true", help="OpenVINO with int4 weights in groups of 128, too (needs optimum-intel)")
    parser.add_argument("--depths", nargs="+", type=int, default=[0, 512, 2048, 4096], metavar="N", help="default 0 512 2048 4096")
    parser.add_argument("--long", action="store_true", help="depths 8192 and 16384 as well")
    peer_kv = [*TYPES, *(f"{peer}:{kv}" for peer in PEERS for kv in TYPES)]
    parser.add_argument(
        "--kv", nargs="+", choices=peer_kv, default=TYPES, metavar="KV", help="KV types of the peers, or of one: ik:q8_0 (default f16 q8_0)"
    )
    parser.add_argument("--qwenc-kv", nargs="+", default=["q8"], metavar="KV", help="KV types of qwenc (default q8: exact int8)")
    parser.add_argument("--sparse", action="store_true", help="qwenc with sparse attention, too")
    parser.add_argument(
        "--no-mmap", action="store_true", help="qwenc with weights in memory of its own, as the peers' repacked ones are, too"
    )
    parser.add_argument("--wmode", choices=tuple(BITS), default="q4", help="qwenc's weight format (default q4)")
    parser.add_argument("--prefill", type=int, default=512, metavar="N", help="tokens per prefill (default 512)")
    parser.add_argument("--decode", type=int, default=32, metavar="N", help="timed decode steps (default 32)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-start", action="store_true", help="leave out the start-up of whole processes")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="time qwenc's command too, with the tokenizer.json of this folder")
    parser.add_argument("--retries", type=int, default=2, metavar="N", help="how often a disturbed sample is taken again (default 2)")
    parser.add_argument(
        "--wait-quiet", type=float, default=0, metavar="S", help="before each measurement, wait up to S s for an idle machine"
    )
    parser.add_argument("-t", "--threads", type=int, default=2)
    parser.add_argument("--models-dir", type=Path, default=Path("models"))
    for kind in KINDS:
        parser.add_argument(f"--{kind}-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--json", type=Path, metavar="OUT")
    args = parser.parse_args(argv)
    args.depths = sorted({*args.depths, *((8192, 16384) if args.long else ())})
    return args


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    rows = entries(args)
    samples, rates = run_rounds(args, rows)
    starts = [] if args.no_start else run_starts(args, rows)
    machine = {"cpu": cpu_name(), "cpus": os.cpu_count(), "threads": args.threads, "system": platform.platform()}
    record = {"shape": args.shape, "wmode": args.wmode, "prefill": args.prefill, "rounds": args.rounds, "machine": machine}
    record |= {"stream_gb_s": rates, "samples": samples, "starts": starts}
    print(markdown(record))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
