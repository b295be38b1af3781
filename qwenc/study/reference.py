"""Logits of the exact arm, chunk by chunk, in a folder: kept for the next study if the user names the folder, else for this one only."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qwenc.errors import QwencError, UsageError

FORMAT = "qwenc-reference-1"


class References:
    """A folder of `NAME.npy`, float32 [positions, vocab], and of what they were made with. Close it."""

    def __init__(self, folder: str | None):
        self._temporary = None if folder else tempfile.TemporaryDirectory(prefix="qwenc-")
        self.folder = Path(folder or self._temporary.name)  # type: ignore[union-attr]

    def open(self, conditions: Mapping[str, Any]) -> None:
        """Raises UsageError for a folder that holds logits of something else."""
        header = self.folder / "reference.json"
        wanted = {"format": FORMAT, **conditions}
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not header.exists():
                if any(self.folder.iterdir()):
                    raise UsageError(f"{self.folder} holds files that are no reference logits: name another folder")
                _write(header, json.dumps(wanted).encode())
                return
            there = json.loads(header.read_bytes())
        except OSError as error:
            raise QwencError(f"cannot keep reference logits in {self.folder}: {error.strerror}") from None
        except ValueError:
            there = None
        if not isinstance(there, dict):
            raise UsageError(f"{self.folder} holds no reference logits that this qwenc reads")
        for name, value in wanted.items():
            if there.get(name) != value:
                raise UsageError(f"{self.folder} was made with {name} {there.get(name)!r:.80}, not {value!r:.80}")

    def get(self, name: str) -> np.ndarray | None:
        """Logits [positions, vocab], mapped; None if they are not there."""
        try:
            return np.load(self.folder / f"{name}.npy", mmap_mode="r")
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise QwencError(f"cannot read {self.folder / name}.npy: {error}") from None

    def put(self, name: str, logits: np.ndarray) -> np.ndarray:
        """Keeps them; a file appears when it is complete."""
        part = self.folder / f".{name}.{os.getpid()}.npy"
        try:
            np.save(part, logits)
            os.replace(part, self.folder / f"{name}.npy")
        except OSError as error:
            raise QwencError(f"cannot keep reference logits in {self.folder}: {error.strerror}") from None
        finally:
            part.unlink(missing_ok=True)
        return logits

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()


def _write(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, path)
