"""Writing SIMD instructions: the LLVM side of the kernels.

A kernel works on 16 lanes (16 rows of a matrix, 16 keys, 16 dimensions of V). An `Emitter` holds them as a list of native vectors, one
of 64 bytes on AVX-512, two of 32 on AVX2, four of 16 on Arm, and turns "sum of four products in each lane" into the one instruction
that does it: `vpdpbusd`, `vpmaddubsw`+`vpmaddwd`, `sdot`, or plain code anywhere else. All of them give the same integers.

Needed because Numba widens int32·int32 to int64, which keeps LLVM from seeing an 8-bit dot product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


class Emitter:
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

    def slices(self, sums: int) -> list[Emitter]:
        """What a tile does one after the other, when one lane takes `sums` sums: as many native vectors at a time as leave their sums in
        half of the registers; on AVX-512 there is only one."""
        room = NEON_SUMS if self.level.name == "neon" else 2 * AVX2_SUMS if self.level.few_registers else sums * self.parts
        return self._split(max(1, min(self.parts, room // sums)))

    def singles(self) -> list[Emitter]:
        """Native vectors one by one on Arm, where many small ones leave no room for all; elsewhere all at once."""
        return self._split(1) if self.level.name == "neon" else [self]

    def _split(self, at_once: int) -> list[Emitter]:
        return [Emitter(self.b, self.level, self.places[i : i + at_once]) for i in range(0, self.parts, at_once)]

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

    # ---- 8-bit dot products --------------------------------------------------------------------------------------------
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

    def high_nibbles(self, codes: Wide) -> Wide:
        return [self.b.lshr(part, self._splat_constant(self.i8, 4)) for part in codes]

    def prepare_signed(self, codes: Wide) -> Wide:
        """Signed weights as `dot_signed` wants them; do it once per load, not once per token."""
        if not self.level.vnni:
            return codes
        return [self.b.xor(part, self._splat_constant(self.i8, 128)) for part in codes]  # to unsigned: code + 128

    def dot_signed(self, acc: Wide, weights: Wide, x: Wide) -> Wide:
        """acc + 4-term products of signed weights (prepared) and signed x, both within ±127."""
        if self.level.vnni:
            return self._vpdpbusd(acc, weights, x)
        if self.level.shorts:
            # vpmaddubsw takes one unsigned side: |x|, with the sign of x moved to the weight
            magnitude = [self._abs8(x[0])] * self.parts
            return self._maddubs_wide(acc, magnitude, self.each(self._sign8, weights, x))
        return self._dot_generic(acc, weights, x)

    def dot_small(self, acc: Wide, small: Wide, signed: Wide) -> Wide:
        """acc + 4-term products of unsigned numbers up to 127 (up to 255 where an instruction takes them, `vnni`) and signed ones within
        ±127."""
        if self.level.vnni:
            return self._vpdpbusd(acc, small, signed)
        if self.level.shorts:
            return self._maddubs_wide(acc, small, signed)
        return self._dot_generic(acc, small, signed)

    # Where `level.words`: numbers of up to 15 bits times bytes. A sum of 16 lanes then takes two 32-bit lanes each.
    def load_words(self, pointer: Value, offset: int = 0) -> Wide:
        """64 signed bytes at pointer + offset as 16-bit words, in twice as many native vectors."""
        half = self.level.vector_bytes // 2
        starts = [offset + place * self.level.vector_bytes + part for place in self.places for part in (0, half)]
        return [self.b.sext(self._load_one(self.at(pointer, start), ir.VectorType(I8, half)), self.i16) for start in starts]

    def load_quad(self, pointer: Value, index: int) -> Wide:
        """The four 16-bit words number `index` at `pointer` in every 64 bits."""
        four = self.b.load(self.b.bitcast(self.at(pointer, 8 * index), I64.as_pointer()), align=1)
        every = self.splat(four, ir.VectorType(I64, self.level.vector_bytes // 8))
        return [self.b.bitcast(every[0], self.i16)] * (2 * self.parts)

    def dot_words(self, acc: Wide, words: Wide, quad: Wide) -> Wide:
        """acc + products of words and a quad, added in pairs: two 32-bit lanes for each of the 16."""
        return self.each(lambda a, w, q: self.b.add(a, self._maddwd(w, q)), acc, words, quad)

    def word_sums(self, acc: Wide) -> Wide:
        """What `dot_words` added, 16 lanes."""
        count = self.i32.count
        even, odd = (ir.Constant(ir.VectorType(I32, count), list(range(first, 2 * count, 2))) for first in (0, 1))
        both = zip(acc[::2], acc[1::2], strict=True)
        return [self.b.add(self.b.shuffle_vector(x, y, even), self.b.shuffle_vector(x, y, odd)) for x, y in both]

    # Sixteen bytes at a time, which every level does within a register.
    def load_eight_words(self, pointer: Value, offset: int) -> Wide:
        """The eight 16-bit words at pointer + offset in every 16 bytes."""
        eight = self._load_one(self.at(pointer, offset), ir.VectorType(I16, 8))
        every = ir.Constant(ir.VectorType(I32, self.i16.count), list(range(8)) * (self.i16.count // 8))
        return [self.b.shuffle_vector(eight, eight, every)] * self.parts

    def eights(self, codes: Wide, which: int) -> Wide:
        """The first (0) or last (1) eight of every sixteen unsigned bytes as 16-bit words."""
        size = self.i8.count
        lanes = [[i, size + i] for first in range(8 * which, size, 16) for i in range(first, first + 8)]
        mask = ir.Constant(ir.VectorType(I32, size), [i for pair in lanes for i in pair])
        zero = self._splat_constant(self.i8, 0)
        return [self.b.bitcast(self.b.shuffle_vector(part, zero, mask), self.i16) for part in codes]

    def rounded_products(self, x: Wide, y: Wide) -> Wide:
        """x·y / 2^15 of 16-bit words, rounded."""
        size = self.level.vector_bytes
        if self.level.x86:
            name = {16: "ssse3.pmul.hr.sw.128", 32: "avx2.pmul.hr.sw", 64: "avx512.pmul.hr.sw.512"}[size]
            function = self._function(f"llvm.x86.{name}", self.i16, [self.i16] * 2)
        elif self.level.name == "neon":
            function = self._function("llvm.aarch64.neon.sqrdmulh.v8i16", self.i16, [self.i16] * 2)
        else:
            return self.each(self._rounded_product, x, y)
        return self.each(lambda a, c: self.b.call(function, [a, c]), x, y)

    def _rounded_product(self, x: Value, y: Value) -> Value:
        wide = ir.VectorType(I32, self.i16.count)
        product = self.b.mul(self.b.sext(x, wide), self.b.sext(y, wide))
        half = self._splat_constant(wide, 1 << 14)
        return self.b.trunc(self.b.ashr(self.b.add(product, half), self._splat_constant(wide, 15)), self.i16)

    def narrow(self, first: Wide, second: Wide) -> Wide:
        """Words within ±127 as bytes: eight of `first`, then eight of `second`."""
        size = self.level.vector_bytes
        if self.level.x86:  # LLVM makes more of the shuffle below
            name = {32: "avx2.packsswb", 64: "avx512.packsswb.512"}[size]
            function = self._function(f"llvm.x86.{name}", self.i8, [self.i16] * 2)
            return self.each(lambda a, c: self.b.call(function, [a, c]), first, second)
        lanes = [[side * size + i for side in (0, 1) for i in range(at, at + 16, 2)] for at in range(0, size, 16)]
        mask = ir.Constant(ir.VectorType(I32, size), [i for sixteen in lanes for i in sixteen])
        join = lambda a, c: self.b.shuffle_vector(self.b.bitcast(a, self.i8), self.b.bitcast(c, self.i8), mask)  # noqa: E731
        return self.each(join, first, second)

    # 4-bit codes (0..15) leave room for all 16 products of a 16-bit lane: AVX2 widens once per group of 32 instead of once per product
    def nibble_start(self, offset: Wide) -> Wide:
        """An accumulator for `dot_nibbles` whose sum will include `offset` (i32 lanes)."""
        return self.constant(self.i16, 0) if self.level.shorts else offset

    def dot_nibbles(self, acc: Wide, codes: Wide, x: Wide) -> Wide:
        """acc + products of codes (0..15) and signed x; at most 8 calls before `nibble_sum`."""
        if self.level.shorts:
            return self.each(self.b.add, acc, self.each(self._maddubs, codes, x))
        return self.dot_small(acc, codes, x)

    def nibble_sum(self, acc: Wide, offset: Wide, times: int = 1) -> Wide:
        """The 32-bit sums of an accumulator begun with `nibble_start(offset)`. times: of what was added, where words are summed."""
        if self.level.shorts:
            return self.each(lambda a, o: self.b.add(self._maddwd(a, self._splat_constant(self.i16, times)), o), acc, offset)
        return acc

    # ---- one instruction each ------------------------------------------------------------------------------------------
    def _function(self, name: str, result: ir.Type, arguments: list[ir.Type]) -> Value:
        return cgutils.get_or_insert_function(self.b.module, ir.FunctionType(result, arguments), name)

    def _vpdpbusd(self, acc: Wide, unsigned: Wide, signed: Wide) -> Wide:
        # operands as words: LLVM takes bytes since version 21 and mends the older form by itself
        function = self._function(f"llvm.x86.avx512.vpdpbusd.{8 * self.level.vector_bytes}", self.i32, [self.i32] * 3)
        words = lambda v: self.b.bitcast(v, self.i32)  # noqa: E731
        return self.each(lambda a, u, s: self.b.call(function, [a, words(u), words(s)]), acc, unsigned, signed)

    def _maddubs(self, unsigned: Value, signed: Value) -> Value:
        return self.b.call(self._function("llvm.x86.avx2.pmadd.ub.sw", self.i16, [self.i8] * 2), [unsigned, signed])

    def _maddwd(self, words: Value, others: Value) -> Value:
        return self.b.call(self._function("llvm.x86.avx2.pmadd.wd", self.i32, [self.i16] * 2), [words, others])

    def _pairs(self, words: Value) -> Value:
        return self._maddwd(words, self._splat_constant(self.i16, 1))

    def _maddubs_wide(self, acc: Wide, unsigned: Wide, signed: Wide) -> Wide:
        return self.each(lambda a, u, s: self.b.add(a, self._pairs(self._maddubs(u, s))), acc, unsigned, signed)

    def _abs8(self, x: Value) -> Value:
        function = self._function(f"llvm.abs.v{self.i8.count}i8", self.i8, [self.i8, ir.IntType(1)])
        return self.b.call(function, [x, ir.IntType(1)(0)])

    def _sign8(self, value: Value, sign: Value) -> Value:
        return self.b.call(self._function("llvm.x86.avx2.psign.b", self.i8, [self.i8] * 2), [value, sign])

    def _dot_generic(self, acc: Wide, u: Wide, v: Wide) -> Wide:
        if self.level.name == "neon":
            if isinstance(u, Word):  # `sdot` takes its last factor from a lane
                u, v = v, u
            function = self._function("llvm.aarch64.neon.sdot.v4i32.v16i8", self.i32, [self.i32, self.i8, self.i8])
            return self.each(lambda a, x, y: self.b.call(function, [a, x, y]), acc, u, v)
        return self.each(self._dot_plain, acc, u, v)

    def _dot_plain(self, acc: Value, u: Value, v: Value) -> Value:
        count = self.i8.count
        words = ir.VectorType(I16, count)
        product = self.b.mul(self.b.sext(u, words), self.b.sext(v, words))
        wide = self.b.sext(product, ir.VectorType(I32, count))
        for first in range(4):
            mask = ir.Constant(ir.VectorType(I32, count // 4), list(range(first, count, 4)))
            acc = self.b.add(acc, self.b.shuffle_vector(wide, wide, mask))
        return acc


def two_pieces(e: Emitter, high: Wide, low: Wide) -> Wide:
    """128·high + low."""
    return e.each(e.b.add, e.each(e.b.shl, high, e.constant(e.i32, 7)), low)


class Accumulators:
    """`count` wide sums that live across a loop: stack slots, which LLVM turns into registers. halves: native vectors of each, for as many
    lanes as one of the others has."""

    def __init__(self, e: Emitter, kind: ir.VectorType, count: int, start: Callable[[int], Wide] | None = None, halves: int = 1):
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
