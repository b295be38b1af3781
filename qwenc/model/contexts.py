"""One context of several, inside a compiled step: its cache and its rows of the buffers.

These hand arrays to a step that counts references, so they count them too (allocates=True).
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from qwenc.kernels.jit import by_type


def cache_at(like, arrays):
    """A cache record of the type of `like` over the arrays that lie at arrays[n, 0] and are arrays[n, 1] long (by first axis)."""
    raise NotImplementedError("runs in compiled code only")


@by_type(cache_at, allocates=True)
def _cache_at(like, arrays):
    names: dict[str, object] = {"array_at": array_at}
    source, _count = _rebuild(like, "like", 0, names)
    exec(f"def run(like, arrays):\n    return {source}", names)
    return names["run"]


def _rebuild(kind: types.Type, path: str, first: int, names: dict[str, object]) -> tuple[str, int]:
    """(an expression that makes a record like `path`, number of the array after its last one)."""
    if isinstance(kind, types.Array):
        return f"array_at({path}, arrays[{first}, 0], arrays[{first}, 1])", first + 1
    if not isinstance(kind, types.BaseNamedTuple):
        return path, first
    parts = []
    for field, inner in zip(kind.fields, kind.types, strict=True):
        part, first = _rebuild(inner, f"{path}.{field}", first, names)
        parts.append(part)
    names[kind.instance_class.__name__] = kind.instance_class
    return f"{kind.instance_class.__name__}({', '.join(parts)})", first


def array_at(like, address, count):
    """An array [count, …] of the type and inner sizes of `like`, over the memory at `address`."""
    raise NotImplementedError("runs in compiled code only")


@by_type(array_at, allocates=True)
def _array_at(like, address, count):
    dtype = like.dtype
    sizes = ", ".join(["count", *(f"like.shape[{axis}]" for axis in range(1, like.ndim))])
    names = {"carray": numba.carray, "pointer_from": pointer_from, "dtype": dtype}
    exec(f"def run(like, address, count):\n    return carray(pointer_from(address), ({sizes},), dtype)", names)
    return names["run"]


@intrinsic
def pointer_from(typingctx, address):
    """A number as a pointer."""

    def codegen(context, builder, sig, values):
        return builder.inttoptr(values[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), codegen


def row_of(b, i):
    """The buffers of one context: its row of qkv and of attn, the rest as it is."""
    raise NotImplementedError("runs in compiled code only")


@by_type(row_of, allocates=True)
def _row_of(b, i):
    own = ("qkv", "attn")
    parts = ", ".join(f"b.{field}[i : i + 1]" if field in own else f"b.{field}" for field in b.fields)
    names = {"Buffers": b.instance_class}
    exec(f"def run(b, i):\n    return Buffers({parts})", names)
    return names["run"]
