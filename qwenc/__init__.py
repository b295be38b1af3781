"""qwenc: run Qwen3-family checkpoints on a CPU.

    import qwenc
    engine = qwenc.load("Qwen/Qwen3-0.6B", wmode="q4")
    for step in engine.generate("Why is the sky blue?"):
        print(step.text, end="")

Library code never prints. Whatever a user can cause is a `QwencError` with one clear sentence.
"""

from __future__ import annotations

from qwenc.errors import QwencError, UsageError
from qwenc.version import __version__

TYPE_CHECKING = False  # typing is not imported for it: this file runs before anything can catch a Ctrl-C
if TYPE_CHECKING:
    from qwenc.engine import Engine, Step, load

__all__ = ["Engine", "QwencError", "Step", "UsageError", "__version__", "load"]


def __getattr__(name: str) -> object:
    if name in ("Engine", "Step", "load"):  # imported when first asked for: they bring numpy and numba
        import qwenc.engine

        return getattr(qwenc.engine, name)
    raise AttributeError(f"module 'qwenc' has no attribute {name!r}")
