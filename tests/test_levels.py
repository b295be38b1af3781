"""Every SIMD level that this machine has gives the same bits, the plain fallback included; a level that it lacks is refused by name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from qwenc.kernels.level import available_levels, host_features

ROOT = Path(__file__).parent.parent

PROGRAM = """
import hashlib, sys
import numpy as np
import qwenc
from qwenc.attention.cache import cache_arrays
ids = np.load("tests/data/goldens/qwen3-dense-tied/expected.npz")["input_ids"][:60]
SPARSE = {"sparse_attn": True, "sparse_k": 2, "sparse_block": 16, "sparse_min_ctx": 0, "sparse_pf_min_ctx": 0}
for wmode, settings in (("q8", {}), ("q4", {"kv": "q4", **SPARSE})):
    with qwenc.load("tests/data/goldens/qwen3-dense-tied", wmode=wmode, prefill_batch=48, **settings) as engine:
        session = engine.session(80)
        digest = hashlib.sha256(session.prefill(ids).tobytes())
        for token in (5, 9, 3):
            digest.update(session.step(token).tobytes())
        for array in cache_arrays(session.cache).values():
            tokens = array.shape[3] // 4  # of the page, those that were written
            digest.update(np.ascontiguousarray(array[0, :, :, :tokens]).tobytes())
        print(wmode, digest.hexdigest())
"""


def run(program, **environment):
    return subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=1800,
    )


def test_levels_agree_bit_for_bit(tmp_path):
    levels = [level.name for level in available_levels()]
    assert levels[-1] == "plain"
    printed = {}
    for level in levels:
        done = run(PROGRAM, QWENC_SIMD=level)
        assert done.returncode == 0, done.stderr
        printed[level] = done.stdout
    assert printed["plain"].count("\n") == 2
    for level in levels:
        assert printed[level] == printed["plain"], level


def test_a_level_that_is_not_here():
    done = run("import qwenc.kernels.level", QWENC_SIMD="altivec")
    assert done.returncode == 1 and "QWENC_SIMD=altivec: this machine has" in done.stderr


@pytest.mark.parametrize(
    ("features", "expected"), [("+avx2,+fma", "avx2"), ("", "plain"), ("+avx2", "plain"), ("+avxvnni,+avx2,+fma", "avxvnni")]
)
def test_levels_follow_the_features(monkeypatch, features, expected):
    from qwenc.kernels import level

    monkeypatch.setattr(level.platform, "machine", lambda: "x86_64")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    monkeypatch.delenv("QWENC_SIMD", raising=False)
    assert level.choose_level().name == expected


@pytest.mark.parametrize(("granted", "expected"), [(True, "amx"), (False, "avx512")])
def test_tiles_are_used_where_the_system_grants_them(monkeypatch, granted, expected):
    """A container may know of AMX and refuse its registers: the first instruction would end the process."""
    from qwenc.kernels import level

    monkeypatch.setattr(level.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(level, "may_use_tiles", lambda: granted)
    monkeypatch.setenv("NUMBA_CPU_FEATURES", "+avx512f,+avx512bw,+avx512vl,+avx512vnni,+amx-tile,+amx-int8")
    monkeypatch.delenv("QWENC_SIMD", raising=False)
    assert level.choose_level().name == expected


def test_no_tiles_but_on_linux(monkeypatch):
    from qwenc.kernels import level

    monkeypatch.setattr(level.platform, "system", lambda: "Darwin")
    assert not level.may_use_tiles()


@pytest.mark.parametrize(("features", "expected"), [("+neon,+dotprod", "neon"), ("+neon", "plain")])
def test_arm_needs_the_dot_product(monkeypatch, features, expected):
    from qwenc.kernels import level

    monkeypatch.setattr(level.platform, "machine", lambda: "aarch64")
    monkeypatch.setenv("NUMBA_CPU_FEATURES", features)
    assert level.choose_level().name == expected
    assert host_features()


@pytest.mark.parametrize(
    ("system", "capabilities", "expected"),
    [
        ("Linux", 1 << 20 | 1 << 10 | 2, {"dotprod", "fullfp16"}),
        ("Linux", 2, set()),  # a Cortex-A72
        ("Linux", None, set()),  # a C library without getauxval
        ("Darwin", None, {"dotprod", "fullfp16"}),
    ],
)
def test_what_llvm_does_not_tell_of_arm(monkeypatch, system, capabilities, expected):
    """LLVM 20 reports neither feature of its host: without them a Cortex-A76 would take the fallback."""
    from qwenc.kernels import level

    class Library:
        def __init__(self, _name):
            if capabilities is not None:
                self.getauxval = FakeFunction()

    class FakeFunction:
        def __call__(self, kind):
            assert kind == level.AT_HWCAP
            return capabilities

    monkeypatch.setattr(level.platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(level.platform, "system", lambda: system)
    monkeypatch.setattr(level.ctypes, "CDLL", Library)
    assert level.arm_features() == expected
    monkeypatch.setattr(level.platform, "machine", lambda: "x86_64")
    assert level.arm_features() == set()


def test_a_cpu_named_for_numba_has_no_features_of_its_own(monkeypatch):
    """NUMBA_CPU_NAME=generic, the way to share a cache between machines, used to abort in LLVM."""
    done = run(
        "import numpy as np; from qwenc.kernels import simd, level; from qwenc.kernels.jit import helper\n"
        "@helper\ndef f(h, y): simd.store(y, 0, simd.load_half(h, 0))\n"
        "y = np.zeros(16, np.float32); f(np.full(16, 0x3C00, np.uint16), y); print(level.LEVEL.name, y.sum())",
        NUMBA_CPU_NAME="generic",
    )
    assert done.stdout == "plain 16.0\n", done.stderr
