"""From what the user calls a model to a packed file: a packed file as it is, a folder or a Hub id by way of the cache."""

from __future__ import annotations

from pathlib import Path

from qwenc.checkpoint.hub import HUB_ID, download
from qwenc.checkpoint.model_cache import cached_conversion, serves
from qwenc.checkpoint.packed import Packed, is_packed, open_packed
from qwenc.checkpoint.safetensors_file import SafetensorsFile
from qwenc.errors import QwencError, UsageError
from qwenc.report import SILENT, Reporter
from qwenc.resources import EMBEDDED, EMBEDDED_NAME
from qwenc.settings import WMODES, Settings

DEFAULT_WMODE = WMODES[0]  # dual


def load_packed(model: str | Path, settings: Settings, reporter: Reporter = SILENT) -> Packed:
    """Finds `model` and maps it, or reads it. Raises QwencError."""
    return open_packed(resolve(model, settings, reporter), mmap=settings.mmap)


def resolve(model: str | Path, settings: Settings, reporter: Reporter = SILENT) -> Path:
    """The packed file that serves `model` in settings.wmode; an unpacked checkpoint is converted once. Raises QwencError."""
    path = find(model, settings.offline, reporter)
    if path.is_file():
        return _packed_file(path, settings.wmode)
    return cached_conversion(path, _label(str(model), path), settings.wmode or DEFAULT_WMODE, reporter)


def find(model: str | Path, offline: bool, reporter: Reporter = SILENT) -> Path:
    """The file or the checkpoint folder that `model` names; a Hub id owner/name[@revision] is downloaded first. Raises QwencError.

    An existing path wins over the name of the model that comes with qwenc and over a Hub id.
    """
    text = str(model)
    if not text.strip():
        raise UsageError("no model given: a packed file, a checkpoint folder or a Hub id (owner/name)")
    path = Path(text).expanduser() if text.startswith("~") else Path(text)
    try:
        if path.is_dir() or path.is_file():
            return path
        if path.exists():
            raise QwencError(f"{path}: is neither a file nor a folder")
    except OSError as error:
        raise QwencError(f"{text[:200]}: cannot be read: {error.strerror}") from None
    if text == EMBEDDED_NAME:
        return EMBEDDED
    if HUB_ID.fullmatch(text):
        return download(text, offline, reporter)
    raise QwencError(f"{text}: no such file or folder, and not a Hugging Face Hub id (owner/name)")


def _label(model: str, folder: Path) -> str:
    """A name for the conversion: the Hub id, else the folder's own name."""
    return model if HUB_ID.fullmatch(model) and not Path(model).exists() else folder.resolve().name


def _packed_file(path: Path, wmode: str | None) -> Path:
    """Checks that `path` is a packed file whose weights can run in `wmode` (None: in whatever it holds)."""
    if path.suffix == ".gguf":
        raise QwencError(f"{path}: GGUF files are not supported; give a Hugging Face checkpoint folder")
    with SafetensorsFile(path) as file:
        if not is_packed(file.header):
            raise QwencError(f"{path}: holds weights only; give the folder with its config.json: {path.parent}")
        held = file.header.metadata.get("wmode", "")
    if wmode is not None and not serves(held, wmode):
        raise QwencError(
            f"{path}: holds {held} weights, which cannot run as {wmode}; use --wmode {held}, or convert the checkpoint to {wmode}"
        )
    return path
