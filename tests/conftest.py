"""The command in this process, with a scripted engine (tests/fake_engine.py)."""

import io
import json
import os
import sys

import fake_engine
import pytest

from qwenc.commands.dispatch import run_command


@pytest.fixture
def no_variables(monkeypatch):
    """An environment that says nothing to qwenc."""
    for name in [name for name in os.environ if name.startswith(("QWENC_", "VLLM_", "FAKE_", "NO_COLOR", "FORCE_COLOR"))]:
        monkeypatch.delenv(name)


@pytest.fixture
def cli(monkeypatch, capfdbinary, no_variables):
    """cli(*args, stdin=bytes, script={…}, env={…}) → (exit code, stdout text, stderr lines). stdin=None is a terminal."""
    fake_engine.install(monkeypatch)

    def call(*args, stdin=None, script=None, env=None):
        stream = io.TextIOWrapper(io.BytesIO(stdin or b""), encoding="utf-8")
        if stdin is None:
            stream.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stream)
        monkeypatch.setenv("FAKE_ENGINE", json.dumps(script or {}))
        fake_engine.calls.clear()
        with monkeypatch.context() as patch:
            for name, value in (env or {}).items():
                patch.setenv(name, value)
            code = run_command(list(args))
        out, err = capfdbinary.readouterr()
        return code, out.decode(), err.decode().splitlines()

    return call


@pytest.fixture
def batch(monkeypatch, capfdbinary, tmp_path, no_variables):
    """batch(*args, script={…}) → (exit code, records on stdout, stderr lines), run in an empty folder."""
    fake_engine.install(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def call(*args, script=None):
        monkeypatch.setenv("FAKE_ENGINE", json.dumps(script or {}))
        fake_engine.calls.clear()
        code = run_command(["batch", "-m", "M", *map(str, args)])
        out, err = capfdbinary.readouterr()
        return code, [json.loads(line) for line in out.decode().splitlines()], err.decode().splitlines()

    return call
