"""How the threads of a team work together inside one compiled step: a barrier, a work counter, a clock.

A barrier costs a fraction of a microsecond while all threads run. A thread that waits longer (a busy neighbour, more threads than
cores) gives its core away instead of spinning on.
"""

from __future__ import annotations

import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwenc.kernels.emit import I32, I64
from qwenc.kernels.jit import helper
from qwenc.kernels.level import ARM, LEVEL
from qwenc.kernels.simd import pointer_to

SPINS = 2000  # looks at the barrier before the thread yields: about 30 µs
# slots of the sync array, a cache line apart. STOP: the caller asks to leave; LEAVING: rank 0 has agreed; BROKEN: a thread is gone,
# nobody waits any more
ARRIVED, GENERATION, STOP, LEAVING, BROKEN = 0, 8, 16, 24, 32
SYNC_SLOTS = 40
CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1


def new_sync() -> np.ndarray:
    """The int64 array that a team meets at."""
    return np.zeros(SYNC_SLOTS, np.int64)


def _word(context, builder, array_type, array, index):
    return builder.bitcast(pointer_to(context, builder, array_type, array, index), I64.as_pointer())


@intrinsic
def fetch_add(typingctx, array, index, amount):
    """Add to an int64 slot, atomically; returns what it held."""

    def codegen(context, builder, sig, values):
        return builder.atomic_rmw("add", _word(context, builder, sig.args[0], values[0], values[1]), values[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def read_acquire(typingctx, array, index):
    """An int64 slot, with everything that was written before it."""

    def codegen(context, builder, sig, values):
        return builder.load_atomic(_word(context, builder, sig.args[0], *values), "acquire", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def relax(typingctx):
    """Tell the core that this is a spin loop."""

    def codegen(context, builder, sig, values):
        void = ir.VoidType()
        if LEVEL.machines == ARM:
            # the instruction barrier lasts about as long as x86's pause; `yield` does nothing on most cores
            isb = cgutils.get_or_insert_function(builder.module, ir.FunctionType(void, [I32]), "llvm.aarch64.isb")
            builder.call(isb, [I32(15)])
        elif LEVEL.vector_bytes > 16:
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(void, []), "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def yield_core(typingctx):
    """Let another thread have this core (sched_yield)."""

    def codegen(context, builder, sig, values):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield")
        builder.call(function, [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def now_ns(typingctx):
    """Nanoseconds of the monotonic clock (about 25 ns a call)."""

    def codegen(context, builder, sig, values):
        spec = cgutils.alloca_once(builder, ir.ArrayType(I64, 2))
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, [I32, spec.type]), "clock_gettime")
        builder.call(function, [I32(CLOCK_MONOTONIC), spec])
        seconds, nanos = (builder.load(builder.gep(spec, [I32(0), I32(i)])) for i in (0, 1))
        return builder.add(builder.mul(seconds, I64(1_000_000_000)), nanos)

    return types.int64(), codegen


@helper
def barrier(team):
    """Wait until every thread of the team is here."""
    if team.threads == 1:
        return
    generation = read_acquire(team.sync, GENERATION)
    if fetch_add(team.sync, ARRIVED, 1) == team.threads - 1:
        fetch_add(team.sync, ARRIVED, -team.threads)
        fetch_add(team.sync, GENERATION, 1)
        return
    looks = 0
    while read_acquire(team.sync, GENERATION) == generation:
        looks += 1
        if looks < SPINS:
            relax()
        elif read_acquire(team.sync, BROKEN) != 0:
            return
        else:
            yield_core()


@helper
def claim(team, phase):
    """The next piece of work of a phase that no thread has taken yet: 0, 1, 2, …"""
    return fetch_add(team.claims, phase, 1)


@helper
def lap(team, slot, since):
    """Rank 0 adds the nanoseconds since `since` to a slot of the timer. Returns the time now."""
    if team.rank != 0:
        return since
    now = now_ns()
    team.timer[slot] += now - since
    return now


@helper
def agree_to_leave(team):
    """Rank 0 passes the caller's wish to stop on. Between two barriers; the threads look (`leaving`) between the second of them and a
    third, so
    that all see the same answer: one that left alone would keep the others waiting for ever."""
    if team.rank == 0 and read_acquire(team.sync, STOP) != 0:
        fetch_add(team.sync, LEAVING, 1)


@helper
def leaving(team):
    """Whether all threads leave the step now."""
    return read_acquire(team.sync, LEAVING) != 0


@helper
def chunk_of(tiles):
    """Row tiles per claim: small enough that uneven cores end together, large enough to read memory in long runs."""
    return max(1, tiles // 64)
