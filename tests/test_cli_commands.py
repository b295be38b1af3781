"""`qwenc info`, `qwenc convert` and `qwenc env`, in process on a tiny checkpoint."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import LLAMA, MOE, write_checkpoint
from tiny_model import TOKENS, write_tiny_model

from qwenc.commands.dispatch import run_command

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("tiny [x] [red] :smile:"))


@pytest.fixture
def cli(monkeypatch, capfdbinary, tmp_path):
    for name in [name for name in os.environ if name.startswith(("QWENC_", "NO_COLOR", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QWENC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    def call(*args):
        code = run_command([str(arg) for arg in args])
        out, err = capfdbinary.readouterr()
        assert b"\x1b" not in out + err
        return code, out.decode(), err.decode().splitlines()

    return call


def test_info_of_a_folder(cli, tiny):
    code, out, err = cli("info", tiny, "--json")
    record = json.loads(out, parse_constant=pytest.fail)
    assert (code, err) == (0, [])
    expected = {
        **{"model": str(tiny), "packed": None, "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 10, "vocab_size": 640},
        **{"tokenizer_size": TOKENS + 6, "eos_ids": [TOKENS, TOKENS + 2], "chat_template": True, "thinking_switch": True, "context": 4096},
        **{"kv_bytes_per_token": {"q8": 160, "k8v4": 152, "q4": 124, "f32": 512}, "moe": None, "vision_skipped": False},
    }
    assert {name: record[name] for name in expected} == expected
    assert cli("info", "-m", tiny, "--json")[1] == out
    assert record["rope"]["theta"] == 1e6 and record["rope"]["rope_type"] == "default"
    assert cli("info", tiny, "-m", tiny, "--json")[0] == 0
    code, out, err = cli("info", tiny, "-m", "other")
    assert (code, out) == (2, "") and "name one model" in err[-1]


def test_info_for_people(cli, tiny):
    code, out, err = cli("info", tiny)
    assert (code, err) == (0, [])
    lines = dict(line.split(":", 1) for line in out.splitlines())
    assert str(tiny) in out  # brackets and colons whole
    assert lines["KV per token"].strip().startswith("q8 160 bytes (655 kB for the whole context)")
    assert lines["eos ids"].strip() == f"{TOKENS}, {TOKENS + 2}"
    assert lines["chat template"].strip() == "yes, with a thinking switch"
    assert lines["vocabulary"].strip() == f"640, tied head, tokenizer knows {TOKENS + 6}"


@pytest.mark.parametrize("config", [MOE, LLAMA], ids=["moe", "llama"])
def test_info_without_a_tokenizer(cli, tmp_path, config):
    folder = write_checkpoint(tmp_path / "model", config)
    record = json.loads(cli("info", folder, "--json")[1])
    assert record["tokenizer_size"] is None and record["chat_template"] is False and record["eos_ids"] == []
    assert (record["moe"] or {}).get("num_experts") == config.get("num_experts")
    code, out, _ = cli("info", folder)
    assert code == 0 and "no tokenizer" in out and ("4 experts" in out) == ("num_experts" in config)


def test_kv_bytes_of_the_usual_shape(cli, tmp_path):
    config = LLAMA | {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 1}
    folder = write_checkpoint(tmp_path / "model", config)
    assert json.loads(cli("info", folder, "--json")[1])["kv_bytes_per_token"]["q8"] == 2112


def test_info_takes_the_model_from_the_environment(cli, tiny, monkeypatch):
    monkeypatch.setenv("QWENC_MODEL", str(tiny))
    code, out, err = cli("info", "--json")
    assert (code, json.loads(out)["model"], err) == (0, str(tiny), [])


def test_convert_then_info(cli, tiny, tmp_path):
    out_path = tmp_path / "out [x] [red].qwenc"
    code, out, err = cli("convert", tiny, out_path, "--wmode", "q4")
    assert (code, out) == (0, "") and err[-1].startswith(f"qwenc: wrote {out_path}: ")
    record = json.loads(cli("info", out_path, "--json")[1])
    assert record["packed"] == "q4" and record["file_bytes"] == out_path.stat().st_size
    assert record["tokenizer_size"] == TOKENS + 6 and record["chat_template"] is True
    assert "packed file, q4" in cli("info", out_path)[1]

    code, _, err = cli("convert", tiny, out_path)
    assert code == 2 and err == [f"qwenc: error: {out_path} exists; --force replaces it"]
    assert cli("convert", tiny, out_path, "--force", "-q", "--wmode", "q8") == (0, "", [])
    assert json.loads(cli("info", out_path, "--json")[1])["packed"] == "q8"
    code, _, err = cli("convert", out_path, tmp_path / "again.qwenc")
    assert code == 1 and len(err) == 1 and "is a file" in err[0]


@pytest.mark.parametrize("command", ["info", "convert"])
@pytest.mark.parametrize("model", ["/none/[/x] [red]:smile:", "", ".", "no such", "nobody/nothing"])
def test_a_model_that_is_not_there_is_one_line(cli, tmp_path, monkeypatch, command, model):
    monkeypatch.chdir(tmp_path)
    code, out, err = cli(command, model, *(["out.qwenc"] if command == "convert" else []))
    assert code in (1, 2) and out == "" and len(err) == 1 and err[0].startswith("qwenc: error: ")
    assert model in err[0] and not (tmp_path / "out.qwenc").exists()


def test_a_packed_file_runs_in_its_own_mode_by_default(cli, tiny, tmp_path):
    path = tmp_path / "q4.qwenc"
    cli("convert", tiny, path, "--wmode", "q4", "-q")
    for model, args, wmode in ((path, [], "q4"), (tiny, [], "dual"), (tiny, ["--wmode", "f32"], "f32")):
        code, out, _ = cli("-m", model, *args, "-q", "--json", "-n", 1, "hi")
        assert code == 0 and json.loads(out)["settings"]["wmode"] == wmode
    code, _, err = cli("-m", path, "--wmode", "q8", "-q", "hi")
    assert code == 1 and "holds q4 weights" in err[0]


def test_convert_to_a_full_or_forbidden_place_is_one_line(cli, tiny, tmp_path):
    code, _, err = cli("convert", tiny, tmp_path / "none" / "out.qwenc", "-q")
    assert code == 1 and len(err) == 1
    code, _, err = cli("convert", tiny, tmp_path, "-q")
    assert code == 2 and len(err) == 1


def test_convert_never_replaces_what_is_no_file_or_its_own_source(cli, tiny, tmp_path):
    def refused(folder, out, words):
        before = folder.stat().st_ino, sorted(os.listdir(folder)), out.lstat()[:3]
        code, stdout, err = cli("convert", folder, out, "--force", "-q")
        assert (code, stdout, len(err)) == (2, "", 1) and words in err[0], err
        assert (folder.stat().st_ino, sorted(os.listdir(folder)), out.lstat()[:3]) == before

    folder = write_tiny_model(tmp_path / "m")
    weights = folder / "model.safetensors"
    os.mkfifo(tmp_path / "fifo")
    for name, target in (("loop", "loop"), ("null", os.devnull)):
        (tmp_path / name).symlink_to(target)
    for name in ("fifo", "loop", "null"):
        refused(folder, tmp_path / name, "is not a regular file")
    content = weights.read_bytes()
    (tmp_path / "link").symlink_to(weights)
    os.link(folder / "config.json", tmp_path / "hard")
    for out in (weights, tmp_path / "link", tmp_path / "hard", folder / "tokenizer.json"):
        refused(folder, out, "belongs to the checkpoint")
    assert weights.read_bytes() == content
    assert cli("convert", folder, folder / "packed.qwenc", "-q")[0] == 0  # beside its source is fine, and so is to replace it
    assert cli("convert", folder, folder / "packed.qwenc", "-q", "--force")[0] == 0


@pytest.mark.parametrize("exists", [True, False])
def test_convert_writes_through_a_symbolic_link(cli, tiny, tmp_path, exists):
    (tmp_path / "real").mkdir()
    target, link = tmp_path / "real" / "target.qwenc", tmp_path / "link.qwenc"
    link.symlink_to(target)
    if exists:
        target.write_bytes(b"old")
        assert cli("convert", tiny, link, "-q")[0] == 2 and target.read_bytes() == b"old"
    assert cli("convert", tiny, link, "-q", *(["--force"] if exists else [])) == (0, "", [])
    assert link.is_symlink() and json.loads(cli("info", link, "--json")[1])["packed"] == "dual"
    assert os.listdir(tmp_path / "real") == ["target.qwenc"]


@pytest.mark.parametrize("args", [["info"], ["convert"], ["run", "-p", "hi", "-m"]])
def test_pipes_and_folders_where_files_belong_are_named(cli, tmp_path, args):
    """None of them may be opened: that waits for a writer for ever."""
    out = [tmp_path / "out.qwenc"] if args == ["convert"] else []
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    broken = {}
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        for kind, make in (("pipe", os.mkfifo), ("folder", os.mkdir)):
            folder = write_tiny_model(tmp_path / f"{kind}-{name}")
            (folder / name).unlink()
            make(folder / name)
            broken[folder] = folder / name
    signal.alarm(60)
    code, _, err = cli(*args, pipe, *out)
    assert code == 1 and err == [f"qwenc: error: {pipe}: is neither a file nor a folder"]
    for folder, path in broken.items():
        if args != ["info"] or path.name != "model.safetensors":  # which info does not read
            code, _, err = cli(*args, folder, *out)
            assert code == 1 and len(err) == 1 and str(path) in err[0] and "not a file" in err[0], err
    signal.alarm(0)


@pytest.mark.parametrize(("wmode", "runs"), [("q4", ["q4"]), ("f32", ["f32"]), ("dual", ["dual", "q4", "q8"])])
def test_info_of_a_packed_file_shows_the_modes_that_it_can_run_in(cli, tiny, tmp_path, wmode, runs):
    cli("convert", tiny, tmp_path / "x.qwenc", "--wmode", wmode, "-q")
    assert list(json.loads(cli("info", tmp_path / "x.qwenc", "--json")[1])["packed_bytes"]) == runs
    shown = cli("info", tmp_path / "x.qwenc")[1].split("packed size:")[1].splitlines()[0]
    assert [part.split()[0] for part in shown.split(",")] == runs


def test_convert_of_a_file_that_is_not_packed(cli, tiny, tmp_path):
    code, _, err = cli("convert", tiny / "model.safetensors", tmp_path / "out.qwenc")
    assert code == 1 and err == [f"qwenc: error: {tiny / 'model.safetensors'}: is a file; convert takes a checkpoint folder or a Hub id"]


def test_env(cli):
    code, out, err = cli("env")
    assert (code, err) == (0, [])
    for name in ("qwenc:", "python:", "numba:", "llvmlite:", "numpy:", "model cache:", "kernel cache:"):
        assert f"\n{name}" in f"\n{out}"
    record = json.loads(cli("env", "--json")[1], parse_constant=pytest.fail)
    assert record["numba"] and record["model_cache"].endswith("cache")
    assert len(record["cores"]) == record["threads"] and set(record["cores"]) <= set(record["usable_cores"])
    assert set(record["fast_cores"]) <= set(record["usable_cores"])
    assert record["fast_cores_told_by"] in (None, "cpu_capacity", "cpuinfo_max_freq", "/proc/cpuinfo")


def test_env_without_home_or_a_writable_cache(tmp_path):
    variables = {**os.environ, "HOME": "/nonexistent", "XDG_CACHE_HOME": "/dev/null/x", "QWENC_CACHE": "", "NUMBA_CACHE_DIR": ""}
    done = subprocess.run(
        [sys.executable, str(ROOT / "cli.py"), "env", "--json"], env=variables, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr
    assert json.loads(done.stdout)["kernel_cache"] is None
