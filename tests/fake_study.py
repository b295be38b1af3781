"""An engine whose times and logits follow formulas, for tests of sweep, bench and quality.

`python tests/fake_study.py ARGS…` is the real command with this engine in place; the script is JSON in FAKE_STUDY: "kill_at" or
"interrupt_at", a step at which the process kills or interrupts itself; "log", a file that every prefill and decode step is noted in.
"""

import json
import os
import signal
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fake_engine

from qwenc.settings import Settings
from qwenc.timing import Timings, TokenTiming

VOCAB = 50
steps = 0  # of this process
calls = []  # what was asked for, in order


class FakeTokenizer:
    vocab_size = VOCAB

    def encode(self, text, special):
        return [ord(char) % VOCAB for char in text]

    def decode(self, ids):
        return " ".join(map(str, ids))


@dataclass
class FakeSession:
    engine: object
    capacity: int
    settings: Settings
    length: int = 0
    context: list = field(default_factory=list)
    timings: Timings = field(default_factory=Timings)
    last: TokenTiming | None = None

    def compile(self):
        calls.append(("compile", self.settings))

    def _ms(self):
        """Attention in ms of a token: linear when exact, nearly flat when sparse; 4-bit keys cost half."""
        s, n = self.settings, self.length
        kept = min(n, s.sparse_k * s.sparse_block) if s.sparse_attn else n
        return (0.5 if s.kv == "q4" else 1.0) * (0.1 + kept / 1000 + (n / 20000 if s.sparse_attn else 0))

    def _logits(self, token):
        """The same for all settings, but for a little that depends on them."""
        rng = np.random.default_rng([token, self.length])
        logits = rng.normal(0, 2, VOCAB).astype(np.float32)
        wrong = 0.3 * self.settings.sparse_attn / self.settings.sparse_k + 0.01 * (self.settings.kv == "q4")
        return logits + np.float32(wrong) * np.random.default_rng(self.length).normal(0, 1, VOCAB).astype(np.float32)

    def prefill(self, ids):
        assert self.length + len(ids) <= self.capacity
        calls.append(("prefill", self.settings, len(ids)))
        self.context += ids
        self.length += len(ids)
        timing = self.timings.prefill
        timing.n += len(ids)
        timing.qkv_ms += len(ids)
        timing.attn_ms += len(ids) * self._ms()
        timing.total_ms = timing.qkv_ms + timing.attn_ms + 1
        return self._logits(ids[-1])

    def step(self, token):
        global steps
        steps += 1
        assert self.length < self.capacity
        calls.append(("step", self.settings, self.length))
        script = self.engine.script
        if steps == script.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if steps == script.get("interrupt_at"):
            raise KeyboardInterrupt
        self.context.append(token)
        self.length += 1
        ms = self._ms()
        self.last = TokenTiming(self.length, {"attn": ms, "qkv": 3.0}, ms + 3.0)
        return self._logits(token)

    def logits(self, ids):
        rows = []
        for token in ids:
            self.length += 1
            self.context.append(token)
            rows.append(self._logits(token))
        return np.stack(rows)

    def mark(self):
        return types.SimpleNamespace(length=self.length)

    def rewind(self, mark):
        self.length = mark.length
        del self.context[mark.length :]

    def take_over(self, other, mark):
        assert self.settings.kv == other.settings.kv
        calls.append(("take_over", self.settings, mark.length))
        self.context = list(other.context)
        self.rewind(mark)

    def watched(self):
        """Two layers of one kv head; block b holds twice the mass of block b + 1. The oracle keeps the best, others every second one, and
        believe to miss a quarter."""
        s = self.settings
        if not s.sparse_attn:
            return None
        blocks = -(-self.length // s.sparse_block)
        mass = np.tile(0.5 ** np.arange(1, blocks + 1), (2, 1, 1)).astype(np.float32)
        kept = np.zeros(mass.shape, bool)
        kept[..., :: 1 if s.sparse_score == "oracle" else 2][..., : s.sparse_k] = True
        return kept, mass / mass.sum(axis=-1, keepdims=True), 0.25

    def kv_bytes(self):
        return 100 * self.length


class FakeEngine:
    def __init__(self, model, reporter, settings):
        self.script = json.loads(os.environ.get("FAKE_STUDY", "{}"))
        self.settings = Settings.from_dict(settings)
        self.wmode, self.threads, self.cores = self.settings.wmode or "dual", self.settings.threads or 2, [0, 1]
        self.context_size = self.settings.ctx_size or 4096
        self.tokenizer = FakeTokenizer() if self.script.get("tokenizer", True) else None
        from tiny_model import TINY

        from qwenc.config.model_config import ModelConfig

        self.config = ModelConfig.from_dict(TINY | {"vocab_size": VOCAB}, "fake")
        self.packed = types.SimpleNamespace(metadata={"source": model, "source_hash": "abc"}, path=Path(model), file_bytes=1_000_000)
        self.eos_ids, self.has_chat_template = frozenset([5]), False
        reporter.note(f"loaded {model}")

    def __enter__(self):
        calls.append(("load", self.settings))
        return self

    def __exit__(self, *_):
        calls.append(("close", self.settings))

    def session(self, capacity=None, settings=None, watch=False):
        return FakeSession(self, capacity or self.context_size, settings or self.settings)

    def encode_prompt(self, text, raw=False, **_):
        return [ord(char) % VOCAB for char in text]


def load(model, *, reporter, **settings):
    return FakeEngine(model, reporter, settings)


def install(monkeypatch=None):
    fake_engine.install(monkeypatch, load)
    calls.clear()


def command(monkeypatch, capfdbinary, tmp_path, *before):
    """`call(*args, script=None)` runs the command `before` + args in this process, with this engine in place: (code, stdout, stderr's
    lines)."""
    from qwenc.commands.dispatch import run_command

    install(monkeypatch)
    for name in [name for name in os.environ if name.startswith(("QWENC_", "NO_COLOR", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("QWENC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys.modules[__name__], "steps", 0)

    def call(*args, script=None):
        monkeypatch.setenv("FAKE_STUDY", json.dumps(script or {}))
        calls.clear()
        code = run_command([*before, *args])
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode().splitlines()

    return call


if __name__ == "__main__":
    install()
    from qwenc.commands.main import main

    main()
