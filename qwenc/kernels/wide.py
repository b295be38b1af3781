"""Writing SIMD instructions on 16 lanes: memory, constants, what is done lane by lane. `emit.py` adds the products.

A kernel works on 16 lanes (16 rows of a matrix, 16 keys, 16 dimensions of V), which lie in native vectors: one of 64 bytes on AVX-512,
two of 32 on AVX2, four of 16 on Arm.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from llvmlite import ir
from numba.core import cgutils

from qwenc.kernels.level import LEVEL, Level, host_features

LANES = 16

I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
F32 = ir.FloatType()
F32X16 = ir.VectorType(F32, LANES)
I32X16 = ir.VectorType(I32, LANES)
I16X16 = ir.VectorType(I16, LANES)

AVX2_SUMS = 4  # of all 16 lanes, two registers each: half of the 16
NEON_SUMS = 16  # of 32 registers: the others hold what is multiplied
SMALL, SMALL_BITS = 12582912.0, 0x4B400000  # 1.5·2^23 as a float and its bits

Value = Any  # an llvmlite value
Wide = list  # 16 lanes as native vectors

HAS_F16C = "f16c" in host_features() or LEVEL.machines[0] != "x86_64"


class Word(list):
    """A Wide of one word in every lane."""


E = TypeVar("E", bound="WideEmitter")


class WideEmitter:
    """Emits wide operations into `builder` for one SIMD level: on all 16 lanes, or (see `slices`) on those of some native vectors."""

    def __init__(self, builder: ir.IRBuilder, level: Level = LEVEL, places: Sequence[int] | None = None):
        self.b = builder
        self.level = level
        self.places = range(64 // level.vector_bytes) if places is None else places
        self.parts = len(self.places)
        self.i8 = ir.VectorType(I8, level.vector_bytes)
        self.i16 = ir.VectorType(I16, level.vector_bytes // 2)
        self.i32 = ir.VectorType(I32, level.vector_bytes // 4)
        self.f32 = ir.VectorType(F32, level.vector_bytes // 4)

    def slices(self: E, sums: int) -> list[E]:
        """What a tile does one after the other, when one lane takes `sums` sums: as many native vectors at a time as leave their sums in
        half of the registers; on AVX-512 there is only one."""
        room = NEON_SUMS if self.level.name == "neon" else 2 * AVX2_SUMS if self.level.few_registers else sums * self.parts
        return self._split(max(1, min(self.parts, room // sums)))

    def singles(self: E) -> list[E]:
        """Native vectors one by one on Arm, where many small ones leave no room for all; elsewhere all at once."""
        return self._split(1) if self.level.name == "neon" else [self]

    def _split(self: E, at_once: int) -> list[E]:
        return [type(self)(self.b, self.level, self.places[i : i + at_once]) for i in range(0, self.parts, at_once)]

    def batches(self, sums: int, halves: int = 1) -> list[range]:
        """The numbers of `sums` sums, of `halves` as many registers each, that a tile does one after the other: on AVX2 as many at a time
        as stay in registers."""
        at_once = AVX2_SUMS // halves if self.level.few_registers else sums
        return [range(first, min(sums, first + at_once)) for first in range(0, sums, at_once)]

    def settle(self, wides: Sequence[Wide]) -> list[Wide]:
        """The same values, which LLVM must have made before it goes on. Left to itself it finishes one native vector before it begins the
        next, and keeps all factors of the first on the stack for it where registers are few."""
        values = [part for wide in wides for part in wide]
        if not self.level.few_registers or len(values) == 1:
            return list(wides)
        size = len(wides[0])
        kinds = [value.type for value in values]
        tied = ",".join(["=x"] * len(values) + [str(i) for i in range(len(values))])
        nothing = ir.InlineAsm(ir.FunctionType(ir.LiteralStructType(kinds), kinds), "", tied)
        made = self.b.call(nothing, values)
        parts = [self.b.extract_value(made, i) for i in range(len(values))]
        return [parts[i : i + size] for i in range(0, len(parts), size)]

    def spare_rbp(self) -> None:
        """Keep addresses of the loop around it out of the register rbp: an Intel core reads memory through it up to a fifth slower
        (docs/benchmarks.md), and LLVM takes it like any other."""
        if self.level.x86:
            self.b.call(ir.InlineAsm(ir.FunctionType(ir.VoidType(), []), "", "~{rbp}", side_effect=True), [])

    # ---- memory -------------------------------------------------------------------------------------------------------
    def at(self, pointer: Value, offset: Value | int) -> Value:
        """`pointer` (i8*) moved by `offset` bytes."""
        if isinstance(offset, int):
            offset = I64(offset)
        return self.b.gep(pointer, [offset])

    def load(self, pointer: Value, kind: ir.Type, offset: int = 0) -> Wide:
        """64 bytes at pointer + offset as native vectors of `kind`."""
        step = self.level.vector_bytes
        return [self._load_one(self.at(pointer, offset + i * step), kind) for i in self.places]

    def _load_one(self, pointer: Value, kind: ir.Type) -> Value:
        return self.b.load(self.b.bitcast(pointer, kind.as_pointer()), align=1)

    def store(self, wide: Wide, pointer: Value, offset: int = 0) -> None:
        step = self.level.vector_bytes
        for i, part in zip(self.places, wide, strict=True):
            self.b.store(part, self.b.bitcast(self.at(pointer, offset + i * step), part.type.as_pointer()), align=1)

    def load_half(self, pointer: Value) -> Wide:
        """16 half-precision numbers as float32."""
        lanes = self.level.vector_bytes // 4
        return [self._widen_half(self.at(pointer, 2 * lanes * i), lanes) for i in self.places]

    def _widen_half(self, pointer: Value, lanes: int) -> Value:
        if HAS_F16C:
            return self.b.fpext(self._load_one(pointer, ir.VectorType(ir.HalfType(), lanes)), self.f32)
        # No instruction for it: move the bits to the place of a float's and multiply by 2^112 to mend the exponent, which also makes
        # subnormals right; what became 2^16 or more was infinite or NaN.
        b, c = self.b, self._splat_constant
        bits = b.zext(self._load_one(pointer, ir.VectorType(I16, lanes)), self.i32)
        magnitude = b.shl(b.and_(bits, c(self.i32, 0x7FFF)), c(self.i32, 13))
        scaled = b.fmul(b.bitcast(magnitude, self.f32), c(self.f32, 2.0**112))
        special = b.or_(magnitude, c(self.i32, 0x7F800000))
        is_special = b.icmp_unsigned(">=", magnitude, c(self.i32, 0x7C00 << 13))
        finite_or_not = b.select(is_special, special, b.bitcast(scaled, self.i32))
        sign = b.shl(b.and_(bits, c(self.i32, 0x8000)), c(self.i32, 16))
        return b.bitcast(b.or_(finite_or_not, sign), self.f32)

    def prefetch(self, pointer: Value, cache: int = 2) -> None:
        """Ask for the cache line at `pointer`, which may lie anywhere, to be in the second-level (or first-level) cache soon."""
        kinds = [I8.as_pointer(), I32, I32, I32]
        function = cgutils.get_or_insert_function(self.b.module, ir.FunctionType(ir.VoidType(), kinds), "llvm.prefetch.p0i8")
        self.b.call(function, [pointer, I32(0), I32(4 - cache), I32(1)])  # to read, level, data

    # ---- constants and broadcasts --------------------------------------------------------------------------------------
    def _splat_constant(self, kind: ir.VectorType, value: float) -> Value:
        return ir.Constant(kind, [value] * kind.count)

    def constant(self, kind: ir.VectorType, value: float) -> Wide:
        return [self._splat_constant(kind, value)] * self.parts

    def splat(self, scalar: Value, kind: ir.VectorType) -> Wide:
        """One scalar in every lane."""
        undefined = ir.Constant(kind, ir.Undefined)
        one = self.b.insert_element(undefined, scalar, I32(0))
        every = self.b.shuffle_vector(one, undefined, ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count))
        return [every] * self.parts

    def load_splat(self, pointer: Value, offset: int, kind: ir.VectorType) -> Wide:
        """The 4 bytes at pointer + offset in every 32-bit lane, as native vectors of `kind`."""
        word = F32 if kind.element == F32 else I32
        scalar = self.b.load(self.b.bitcast(self.at(pointer, offset), word.as_pointer()), align=1)
        splat = self.splat(scalar, self.f32 if word == F32 else self.i32)
        return [self.b.bitcast(splat[0], kind)] * self.parts

    def load_word(self, pointer: Value, index: int, words: int, kind: ir.VectorType) -> Wide:
        """Word `index` of the `words` at `pointer` in every 32-bit lane. Arm loads four words at once, since its instructions take a
        factor from any lane of a register, while a load into every lane takes a turn of the SIMD units."""
        if self.level.name != "neon" or words % 4:
            return self.load_splat(pointer, 4 * index, kind)
        word = F32 if kind.element == F32 else I32
        four = self._load_one(self.at(pointer, index // 4 * 16), ir.VectorType(word, 4))
        every = self.b.shuffle_vector(four, four, ir.Constant(ir.VectorType(I32, 4), [index % 4] * 4))
        return Word([self.b.bitcast(every, kind)] * self.parts)

    # ---- lane-wise -----------------------------------------------------------------------------------------------------
    def each(self, operation: Callable[..., Value], *wides: Wide) -> Wide:
        return [operation(*parts) for parts in zip(*wides, strict=True)]

    def to_float(self, wide: Wide) -> Wide:
        return [self.b.sitofp(part, self.f32) for part in wide]

    def small_start(self, offset: Wide) -> Wide:
        """Where an integer sum has to start that shall be `offset` plus what is added, and ends in `small_to_float`."""
        if self.level.name != "neon":
            return offset
        return self.each(self.b.add, offset, self.constant(self.i32, SMALL_BITS))

    def small_to_float(self, sums: Wide) -> Wide:
        """Integers within ±2^22, whose sums began with `small_start`, as floats. Arm converts slowly; there the sum was made in the bits of
        the float SMALL, whose last bit counts ones."""
        if self.level.name != "neon":
            return self.to_float(sums)
        small = self._splat_constant(self.f32, SMALL)
        return [self.b.fsub(self.b.bitcast(part, self.f32), small) for part in sums]

    def fma(self, x: Wide, y: Wide, z: Wide) -> Wide:
        """x·y + z with one rounding, on every level."""
        kind = x[0].type
        function = self._function(f"llvm.fma.v{kind.count}f32", kind, [kind] * 3)
        return self.each(lambda a, b, c: self.b.call(function, [a, b, c]), x, y, z)

    def join(self, wide: Wide) -> Value:
        """Native vectors as one 16-lane vector."""
        values = list(wide)
        while len(values) > 1:
            pairs = zip(values[::2], values[1::2], strict=True)
            values = [self._concat(low, high) for low, high in pairs]
        return values[0]

    def _concat(self, low: Value, high: Value) -> Value:
        mask = ir.Constant(ir.VectorType(I32, 2 * low.type.count), list(range(2 * low.type.count)))
        return self.b.shuffle_vector(low, high, mask)

    # ---- codes of a few bits --------------------------------------------------------------------------------------------
    def low_nibbles(self, codes: Wide) -> Wide:
        return [self.b.and_(part, self._splat_constant(self.i8, 15)) for part in codes]

    def two_bits(self, codes: Wide, which: int, lift: int = 0) -> Wide:
        """The 2-bit code number `which` (0 the lowest) of every byte, times 2^lift, as a byte."""
        return [self.b.and_(part, self._splat_constant(self.i8, 3 << lift)) for part in self.moved(codes, lift - 2 * which)]

    def moved(self, codes: Wide, left: int) -> Wide:
        """The bits of 32-bit words `left` bits up, or down if it is negative: bytes, whose upper or lower bits then are their
        neighbours'."""
        if left == 0:
            return codes
        shift = self.b.shl if left > 0 else self.b.lshr
        words = [shift(self.b.bitcast(part, self.i32), self._splat_constant(self.i32, abs(left))) for part in codes]
        return [self.b.bitcast(part, self.i8) for part in words]

    def moved_down(self, codes: Wide, bits: Value) -> Wide:
        """The bits of 32-bit words `bits` (i64) bits down: bytes, whose upper bits then are their neighbours'."""
        words = self.splat(self.b.trunc(bits, I32), self.i32)
        return [self.b.bitcast(self.b.lshr(self.b.bitcast(part, self.i32), word), self.i8) for part, word in zip(codes, words, strict=True)]

    def high_nibbles(self, codes: Wide) -> Wide:
        return [self.b.lshr(part, self._splat_constant(self.i8, 4)) for part in codes]

    def _function(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> Value:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, arguments), name)


class Accumulators:
    """`count` wide sums that live across a loop: stack slots, which LLVM turns into registers. halves: native vectors of each, for as many
    lanes as one of the others has."""

    def __init__(self, e: WideEmitter, kind: ir.VectorType, count: int, start: Callable[[int], Wide] | None = None, halves: int = 1):
        self.e = e
        zero = e.constant(kind, 0) * halves
        self.slots = [[cgutils.alloca_once(e.b, kind) for _ in range(halves * e.parts)] for _ in range(count)]
        for i in range(count):
            self.set(i, start(i) if start else zero)

    def get(self, i: int) -> Wide:
        return [self.e.b.load(slot) for slot in self.slots[i]]

    def set(self, i: int, wide: Wide) -> None:
        for slot, part in zip(self.slots[i], wide, strict=True):
            self.e.b.store(part, slot)
