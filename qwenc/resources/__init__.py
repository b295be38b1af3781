"""What comes with qwenc besides its code: a small model, as a checkpoint folder like any other (its README.md says what it is)."""

from pathlib import Path

EMBEDDED_NAME = "embedded"  # what users may call it
EMBEDDED = Path(__file__).resolve().parent / EMBEDDED_NAME
EMBEDDED_NOTE = (
    "no model named: this is the small one that comes with qwenc and knows little but the King James Bible; "
    "name a real one with -m (a folder or a Hub id such as Qwen/Qwen3-0.6B) or QWENC_MODEL"
)
