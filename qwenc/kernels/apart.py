"""Compiling in another process, beside this one: Numba compiles in one thread at a time, and machines have more cores.

What is compiled there comes back by way of the JIT cache. If anything fails, nothing is said: what is not in the cache is compiled here.
"""

from __future__ import annotations

import contextlib
import importlib
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwenc.kernels.jit import CACHE_DIR
from qwenc.machine.cpus import affinity_mask

Job = tuple[Any, tuple]  # a kernel and the Numba types of its arguments


def can_compile_apart() -> bool:
    """Whether another process could run beside this one and leave what it compiles."""
    return CACHE_DIR is not None and bool(sys.executable) and len(affinity_mask()) > 1


ROOT = Path(__file__).resolve().parent.parent.parent
# sys.path[0] is the user's folder, which may hold anything
PROGRAM = "import sys; sys.path[0] = {root!r}; from qwenc.kernels.apart import main; main()"


class Apart:
    """Compiles `jobs` in another process from now on; `wait` for it, or `stop` it."""

    def __init__(self, jobs: Sequence[Job]):
        named = [(step.py_func.__module__, step.py_func.__name__, types) for step, types in jobs]
        self._process: subprocess.Popen | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM.format(root=str(ROOT))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(pickle.dumps(named))
            self._process.stdin.close()

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """Safe to call at any time."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def main() -> None:
    """What the other process does."""
    for module, name, types in pickle.load(sys.stdin.buffer):
        getattr(importlib.import_module(module), name).compile(types)
