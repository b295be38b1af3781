"""Compiling in another process, beside this one: Numba compiles in one thread at a time, and machines have more cores.

What is compiled there comes back by way of the JIT cache. If anything fails, nothing is said: what is not in the cache is compiled here.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import Any

from qwenc.kernels.jit import CAN_KEEP, PACKAGE
from qwenc.machine.cpus import affinity_mask

Job = tuple[Any, tuple]  # a kernel and the Numba types of its arguments


def can_compile_apart() -> bool:
    """Whether another process could run beside this one and leave what it compiles."""
    return CAN_KEEP and bool(sys.executable) and len(affinity_mask()) > 1


# The user's folder, "" in sys.path, may hold anything.
PROGRAM = "import sys; sys.path[:] = [{root!r}, *filter(None, sys.path)]; from qwenc.kernels.apart import main; main()"


class Apart:
    """Compiles `jobs` in another process from now on; `wait` for it, or `stop` it. It ends when this process does, or forgets it: its stdin
    stays open until then."""

    def __init__(self, jobs: Sequence[Job]):
        named = [(step.py_func.__module__, step.py_func.__name__, types) for step, types in jobs]
        self._process: subprocess.Popen | None = None
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(
                [sys.executable, *_flags(), "-c", PROGRAM.format(root=str(PACKAGE.parent))],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            assert self._process.stdin is not None
            self._process.stdin.write(pickle.dumps(named))
            self._process.stdin.flush()

    def wait(self) -> None:
        if self._process is not None:
            self._process.wait()

    def stop(self) -> None:
        """Safe to call at any time."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()
            with contextlib.suppress(OSError):  # what it did not read
                self._process.stdin.close()  # type: ignore[union-attr]


def _flags() -> list[str]:
    """How this Python was told to leave the user's environment and folders alone."""
    flags = sys.flags
    return [name for name, given in (("-I", flags.isolated), ("-E", flags.ignore_environment), ("-s", flags.no_user_site)) if given]


def main() -> None:
    """What the other process does."""
    jobs = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    for module, name, types in jobs:
        getattr(importlib.import_module(module), name).compile(types)
    os._exit(0)  # the thread that reads stdin holds it


def _end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # nothing comes but the end
    os._exit(1)
