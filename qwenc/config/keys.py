"""Typed look-ups in a JSON object: a wrong type or a missing key is one QwencError that names the file and the key."""

from __future__ import annotations

import math
from typing import Any

from qwenc.errors import QwencError

_MISSING: Any = object()
LARGEST = 1e30  # well inside float32


class Keys:
    """`values` is a parsed JSON object, `source` says where it is from. null counts as missing, as it does in transformers."""

    def __init__(self, values: dict, source: str) -> None:
        self.values = values
        self.source = source

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def size(self, name: str, default: int = _MISSING, most: int = 2**31 - 1) -> int:
        """A whole number from 1 to `most` (or the default)."""
        value = self._get(name, default)
        if value is default:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name, "a whole number")
        if not 1 <= value <= most:
            raise self._wrong(name, "at least 1" if value < 1 else f"at most {most}")
        return value

    def number(self, name: str, default: float = _MISSING, least: float = 0.0, most: float = LARGEST) -> float:
        """A finite number from `least` to `most` (or the default)."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self._wrong(name, "a number")
        if value is default:
            return float(value)
        if value < 0 or value != value or value in (math.inf, -math.inf):
            raise self._wrong(name, "finite and not negative")
        if not least <= value <= most:  # a whole number of any length compares, but not every one becomes a float
            raise self._wrong(name, f"at least {least:g}" if value < least else f"at most {most:g}")
        return float(value)

    def optional_number(self, name: str, least: float = 0.0, most: float = LARGEST) -> float | None:
        return self.number(name, least=least, most=most) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def string(self, name: str, default: str = _MISSING) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def table(self, name: str) -> dict:
        value = self._get(name, _MISSING)
        if not isinstance(value, dict):
            raise self._wrong(name, "a JSON object")
        return value

    def string_list(self, name: str) -> tuple[str, ...]:
        value = self._get(name, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of strings")
        return tuple(value)

    def id_list(self, name: str) -> tuple[int, ...]:
        """Whole numbers, written as one number or as a list; () when missing."""
        value = self._get(name, [])
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in items):
            raise self._wrong(name, "a whole number or a list of them")
        return tuple(items)

    def optional_id(self, name: str, outer: Keys) -> int | None:
        """The first of id_list here or in `outer`, or None."""
        ids = self.id_list(name) or outer.id_list(name)
        return ids[0] if ids else None

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _MISSING:
            raise QwencError(f"{self.source}: {name} is missing")
        return default

    def _wrong(self, name: str, wanted: str) -> QwencError:
        shown = repr(self.values.get(name))
        return QwencError(f"{self.source}: {name} must be {wanted}, not {shown if len(shown) <= 60 else shown[:57] + '...'}")
