"""A checkpoint folder as Hugging Face lays it out: config, tokenizer and chat template beside the weights."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from qwenc.checkpoint.safetensors_file import require_regular
from qwenc.checkpoint.shards import INDEX, Shards
from qwenc.config.model_config import ModelConfig
from qwenc.errors import QwencError


@dataclass(frozen=True, slots=True)
class Source:
    """The small files of a checkpoint. metadata holds them as text under the names of the packed file; tokenizer_json as bytes."""

    folder: Path
    config: ModelConfig
    metadata: dict[str, str]
    tokenizer_json: bytes | None


def read_source(folder: Path) -> Source:
    """Raises QwencError for a missing or malformed config.json, or another file that is there but not readable as what it should be."""
    config_path = folder / "config.json"
    config_bytes = _read(config_path)
    if config_bytes is None:
        raise QwencError(f"{folder}: has no config.json, so it is not a checkpoint")
    config = ModelConfig.from_dict(_parse(config_path, config_bytes), str(config_path))
    metadata = {"config": _decode(config_path, config_bytes)}
    parsed: dict[str, dict] = {}
    for key in ("generation_config", "tokenizer_config"):
        path = folder / f"{key}.json"
        content = _read(path)
        if content is not None:
            parsed[key] = _parse(path, content)
            metadata[key] = _decode(path, content)
    template = _chat_template(folder, parsed.get("tokenizer_config", {}))
    if template is not None:
        _require_text(template, f"{folder}: the chat template")
        metadata["chat_template"] = template
    return Source(folder, config, metadata, _read(folder / "tokenizer.json"))


def source_hash(source: Source, shards: Shards) -> str:
    """Names the content without reading the weights: small files, index, and name, size and header of every shard."""
    digest = hashlib.sha256()
    for key, text in sorted(source.metadata.items()):
        _add(digest, key.encode(), text.encode("utf-8", "replace"))
    _add(digest, source.tokenizer_json or b"", _read(source.folder / INDEX) or b"")
    for name, file in shards.files.items():
        _add(digest, name.encode(), str(file.header.file_bytes).encode(), file.header.json_bytes)
    return digest.hexdigest()


def _add(digest: hashlib._Hash, *fields: bytes) -> None:
    for field in fields:
        digest.update(len(field).to_bytes(8, "little"))
        digest.update(field)


def _chat_template(folder: Path, tokenizer_config: dict) -> str | None:
    """chat_template.jinja, else chat_template.json, else the one in tokenizer_config.json (of several, the one named "default")."""
    path = folder / "chat_template.jinja"
    content = _read(path)
    if content is not None:
        return _decode(path, content)
    path = folder / "chat_template.json"
    content = _read(path)
    found = _parse(path, content).get("chat_template") if content is not None else None
    if found is None:
        found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        named = [entry for entry in found if isinstance(entry, dict) and entry.get("name") == "default"]
        found = named[0].get("template") if named else None
    return found if isinstance(found, str) else None


def _require_text(text: str, what: str) -> None:
    """JSON can spell lone surrogates, which no file can hold as text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QwencError(f"{what} is no Unicode text: lone surrogate U+{ord(text[error.start]):04X}") from None


def _read(path: Path) -> bytes | None:
    """The file's bytes, or None when there is none."""
    require_regular(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise QwencError(f"{path}: cannot be read: {error.strerror}") from None
    if content.startswith(b"version https://git-lfs"):
        raise QwencError(f"{path}: is a Git LFS pointer, not the file (run `git lfs pull` in the checkpoint)")
    return content


def _parse(path: Path, content: bytes) -> dict:
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise QwencError(f"{path}: is not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise QwencError(f"{path}: is not a JSON object")
    return value


def _decode(path: Path, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise QwencError(f"{path}: is not UTF-8") from None
