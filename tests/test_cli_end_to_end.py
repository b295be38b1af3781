"""The whole command on a tiny random checkpoint: real tokenizer, template, engine and kernels (f32 path)."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import write_checkpoint
from tiny_model import PADDED, TOKENS, tokenizer_json, write_tiny_model

from qwenc.commands.dispatch import run_command
from qwenc.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, str(ROOT / "cli.py")]
QUICK = ["--kv", "f32", "-t", "1", "--no-pin"]


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """The tiny model as one packed file: no use of the user's model cache, but of the kernel cache."""
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder / "tiny")
    assert run_command(["convert", str(folder / "tiny"), str(folder / "tiny.qwenc"), "--wmode", "f32", "-q"]) == 0
    return folder / "tiny.qwenc"


@pytest.fixture
def cli(monkeypatch, capfdbinary, packed):
    for name in [name for name in os.environ if name.startswith(("QWENC_", "VLLM_", "NO_COLOR", "FORCE_COLOR")) and name != "QWENC_CACHE"]:
        monkeypatch.delenv(name)

    def call(*args, stdin=b"", command=()):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        code = run_command([*command, "-m", str(packed), *QUICK, *map(str, args)])
        out, err = capfdbinary.readouterr()
        return code, out, err.decode().splitlines()

    return call


def answer(cli, *args) -> dict:
    code, out, _ = cli("--json", "--ignore-eos", *args)
    assert code == 0
    return json.loads(out, parse_constant=pytest.fail)


@pytest.fixture
def whole(cli):
    """60 greedy tokens after "hello"."""
    return answer(cli, "-n", 60, "hello")


def test_stream_json_and_no_stream_agree(cli, whole):
    tokenizer = Tokenizer(tokenizer_json().encode())
    assert len(whole["ids"]) == 60 and whole["finish_reason"] == "length"
    assert whole["text"] == tokenizer.decode(whole["ids"])
    for args in ([], ["--no-stream"]):
        code, out, _ = cli("--ignore-eos", "-n", 60, *args, "hello")
        assert (code, out.decode()) == (0, whole["text"] + "\n")
    assert cli("--ignore-eos", "-n", 60, stdin=b"hello")[1].decode() == whole["text"] + "\n"


SHARE = r"\d+\.\dms\( *\d+\.\d%\)"
PARTS = f"GEMM={SHARE} ATTN={SHARE} OTHER={SHARE}"
LINES = [
    rf"\[PREFILL-TIMING\] n=\d+ total=\d+\.\dms \| {PARTS}",
    rf"\[PREFILL-KERNELS\] QKV={SHARE} O={SHARE} GATEUP={SHARE} DOWN={SHARE}",
    rf"\[DECODE-TIMING\] n=4 total=\d+\.\dms \(\d+\.\d\d ms/tok\) \| {PARTS}",
    r"qwenc: load \S+ s, JIT \S+ s, prefill \d+ tok \(\S+ tok/s\), "
    r"decode 5 tok \(\S+ tok/s over 4 timed\), peak RSS .*, 1 thread, .* \[length\]",
]


def test_timing_lines_have_the_shape_that_scripts_parse(cli):
    err = cli("--ignore-eos", "-n", 5, "--dec-prof", "hello")[2]
    singles = [line for line in err if line.startswith("[DEC-SINGLE]")]
    number = r"\d+\.\d\d"
    names = ("qkv", "attn", "o", "gu", "down", "lm", "nrm", "rope", "kv", "silu", "othloop", "other", "total")
    fields = " ".join(f"{name}={number}" for name in names)
    assert singles and all(re.fullmatch(rf"\[DEC-SINGLE\] seq=\d+ {fields}", line) for line in singles)
    for line, shape in zip(err[-4:], LINES, strict=True):
        assert re.fullmatch(shape, line), line
    assert all(line.isprintable() for line in err)


