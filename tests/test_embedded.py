"""The model that comes with qwenc: it is found, it is in the wheel, and through the real command it says what it said before."""

import configparser
import fnmatch
import io
import json
import os
import sys
from pathlib import Path

import pytest

from qwenc.checkpoint.locate import find
from qwenc.commands.dispatch import run_command
from qwenc.resources import EMBEDDED, EMBEDDED_NAME

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = json.loads((ROOT / "tests/data/embedded_goldens.json").read_text(encoding="utf-8"))
MOST_BYTES = 5_000_000


@pytest.fixture
def cli(monkeypatch, capfdbinary):
    for name in [name for name in os.environ if name.startswith(("QWENC_", "VLLM_")) and name != "QWENC_CACHE"]:
        monkeypatch.delenv(name)

    def call(*args, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        code = run_command([*map(str, args)])
        out, err = capfdbinary.readouterr()
        assert code == 0, err.decode()
        return out, err.decode().splitlines()

    return call


def test_the_wheel_holds_every_file_of_it():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    include = setup["options.packages.find"]["include"].split()
    package = EMBEDDED.parent
    assert (package / "__init__.py").is_file() and any(fnmatch.fnmatch("qwenc.resources", pattern) for pattern in include)
    patterns = setup["options.package_data"]["qwenc.resources"].split()
    files = [path for path in EMBEDDED.rglob("*") if path.is_file()]
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "README.md"} <= {path.name for path in files}
    for path in files:
        assert any(path.relative_to(package).match(pattern) for pattern in patterns), path
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_it_has_a_name_that_an_existing_path_hides(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find(EMBEDDED_NAME, offline=True) == EMBEDDED
    (tmp_path / EMBEDDED_NAME).mkdir()
    assert find(EMBEDDED_NAME, offline=True) == Path(EMBEDDED_NAME)


def test_info_of_it(cli):
    out, err = cli("info", "--json")
    record = json.loads(out)
    assert len(err) == 1 and "QWENC_MODEL" in err[0]
    assert record["model_type"] == "qwen3" and record["qk_norm"] and record["tie_word_embeddings"] and record["chat_template"]
    assert record["num_attention_heads"] >= 2 * record["num_key_value_heads"] and record["tokenizer_size"] == record["vocab_size"]
    assert record["packed_bytes"]["q8"] <= 4_000_000 and record["context"] >= 4096
    assert cli("info", EMBEDDED_NAME, "--json", "-q") == (out, [])


@pytest.mark.parametrize("wmode", GOLDENS["prose"]["text"])
def test_prose_byte_for_byte(cli, wmode):
    """64 greedy tokens. The float32 path has the float32 cache, so that nothing in it is rounded."""
    kv = "f32" if wmode == "f32" else "q8"
    out, err = cli("--wmode", wmode, "--kv", kv, "-n", 64, *GOLDENS["prose"]["args"])
    assert out.decode() == GOLDENS["prose"]["text"][wmode] + "\n"
    assert sum("QWENC_MODEL" in line for line in err) == 1


@pytest.mark.parametrize("wmode", ["q8", "dual"])
@pytest.mark.parametrize("needle", GOLDENS["needles"], ids=lambda needle: needle["place"])
def test_a_sentence_far_back_in_the_text_is_found(cli, needle, wmode):
    prompt = needle["before"] + needle["sentence"] + needle["after"] + needle["question"]
    out, err = cli("-q", "--wmode", wmode, "-n", 40, stdin=prompt)
    assert (out.decode(), err) == (needle["answer"] + "\n", [])
