"""The kernel cache: read-only, damaged, raced, in use. None of it may cost a run more than a compilation."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

PROGRAM = """
import numpy as np
from qwenc.kernels.reduce import log_sum_exp
from qwenc.kernels.jit import CACHE_DIR
x = np.linspace(-3, 3, 100, dtype=np.float32)
assert abs(log_sum_exp(x) - np.log(np.exp(x.astype(np.float64)).sum())) < 1e-5
print(CACHE_DIR, sum(log_sum_exp.stats.cache_hits.values()), sum(log_sum_exp.stats.cache_misses.values()))
"""


def environment(cache, **more):
    env = {name: value for name, value in os.environ.items() if name != "NUMBA_CACHE_DIR"}
    return {**env, "QWENC_CACHE": str(cache), "PYTHONPATH": str(ROOT), **more}


def run(cache, **more):
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment(cache, **more), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    folder, hits, misses = done.stdout.split()
    return folder, int(hits), int(misses)


def test_the_second_run_compiles_nothing(tmp_path):
    folder, hits, misses = run(tmp_path)
    assert Path(folder).is_relative_to(tmp_path) and (hits, misses) == (0, 1)
    assert run(tmp_path)[1:] == (1, 0)


@pytest.mark.parametrize("suffix", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", ["truncate", "empty", "garbage"])
def test_a_damaged_entry_is_compiled_again(tmp_path, suffix, damage):
    folder = Path(run(tmp_path)[0])
    for path in folder.rglob(f"*.{suffix}"):
        data = path.read_bytes()
        path.write_bytes({"truncate": data[: len(data) // 2], "empty": b"", "garbage": b"\x80\x04garbage" * 50}[damage])
    run(tmp_path)
    assert run(tmp_path)[1:] == (1, 0)  # mended


def test_no_folder_to_write_to(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    assert run(blocked)[0] == "None"
    assert run(blocked, HOME="/nonexistent", NUMBA_CACHE_DIR=str(blocked / "x"))[0] == "None"


def test_a_folder_that_can_only_be_read_is_read(tmp_path):
    """As one that was filled for all users. Those who run the tests may be allowed to write anywhere, so it is refused by hand."""
    run(tmp_path)
    refuse = "import tempfile\ndef no(**_): raise PermissionError\ntempfile.TemporaryFile = no\n"
    done = subprocess.run([sys.executable, "-c", refuse + PROGRAM], env=environment(tmp_path), capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    folder, hits, misses = done.stdout.split()
    assert Path(folder).is_relative_to(tmp_path) and (hits, misses) == ("1", "0")


def test_home_does_not_exist(tmp_path):
    env = environment("", HOME="/nonexistent/home")
    env.pop("QWENC_CACHE"), env.pop("XDG_CACHE_HOME", None)
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


def test_cold_starts_at_once(tmp_path):
    jobs = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    for job in jobs:
        _, errors = job.communicate(timeout=900)
        assert job.returncode == 0, errors.decode()
    assert run(tmp_path)[1] == 1


def test_no_fast_math_anywhere():
    """It would delete the logic about NaN and infinity."""
    for source in (ROOT / "qwenc").rglob("*.py"):
        assert not re.search(r"fastmath\s*=\s*True", source.read_text()), source
