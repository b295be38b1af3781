"""The recipes of the README, run as they stand there, with the scripted engine of tests/fake_engine.py."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_process import environment

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", README, re.M | re.S)
MAKE = re.findall(r"^```make\n(.*?)^```", README, re.M | re.S)


@pytest.fixture
def folder(tmp_path):
    """Where the recipes find their files, and `qwenc` on the PATH."""
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "qwenc"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {ROOT / "tests" / "fake_engine.py"} "$@"\n')
    command.chmod(command.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "notes").mkdir()
    for name in ("a b", "long"):
        (tmp_path / "notes" / f"{name}.txt").write_text(f"text of {name}\n")
    return tmp_path


def run(folder, line, **more):
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", line], cwd=folder, env=environment(PATH=path, QWENC_MODEL="M", **more), capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def block(word):
    (found,) = [text for text in BLOCKS if word in text]
    for tool in ("jq", "xargs", "awk", "make"):
        if tool in found.split() and not shutil.which(tool):
            pytest.skip(f"no {tool} here")
    return found


def test_a_loop_as_a_batch_and_jq_over_the_results(folder):
    out = run(folder, block("jq"))
    assert out.splitlines()[0] == "notes/a b.txt\t<notes/a b.txt>" and out.splitlines()[-1] == "200"
    assert len((folder / "summaries.jsonl").read_text().splitlines()) == 2


def test_xargs(folder):
    run(folder, block("xargs"))
    assert (folder / "notes" / "a b.txt.out").read_text() == "Hello wörld\n"


def test_a_sweep_over_timing_lines(folder):
    out = run(folder, block("PREFILL-TIMING"))
    assert re.fullmatch(r"64: \d+\.\d tok/s\n128: \d+\.\d tok/s\n256: \d+\.\d tok/s\n", out)


@pytest.mark.skipif(not shutil.which("make"), reason="no make here")
def test_a_rule_for_make(folder):
    (folder / "Makefile").write_text(MAKE[0])
    (folder / "q.jsonl").write_text('{"prompt": "a"}\n')
    run(folder, "make q.answers.jsonl")
    with open(folder / "q.jsonl", "a") as file:
        file.write('{"prompt": "b"}\n')
    os.utime(folder / "q.answers.jsonl", (1, 1))
    run(folder, "make q.answers.jsonl")
    found = [json.loads(line)["text"] for line in (folder / "q.answers.jsonl").read_text().splitlines()]
    assert found == ["<a>", "<b>"]


def test_every_block_is_tested():
    assert len(BLOCKS) == 3 and len(MAKE) == 1
