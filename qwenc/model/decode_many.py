"""One token each of several contexts through the model: the sibling of decode.py, with weights read once for all of them.

Matrices are shared as in a mini-batch of prefill, on the weights of decode; attention is decode's own, one context after the other. A
token's sums are made in the same order as alone, so its bits do not depend on who runs beside it. (Not so for float32 weights, whose sums
for one token are made otherwise than for many: those run one after the other, see model/together.py.)
"""

from __future__ import annotations

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from qwenc.kernels.jit import jit
from qwenc.kernels.linear import read_row
from qwenc.kernels.pointwise import add_into, all_finite, copy_into
from qwenc.kernels.sync import agree_to_leave, barrier, claim, lap, leaving, now_ns
from qwenc.model.decode import attend, new_rows
from qwenc.model.matrices import matrix_tokens, prepare_normed, prepare_tokens
from qwenc.model.moe import experts_many
from qwenc.model.prefill import mlp_many
from qwenc.model.records import LM_HEAD, NORM, OTHER_LOOP, OUT, QKV


@jit
def decode_many_step(team, w, shape, like, arrays, b, tokens, positions, cos, sin):
    """Put tokens[i] at positions[i] of context i (int64 [contexts]) and leave the logits of the next ones in b.logits.

    like: the cache of one of the contexts; arrays int64 [contexts, arrays of a cache, 2]: where each array of a context's cache lies and
    how long its first axis is. cos, sin float32 [contexts, head_dim/2]. Work claims must be zero.
    """
    count = tokens.size
    now = now_ns()
    i = claim(team, 0)
    while i < count:
        read_row(w.embed, tokens[i], b.x, i * shape.hidden_room)
        i = claim(team, 0)
    rows = new_rows(shape.heads // shape.kv_heads, shape.head_room)
    barrier(team)
    now = lap(team, OTHER_LOOP, now)
    phase = 1
    for layer in range(shape.layers):
        prepare_normed(team, phase, w.qkv, w.input_norm, layer, shape, count, b)
        now = lap(team, NORM, now)
        matrix_tokens(team, phase + 1, w.qkv, layer, count, b.acts, b.qkv, copy_into)
        now = lap(team, QKV, now)

        for i in range(count):
            cache = cache_at(like, arrays[i])
            own = row_of(b, i)
            now = attend(team, phase + 10 + 2 * i, w, shape, cache, own, rows, layer, positions[i], cos[i : i + 1], sin[i : i + 1], now)

        prepare_tokens(team, phase + 2, w.o, count, b.attn, b.attn.shape[1], b)
        now = lap(team, NORM, now)
        agree_to_leave(team)
        matrix_tokens(team, phase + 3, w.o, layer, count, b.acts, b.x, add_into)
        now = lap(team, OUT, now)
        if leaving(team):
            break

        dense = w.mlp[layer]
        if dense >= 0:
            now = mlp_many(team, phase + 4, w, w.gate_up, w.down, shape, layer, dense, count, b, now)
        else:
            router, gate_up, down = w.router, w.expert_gate_up, w.expert_down
            now = experts_many(team, phase + 4, w, router, gate_up, down, shape, layer, -1 - dense, count, b.acts, b, now)
        phase += phases_per_layer(count)
        if team.rank == 0 and team.health[0] < 0 and not all_finite(b.x, 0, count * shape.hidden_room):
            team.health[0] = layer
    prepare_normed(team, phase, w.lm_head, w.final_norm, 0, shape, count, b)
    now = lap(team, NORM, now)
    matrix_tokens(team, phase + 1, w.lm_head, 0, count, b.acts, b.logits, copy_into)
    lap(team, LM_HEAD, now)


@numba.extending.register_jitable
def phases_per_layer(contexts):
    """Work counters that a layer needs: 4 for its matrices, at most 6 for its MLP, 2 for each context."""
    return 10 + 2 * contexts


def decode_many_phases(layers, contexts):
    """Work counters that a step needs."""
    return 1 + phases_per_layer(contexts) * layers + 2


# ---- one context of several -------------------------------------------------------------------------------------------------
def cache_at(like, arrays):
    """A cache record of the type of `like` over the arrays that lie at arrays[n, 0] and are arrays[n, 1] long (by first axis)."""
    raise NotImplementedError("runs in compiled code only")


@overload(cache_at)
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


@overload(array_at)
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


@overload(row_of)
def _row_of(b, i):
    own = ("qkv", "attn")
    parts = ", ".join(f"b.{field}[i : i + 1]" if field in own else f"b.{field}" for field in b.fields)
    names = {"Buffers": b.instance_class}
    exec(f"def run(b, i):\n    return Buffers({parts})", names)
    return names["run"]