def test_a_stop_string_cuts_exactly_wherever_it_begins(cli, whole):
    text = whole["text"]
    clean = [start for start in range(1, len(text) - 3) if "\ufffd" not in text[start : start + 3]]
    for start in clean[:: max(1, len(clean) // 4)]:
        stop = text[start : start + 3]
        got = answer(cli, "-n", 60, "--stop", "\x00never", "--stop", stop, "hello")
        assert (got["text"], got["finish_reason"]) == (text[: text.index(stop)], "stop")


def test_a_stop_reached_with_the_last_token_and_one_token_short_of_it(cli, whole):
    tokenizer = Tokenizer(tokenizer_json().encode())
    pieces = [tokenizer.token_bytes(id) for id in whole["ids"]]
    last = next(i for i in range(5, 60) if all(piece.isascii() and piece for piece in pieces[i - 1 : i + 1]))
    before, stop = (b"".join(part).decode("utf-8", "replace") for part in (pieces[: last - 1], pieces[last - 1 : last + 1]))
    assert stop not in before + stop[:-1]
    got = answer(cli, "-n", last + 1, "--stop", stop, "hello")
    assert (got["text"], got["finish_reason"]) == (before, "stop")
    got = answer(cli, "-n", last, "--stop", stop, "hello")  # the held-back beginning is printed after all
    assert (got["text"], got["finish_reason"]) == (before + pieces[last - 1].decode(), "length")


def test_an_end_token_ends_and_is_not_printed(cli, packed, monkeypatch):
    """Whichever token comes third is declared the end."""
    third = answer(cli, "-n", 3, "hello")["ids"][2]
    folder = write_checkpoint(packed.parent / "ends")
    write_tiny_model(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [PADDED - 1, third]}))
    assert run_command(["convert", str(folder), str(folder / "p.qwenc"), "--wmode", "f32", "-q"]) == 0
    code, out, err = cli("-m", folder / "p.qwenc", "-v", "--json", "hello")
    got = json.loads(out)
    assert code == 0 and got["ids"][-1] == third and third not in got["ids"][:-1] and got["finish_reason"] == "stop"
    assert any(f"{third}" in line and "ends at ids" in line for line in err)


def test_seeds_repeat_and_a_hot_run_survives_the_padded_vocabulary(cli):
    first, again, other = (answer(cli, "-n", 40, "--temp", 50, "--seed", seed, "hello") for seed in (1, 1, 2))
    assert first["ids"] == again["ids"] != other["ids"]
    assert max(first["ids"] + other["ids"]) < TOKENS + 6


def test_greedy_by_any_name(cli, whole):
    for args in (["--temp", "1e-9"], ["--temp", 1, "--top-k", 1], ["--temp", 1, "--top-p", 0], ["--temp", 1, "--min-p", 1]):
        assert answer(cli, "-n", 60, *args, "hello")["ids"] == whole["ids"]
    assert answer(cli, "-n", 60, "--repeat-penalty", 5, "hello")["ids"] != whole["ids"]


def test_chat_raw_system_and_thinking_change_the_prompt(cli):
    counts = {
        name: answer(cli, "-n", 0, *args, "hello")["usage"]["prompt_tokens"]
        for name, args in {"raw": ["--raw"], "chat": [], "no think": ["--no-think"], "system": ["-s", "x"]}.items()
    }
    assert counts["raw"] < counts["chat"] < counts["no think"] and counts["chat"] < counts["system"]


def test_context_overflow_is_counted_first(cli):
    length = answer(cli, "-n", 0, "--raw", "hello hello hello")["usage"]["prompt_tokens"]
    for room in (0, 1, 2):
        got = answer(cli, "-c", length + room, "--raw", "hello hello hello")
        assert (got["usage"]["completion_tokens"], got["finish_reason"]) == (room, "length")
    code, out, err = cli("-c", length - 1, "--raw", "hello hello hello")
    assert (code, out, len(err)) == (2, b"", 1) and str(length) in err[0] and str(length - 1) in err[0]


