"""The prediction for a board that is not here: loops in assembly, bytes as the cache has them, the longer of computing and reading."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import a76_model  # noqa: E402
import loop_cycles  # noqa: E402

NESTED = """
	.text
kernel:
	mov	x0, #0
.LBB0_1:
	ldr	q0, [x1]
.LBB0_2:
	sdot	v0.4s, v1.16b, v2.16b
	sdot	v3.4s, v1.16b, v2.4b[1]
	subs	x0, x0, #1
	b.ne	.LBB0_2
	str	q0, [x2]
	cbz	x3, .LBB0_4
	b	.LBB0_1
.LBB0_4:
	ret
"""


def test_loops_of_arm_assembly():
    outer, inner = loop_cycles.loops_of(NESTED)
    assert outer.inner == [inner] and not inner.inner
    assert [line.split()[0] for line in inner.lines] == ["sdot", "sdot", "subs", "b.ne"]
    assert [line.split()[0] for line in outer.own] == ["ldr", "str", "cbz", "b"]
    assert len(outer.lines) == 8 and outer.count("sdot") == 2 and inner.count(a76_model.DOT) == 2
    assert a76_model.lanes(inner) == 4


def test_loops_of_x86_assembly():
    body = ["vpdpbusd\t(%rax){1to16}, %zmm1, %zmm2", "{vex}\tvpdpbusd\t%ymm1, %ymm2, %ymm3", "decq\t%rcx", "jne\t.LBB0_3", "jmp\t.LBB0_9"]
    text = ".LBB0_3:\n" + "".join(f"\t{line}\n" for line in body)
    (loop,) = loop_cycles.loops_of(text)
    assert loop.count(a76_model.DOT) == 2 and a76_model.lanes(loop) == 16


@pytest.mark.skipif(not any(map(shutil.which, ("llvm-mca-19", "llvm-mca"))), reason="no llvm-mca here")
def test_cycles_of_a_loop():
    loop = loop_cycles.loops_of(NESTED)[1]
    assert 1 <= loop_cycles.cycles(loop.lines, "cortex-a76") <= 4
    kernel = a76_model.Tile(products=2)
    assert a76_model.kernel_cycles(kernel, NESTED, "cortex-a76") == pytest.approx(2 * loop_cycles.cycles(loop.lines, "cortex-a76") / 32)
    with pytest.raises(RuntimeError, match="no loop with"):
        a76_model.kernel_cycles(a76_model.Passes(1, (("fmla", 1, "x"),)), NESTED, "cortex-a76")


def test_the_bytes_are_those_of_the_cache():
    from qwenc.attention.cache import bytes_per_token

    for kv, size in a76_model.KV_BYTES.items():
        assert bytes_per_token(kv, a76_model.LAYERS, a76_model.KV_HEADS, a76_model.HEAD_DIM) == a76_model.LAYERS * a76_model.KV_HEADS * size
    plane = bytes_per_token("q8", 1, 1, a76_model.HEAD_DIM, sparse=True) - bytes_per_token("q8", 1, 1, a76_model.HEAD_DIM)
    assert plane - 1 < a76_model.LOOK_BYTES + a76_model.SCAN_BYTES <= plane
    from qwenc.model import sparse_plan

    for name in ("SCAN_LEAST", "SCAN_TIMES", "SCAN_SHARE"):
        assert getattr(a76_model, name) == getattr(sparse_plan, name)


def test_a_step_takes_the_longer_of_computing_and_reading():
    cheap = a76_model.Board(dict.fromkeys(a76_model.KERNELS, 1e-9), 20)
    assert cheap.exact(4059) == pytest.approx(28 * 4059 * 8 * 264 / 20e6)  # ms at 20 GB/s
    assert cheap.matrices() == pytest.approx(1.7203e9 * 4.5 / 8 / 20e6, rel=1e-3)
    dear = a76_model.Board(dict.fromkeys(a76_model.KERNELS, 100.0), 20)
    assert dear.exact(4059) == pytest.approx(28 * 4059 * 16 * 400 / (4 * 2.3e6))
    for board in (cheap, dear):
        assert board.sparse(1024) == board.exact(1024) and board.sparse(16384) < board.exact(16384)


def test_arm_code_takes_the_dot_product_from_lanes():
    """Compiled here for a CPU that is not here."""
    names = ["gemv_q4", "gemm_q4", "gemm_q8fast", "scores_q8", "values_q8", "scores_q5", "values_q4", "scores_plane", "look_plane"]
    command = [sys.executable, str(ROOT / "scripts" / "kernel_asm.py"), *names, "--cpu", "cortex-a76"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    kernels = done.stdout.split("# kernel ")[1:]
    assert [kernel.split()[0] for kernel in kernels] == names
    for kernel in kernels:
        found = [line for line in kernel.splitlines() if line.startswith("\tsdot")]
        assert found and (kernel.startswith("look") or all(".4b[" in line for line in found)), kernel.split()[0]
