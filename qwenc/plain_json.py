"""JSON that can always be written and always be read: no NaN, no infinity, no text that is not Unicode."""

from __future__ import annotations

import json
import math
import re
from typing import Any


def to_json(record: dict[str, Any], indent: int | None = None) -> str:
    """One JSON document and a line end. Numbers that JSON cannot hold (NaN, infinity) become null; lone surrogates (from file names that
    are no UTF-8) are escaped, so that it can always be written."""
    text = json.dumps(_plain(record), ensure_ascii=False, allow_nan=False, indent=indent)
    return re.sub("[\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in (sorted(value) if isinstance(value, (set, frozenset)) else value)]
    if value is None or isinstance(value, (str, int)):
        return value
    return _plain(value.item()) if hasattr(value, "item") else str(value)
