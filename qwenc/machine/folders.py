"""Where qwenc keeps what it can make again: converted models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`QWENC_CACHE`, else `$XDG_CACHE_HOME/qwenc`, else `~/.cache/qwenc`. Not created here. Without a home folder it is a path that
    nobody can write:
    callers treat an unwritable cache as no cache, or ask for QWENC_CACHE."""
    named = os.environ.get("QWENC_CACHE")
    if named:
        return Path(os.path.expanduser(named))
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "qwenc"
    home = os.path.expanduser("~")
    return Path(os.devnull if home == "~" else home) / ".cache" / "qwenc"
