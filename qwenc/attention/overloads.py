"""Choosing code by the kind of cache, at compile time."""

from __future__ import annotations

from numba import types


def is_record(kind: types.Type, record: type) -> bool:
    """Whether a Numba type is that NamedTuple."""
    return isinstance(kind, types.BaseNamedTuple) and kind.instance_class is record
