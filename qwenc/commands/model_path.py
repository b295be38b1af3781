"""What -m names, before anything is converted."""

from __future__ import annotations

from pathlib import Path

from qwenc.errors import QwencError
from qwenc.report import Reporter


def find_unconverted(name: str, offline: bool, reporter: Reporter) -> Path:
    """The packed file or checkpoint folder `name`; a Hub id is brought into the Hub's cache first. Raises QwencError."""
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    try:
        if path.is_dir() or path.is_file():
            return path
        if path.exists():
            raise QwencError(f"{path}: is neither a file nor a folder")
    except OSError as error:
        raise QwencError(f"{path}: cannot be read: {error.strerror}") from None
    from qwenc.checkpoint.hub import HUB_ID, download

    if not HUB_ID.fullmatch(name):
        raise QwencError(f"{name}: no such file or folder, and not a Hugging Face Hub id (owner/name)")
    return download(name, offline, reporter)


def packed_wmode(name: str) -> str | None:
    """The mode of the weights in the packed file `name`; None for anything else, which whoever opens it in earnest will judge."""
    path = Path(name).expanduser() if name.startswith("~") else Path(name)
    if not path.is_file():
        return None
    from qwenc.checkpoint.packed import is_packed
    from qwenc.checkpoint.safetensors_file import SafetensorsFile

    try:
        with SafetensorsFile(path) as file:
            return file.header.metadata.get("wmode") if is_packed(file.header) else None
    except QwencError:
        return None
