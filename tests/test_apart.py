"""Compiling in another process: what it leaves in the cache, and what a run does without it."""

import subprocess
import sys
import time
from pathlib import Path

import numba
import numpy as np
import pytest
from test_jit_cache import ROOT, environment

from qwenc.kernels import apart
from qwenc.kernels.jit import jit
from qwenc.model import steps
from qwenc.report import SILENT

PROGRAM = """
import sys
import numba
import numpy as np
from qwenc.kernels import apart
from qwenc.kernels.jit import is_cached
from qwenc.kernels.reduce import log_sum_exp
types = (numba.typeof(np.zeros(1, np.float32)),)
print(is_cached(log_sum_exp, types))
other = apart.Apart([(log_sum_exp, types)])
other.wait()
print(is_cached(log_sum_exp, types))
log_sum_exp.compile(types)
print(sum(log_sum_exp.stats.cache_misses.values()))
"""


def test_what_the_other_process_compiles_is_in_the_cache(tmp_path):
    (tmp_path / "numpy.py").write_text("raise SystemExit('the user’s own file')")
    env = environment(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path[0] = {str(ROOT)!r}\n{PROGRAM}"], env=env, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == ["False", "True", "0"], done.stderr


@pytest.mark.parametrize("how", ["no such program", "it fails"])
def test_a_run_does_without_it(monkeypatch, how):
    monkeypatch.setattr(apart, "can_compile_apart", lambda: True)
    monkeypatch.setattr(steps, "can_compile_apart", lambda: True)
    if how == "it fails":
        monkeypatch.setattr(apart, "PROGRAM", "raise SystemExit(1)")
    else:
        monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    kernels = [numba.njit(lambda x: x + 1), numba.njit(lambda x: x + 2)]
    steps.compile_steps([(kernel, (np.float32(1),)) for kernel in kernels], SILENT)
    assert [len(kernel.signatures) for kernel in kernels] == [1, 1]


def test_an_interrupt_ends_the_other_process(monkeypatch):
    started = []

    class Slow(apart.Apart):
        def __init__(self, jobs):
            super().__init__(jobs)
            started.append(self)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(apart, "PROGRAM", "import time; time.sleep(600)")
    monkeypatch.setattr(steps, "Apart", Slow)
    monkeypatch.setattr(steps, "can_compile_apart", lambda: True)
    monkeypatch.setattr(steps, "_compile_all", stop)
    kernels = [jit(lambda x: x + 1), jit(lambda x: x + 2)]
    with pytest.raises(KeyboardInterrupt):
        steps.compile_steps([(kernel, (np.float32(1),)) for kernel in kernels], SILENT)
    assert started[0]._process.poll() is not None


ORPHAN = """
import os, sys
from qwenc.kernels import apart
waits = "import _end_with_parent as end; import pickle; pickle.load(sys.stdin.buffer); end()"
apart.PROGRAM = apart.PROGRAM.replace("import main; main()", waits)
print(apart.Apart([])._process.pid, flush=True)
sys.stdin.read()
"""


def test_the_other_process_ends_with_this_one(tmp_path):
    program = f"import sys; sys.path[0] = {str(ROOT)!r}\n{ORPHAN}"
    with subprocess.Popen(
        [sys.executable, "-c", program], env=environment(tmp_path), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        other = int(parent.stdout.readline())
        assert is_running(other)
        parent.kill()
    deadline = time.monotonic() + 60
    while is_running(other) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not is_running(other)


def is_running(pid):
    """Not so for a zombie that nobody collects."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
