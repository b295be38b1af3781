"""Where qwenc keeps what it can make again: converted models and compiled kernels."""

from __future__ import annotations

import os
from pathlib import Path


def cache_root() -> Path:
    """`QWENC_CACHE`, else `$XDG_CACHE_HOME/qwenc`, else `~/.cache/qwenc`. Not created here. Falls back to a relative
    path that cannot be written where there is no home folder; callers treat an unwritable cache as no cache."""
    named = os.environ.get("QWENC_CACHE")
    if named:
        return Path(named)
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg:
        return Path(xdg) / "qwenc"
    return Path(os.path.expanduser("~")) / ".cache" / "qwenc"