def test_small_batches_change_nothing(cli, whole):
    assert answer(cli, "-n", 60, "--prefill-batch", 3, "hello")["ids"] == whole["ids"]


def test_a_checkpoint_without_tokenizer_is_one_line(cli, tmp_path):
    folder = write_checkpoint(tmp_path / "ids-only")
    assert run_command(["convert", str(folder), str(tmp_path / "p.qwenc"), "--wmode", "f32", "-q"]) == 0
    code, out, err = cli("-m", tmp_path / "p.qwenc", "hello")
    assert (code, out) == (2, b"") and "no tokenizer" in err[-1]


def test_a_model_that_is_not_there_is_one_line(cli):
    code, out, err = cli("-m", "/none/[/x]", "hello")
    assert (code, out, len(err)) == (1, b"", 1) and "/none/[/x]" in err[0]


def process(packed, *args) -> subprocess.Popen:
    return subprocess.Popen([*CLI, "-m", str(packed), *QUICK, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def test_ctrl_c_in_a_real_run(packed):
    running = process(packed, "--ignore-eos", "-n", "3900", "hello")
    first = running.stdout.read(1)
    running.send_signal(signal.SIGINT)
    out, err = running.communicate(timeout=60)
    assert running.returncode == 130 and first and b"Traceback" not in err
    assert err.decode().splitlines()[-1].endswith("[interrupt]") and b"[DECODE-TIMING]" in err
    (first + out).decode()  # whole characters


def test_a_closed_pipe_in_a_real_run(packed):
    running = process(packed, "--ignore-eos", "-n", "3900", "hello")
    running.stdout.read(1)
    running.stdout.close()
    err = running.stderr.read()
    assert running.wait(60) == 0 and b"rror" not in err and b"[DECODE-TIMING]" not in err


def test_a_batch_answers_as_single_runs_do(cli, tmp_path):
    """Real tokenizer, template and engine: prompts, messages, raw text and draws; then the same from a file that is resumed."""
    items = [
        {"id": "chat", "prompt": "hello"},
        {"id": "draw", "prompt": "hello", "temp": 1.5, "seed": 5, "max_tokens": 7},
        {"id": "raw", "prompt": "hello there", "raw": True},
        {"id": "turns", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "hello"}]},
        {"id": "bad", "prompt": "hello", "stop": ""},
    ]
    (tmp_path / "in").write_text("".join(json.dumps(item) + "\n" for item in items))
    wanted = [
        answer(cli, "-n", 9, "hello"),
        answer(cli, "-n", 7, "--temp", 1.5, "--seed", 5, "hello"),
        answer(cli, "-n", 9, "--raw", "hello there"),
        answer(cli, "-n", 9, "-s", "S", "hello"),
    ]
    out = tmp_path / "out"
    for number, extra in enumerate((["--parallel", "1"], ["--resume"], ["--force", "--parallel", "3"])):
        code, _, err = cli(tmp_path / "in", "-o", out, "--ignore-eos", "-n", "9", *extra, command=["batch"])
        assert code == 1 and "1 failed" in err[-1] and ("4 answered before" in err[-1]) == (number == 1)
        found = [json.loads(line) for line in out.read_text().splitlines()]
        assert [record.get("text") for record in found] == [*(run["text"] for run in wanted), None]
        assert [record["usage"] for record in found[:4]] == [run["usage"] for run in wanted]


def test_prompt_cache_of_the_command(cli, tmp_path):
    cold = answer(cli, "-n", 5, "hello")
    for cached in (0, cold["usage"]["prompt_tokens"] - 1):
        again = answer(cli, "-n", 5, "--prompt-cache", tmp_path / "kv", "hello")
        assert again["ids"] == cold["ids"] and again["timings"]["cached_tokens"] == cached
    assert "cached" in cli("-n", 5, "--prompt-cache", tmp_path / "kv", "hello")[2][-1]
