"""Opens a packed file: the whole of it mapped, no copy made; or, if that is wished, read into memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qwenc.checkpoint.layout import TensorSpec, packed_tensors
from qwenc.checkpoint.packed_writer import ALIGN, NUMPY_DTYPES
from qwenc.checkpoint.pages import map_file, read_file
from qwenc.checkpoint.safetensors_file import Header, SafetensorsFile
from qwenc.config.model_config import ModelConfig
from qwenc.errors import QwencError
from qwenc.settings import WMODES

FORMAT = "qwenc-packed"
VERSION = "1"
TOKENIZER = "tokenizer.json"  # name of the U8 tensor


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed checkpoint. `tensors` are read-only views of the map, F16 as uint16; the contract in docs/architecture.md names them.
    data: all bytes of the file, uint8; mapped: whether they are where the system keeps the file."""

    path: Path
    metadata: dict[str, str]
    config: ModelConfig
    config_json: dict
    generation_config: dict
    tokenizer_config: dict
    chat_template: str | None
    wmode: str
    tensors: dict[str, np.ndarray]
    file_bytes: int
    data: np.ndarray
    mapped: bool = True

    @property
    def tokenizer_json(self) -> bytes | None:
        """tokenizer.json as it was in the checkpoint, or None."""
        found = self.tensors.get(TOKENIZER)
        return None if found is None else found.tobytes()


def is_packed(header: Header) -> bool:
    return header.metadata.get("format") == FORMAT


def open_packed(path: str | Path, *, mmap: bool = True) -> Packed:
    """Maps `path`, or reads all of it.

    Raises QwencError for a file that is damaged, of another format or version, or that lacks a tensor of its model."""
    path = Path(path)
    with SafetensorsFile(path) as file:
        header = file.header
        if not is_packed(header):
            raise QwencError(f"{path}: is not a packed qwenc file")
        metadata = header.metadata
        version, wmode = metadata.get("version"), metadata.get("wmode", "")
        if version != VERSION:
            raise QwencError(
                f"{path}: is a packed file of version {version}, this qwenc reads version {VERSION}; convert the checkpoint again"
            )
        if wmode not in WMODES:
            raise QwencError(f"{path}: holds weights in an unknown mode {wmode!r}")
        config_json = _json_object(path, metadata, "config")
        config = ModelConfig.from_dict(config_json, f"{path}: config")
        _check_tensors(path, header, packed_tensors(config, wmode))
        data = map_file(path, header.file_bytes) if mmap else read_file(path, header.file_bytes)
    return Packed(
        path=path,
        metadata=metadata,
        config=config,
        config_json=config_json,
        generation_config=_json_object(path, metadata, "generation_config"),
        tokenizer_config=_json_object(path, metadata, "tokenizer_config"),
        chat_template=metadata.get("chat_template"),
        wmode=wmode,
        tensors=_views(header, data),
        file_bytes=header.file_bytes,
        data=data,
        mapped=mmap,
    )


def _json_object(path: Path, metadata: dict[str, str], key: str) -> dict:
    """The JSON object in metadata[key]; {} when absent (except config, without which from_dict complains)."""
    try:
        value = json.loads(metadata.get(key, "{}"))
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise QwencError(f"{path}: its {key} is not a JSON object")
    return value


def _check_tensors(path: Path, header: Header, expected: dict[str, TensorSpec]) -> None:
    for name, spec in expected.items():
        info = header.tensors.get(name)
        if info is None:
            raise QwencError(f"{path}: is damaged: it has no tensor {name}")
        if (info.dtype, info.shape) != (spec.dtype, spec.shape):
            raise QwencError(f"{path}: is damaged: {name} is {info.dtype} {info.shape}, expected {spec.dtype} {spec.shape}")
        if info.offset % ALIGN:
            raise QwencError(f"{path}: is damaged: {name} is not aligned to {ALIGN} bytes")


def _views(header: Header, data: np.ndarray) -> dict[str, np.ndarray]:
    tensors = {}
    for name, info in header.tensors.items():
        if name.startswith("pad.") or info.dtype not in NUMPY_DTYPES:
            continue
        tensors[name] = data[info.offset : info.offset + info.nbytes].view(NUMPY_DTYPES[info.dtype]).reshape(info.shape)
    return tensors
