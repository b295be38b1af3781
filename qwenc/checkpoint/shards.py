"""The weights of a checkpoint folder: one safetensors file, or several that an index names."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import numpy as np

from qwenc.checkpoint.safetensors_file import SafetensorsFile, TensorInfo, require_regular
from qwenc.errors import QwencError
from qwenc.report import Reporter

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Shards:
    """Tensors by name, wherever they lie. Every shard is open and was found whole. Reading is thread-safe."""

    def __init__(self, folder: Path, files: dict[str, SafetensorsFile], home: dict[str, str]) -> None:
        self.folder = folder
        self.files = files  # by shard name, sorted
        self._home = home  # tensor name -> shard name

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *exc: object) -> None:
        for file in self.files.values():
            file.close()

    def names(self) -> list[str]:
        return list(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def path_of(self, name: str) -> Path:
        """The file that holds a tensor."""
        return self.files[self._home[name]].path

    def info(self, name: str) -> TensorInfo:
        return self._file(name).info(name)

    def tensor(self, name: str) -> np.ndarray:
        """The whole tensor, float32."""
        return self._file(name).tensor(name)

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """tensor[start:stop] along the first axis, float32."""
        return self._file(name).rows(name, start, stop)

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._home:
            raise QwencError(f"{self.folder}: the checkpoint has no tensor {name}")
        return self.files[self._home[name]]


def open_shards(folder: Path, reporter: Reporter) -> Shards:
    """Opens every shard. The index decides; without one it is model.safetensors. Raises QwencError naming what is missing or damaged."""
    index = folder / INDEX
    if index.exists():
        home = _read_index(index)
        missing = [name for name in sorted(set(home.values())) if not (folder / name).is_file()]
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise QwencError(f"{folder}: {INDEX} names {missing[0]}{more}, which is not there (incomplete download?)")
    elif (folder / SINGLE).exists():
        home = {}
    else:
        raise QwencError(_nothing_found(folder))

    named = set(home.values()) or {SINGLE}
    stray = sorted(path.name for path in folder.glob("*.safetensors") if path.name not in named)
    if stray:
        reporter.note(f"{folder}: ignoring {', '.join(stray)}, which the checkpoint does not name")
    with contextlib.ExitStack() as opened:
        files = {name: opened.enter_context(SafetensorsFile(folder / name)) for name in sorted(named)}
        if not home:
            home = dict.fromkeys(files[SINGLE].header.tensors, SINGLE)
        for tensor, shard in home.items():
            if tensor not in files[shard].header.tensors:
                raise QwencError(f"{folder}: {INDEX} places {tensor} in {shard}, which does not hold it")
        opened.pop_all()  # all is well: Shards closes them
        return Shards(folder, files, home)


def _read_index(path: Path) -> dict[str, str]:
    """Tensor name -> shard name."""
    require_regular(path)
    try:
        index = json.loads(path.read_bytes())
    except OSError as error:
        raise QwencError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise QwencError(f"{path}: is not valid JSON") from None
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise QwencError(f"{path}: has no weight_map")
    for tensor, shard in weight_map.items():
        if not isinstance(shard, str) or not shard or not _is_file_name(shard):
            raise QwencError(f"{path}: places {tensor} in {shard!r}, which is not a file name")
    return weight_map


def _is_file_name(name: str) -> bool:
    """Whether `name` is a plain file name, and text."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in name and Path(name).name == name


def _nothing_found(folder: Path) -> str:
    if any(folder.glob("*.safetensors")):
        return f"{folder}: has .safetensors files but neither {SINGLE} nor {INDEX}"
    if any(folder.glob("*.bin")) or any(folder.glob("*.pth")):
        return f"{folder}: has only PyTorch .bin weights; qwenc reads safetensors"
    if any(folder.glob("*.gguf")):
        return f"{folder}: has only GGUF weights; qwenc reads safetensors"
    return f"{folder}: has no weights (neither {SINGLE} nor {INDEX})"
