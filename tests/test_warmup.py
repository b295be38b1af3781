"""`qwenc warmup`: what it compiles is what a run needs."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import qwenc
from qwenc import warmup
from qwenc.checkpoint import model_cache
from qwenc.commands.dispatch import cli
from qwenc.kernels import jit
from qwenc.report import Reporter

GOLDENS = Path(__file__).parent / "data" / "goldens"


class Listener(Reporter):
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize(("moe", "model"), [(False, "qwen3-dense-tied"), (True, "qwen3-moe")])
def test_a_run_after_it_compiles_nothing(tmp_path, monkeypatch, moe, model):
    monkeypatch.setattr(model_cache, "cache_root", lambda: tmp_path)
    warmup.warm_up(None, moe, {"wmode": "dual"})
    heard = Listener()
    with qwenc.load(GOLDENS / model, reporter=heard) as engine, jit.compiling(lambda: heard.notes.append("compiled")):
        list(engine.generate([1, 2, 3], max_tokens=2))
    assert not [note for note in heard.notes if note.startswith("compil")]
    assert warmup.warm_up(None, moe, {"wmode": "dual"})[1] is False


def test_the_command_says_what_it_did(monkeypatch):
    asked = []
    monkeypatch.setattr(warmup, "warm_up", lambda *arguments: asked.append(arguments) or (12.34, True))
    done = CliRunner().invoke(cli, ["warmup", "-m", "some/model", "--wmode", "q4", "--kv", "f32", "--offline"])
    assert done.exit_code == 0 and done.stdout == "" and "compiled in 12.3 s" in done.stderr
    assert asked[0][:3] == ("some/model", False, {"wmode": "q4", "kv": "f32", "sparse_attn": False, "offline": True})


def test_a_cache_that_cannot_be_written_is_an_error(monkeypatch):
    monkeypatch.setattr(jit, "CAN_KEEP", False)
    with pytest.raises(qwenc.QwencError, match="cannot be written"):
        warmup.warm_up(None, False, {})
