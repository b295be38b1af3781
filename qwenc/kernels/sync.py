"""How the threads of a team work together inside one compiled step: a barrier, a work counter, a clock.

A barrier costs a fraction of a microsecond while all threads run. A thread that waits longer (a busy neighbour, more threads than
cores) sleeps until the last one comes, where the system is Linux; elsewhere it lets others run. Sleeping is better: who yields waits for
a whole time slice of its neighbour, who sleeps is woken at once.
"""

from __future__ import annotations

import platform
import sys

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwenc.kernels.jit import helper
from qwenc.kernels.level import ARM, LEVEL
from qwenc.kernels.vector import pointer_to
from qwenc.kernels.wide import I32, I64

# Looks at the barrier before a thread sleeps, at most and at least: about 300 and 30 µs. Waking takes as long as the former on a virtual
# machine, so sleeping is for waits that are longer. But a thread that waits for one that has no core keeps it from having one.
MOST_SPINS, LEAST_SPINS = 20000, 2000
HASTE_STEP, CALM_STEP = 4500, 100  # fewer looks after a wait that ended asleep, more again after one that did not
# slots of the sync array, a cache line apart. STOP: the caller asks to leave; LEAVING: rank 0 has agreed; BROKEN: a thread is gone,
# nobody waits any more
# SLEEPERS: threads that the last one to arrive has to wake; HASTE: by how much less than MOST_SPINS a thread looks, kept from step to step
ARRIVED, GENERATION, STOP, LEAVING, BROKEN, SLEEPERS, HASTE = 0, 8, 16, 24, 32, 40, 48
SYNC_SLOTS = 56
# number of the system call futex, by machine; None: sched_yield instead
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" and sys.maxsize > 2**32 else None
FUTEX_WAIT, FUTEX_WAKE = 128, 129  # among threads of one process
NAP_NS = 50_000_000  # a sleeping thread looks this often whether another one is gone
CLOCK_MONOTONIC = 6 if sys.platform == "darwin" else 1


def new_sync() -> np.ndarray:
    """The int64 array that a team meets at."""
    return np.zeros(SYNC_SLOTS, np.int64)


def begin_step(sync: np.ndarray) -> None:
    """Make it ready for a step, which the one before may have left early."""
    sync[:HASTE] = 0


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
def sleep_while(typingctx, array, index, value):
    """Sleep while an int64 slot holds `value`, at most NAP_NS; may return early."""

    def codegen(context, builder, sig, values):
        if FUTEX is None:
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(I32, []), "sched_yield"), [])
        else:  # it compares the low 32 bits, the first ones on the machines named above
            nap = cgutils.alloca_once_value(builder, ir.Constant(ir.ArrayType(I64, 2), [0, NAP_NS]))
            word = _word(context, builder, sig.args[0], values[0], values[1])
            _futex(builder, word, FUTEX_WAIT, values[2], builder.ptrtoint(nap, I64))
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), codegen


@intrinsic
def wake_all(typingctx, array, index):
    """Wake every thread that sleeps on a slot."""

    def codegen(context, builder, sig, values):
        if FUTEX is not None:
            _futex(builder, _word(context, builder, sig.args[0], *values), FUTEX_WAKE, I64(2**31 - 1), I64(0))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


def _futex(builder, word, operation, value, timeout):
    kind = ir.FunctionType(I64, [I64] * 7)
    function = cgutils.get_or_insert_function(builder.module, kind, "syscall")
    address = builder.ptrtoint(word, I64)
    builder.call(function, [I64(FUTEX), address, I64(operation), builder.and_(value, I64(2**32 - 1)), timeout, I64(0), I64(0)])


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
        if fetch_add(team.sync, SLEEPERS, 0) > 0:
            wake_all(team.sync, GENERATION)
        return
    looks, asleep = 0, False
    haste = min(max(0, read_acquire(team.sync, HASTE)), MOST_SPINS - LEAST_SPINS)  # several threads may have moved it beyond
    while read_acquire(team.sync, GENERATION) == generation:
        looks += 1
        if looks < MOST_SPINS - haste:
            relax()
        elif read_acquire(team.sync, BROKEN) != 0:
            return
        else:
            asleep = True
            fetch_add(team.sync, SLEEPERS, 1)  # before it looks again: the last one to arrive sees either this or a sleeper
            sleep_while(team.sync, GENERATION, generation)
            fetch_add(team.sync, SLEEPERS, -1)
    if asleep:
        fetch_add(team.sync, HASTE, min(HASTE_STEP, MOST_SPINS - LEAST_SPINS - haste))
    elif haste > 0:
        fetch_add(team.sync, HASTE, -min(CALM_STEP, haste))


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
def piece_of(number, tiles, threads):
    """[first, end) of the row tiles that claim `number` stands for; empty beyond the last. Every thread begins with a long run, since
    memory is read best in long runs: half of its fair share. The next ones are half of what is left, and so on, so that uneven cores
    end together."""
    least = max(1, tiles // (32 * threads))
    first = 0
    size = max(least, tiles // (2 * threads))
    while number >= threads and size > least:
        first += threads * size
        number -= threads
        size = max(least, (tiles - first) // (2 * threads))
    first += number * size
    return min(first, tiles), min(first + size, tiles)


@helper
def next_piece(team, phase, tiles):
    """[first, end) of the next run of row tiles of a phase that nobody has taken. The first run of each thread is that of its rank."""
    return piece_of(team.threads + claim(team, phase), tiles, team.threads)


@helper
def chunk_of(tiles):
    """Row tiles per claim: small enough that uneven cores end together, large enough to read memory in long runs."""
    return max(1, tiles // 64)
