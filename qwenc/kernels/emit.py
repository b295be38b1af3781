"""Writing SIMD instructions: the products, of 8-bit numbers above all.

An `Emitter` turns "sum of four products in each lane" into the one instruction that does it: `vpdpbusd`, `vpmaddubsw`+`vpmaddwd`, `sdot`,
or plain code anywhere else. All of them give the same integers.

Needed because Numba widens int32·int32 to int64, which keeps LLVM from seeing an 8-bit dot product.
"""

from __future__ import annotations

from llvmlite import ir

from qwenc.kernels.wide import I8, I16, I32, I64, Value, Wide, WideEmitter, Word


class Emitter(WideEmitter):
    """Emits wide operations and products into `builder` for one SIMD level."""

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

    # 4-bit codes (0..15) leave room for all 16 products of a 16-bit lane: AVX2 widens once per group of 32 instead of once per product
    def nibble_start(self, offset: Wide) -> Wide:
        """An accumulator for `dot_nibbles` whose sum will include `offset` (i32 lanes)."""
        return self.constant(self.i16, 0) if self.level.shorts else offset

    def dot_nibbles(self, acc: Wide, codes: Wide, x: Wide) -> Wide:
        """acc + products of codes (0..15) and signed x; at most 8 calls before `nibble_sum`, 4 with codes up to 31."""
        if self.level.shorts:
            return self.each(self.b.add, acc, self.each(self._maddubs, codes, x))
        return self.dot_small(acc, codes, x)

    def nibble_sum(self, acc: Wide, offset: Wide, times: int = 1) -> Wide:
        """The 32-bit sums of an accumulator begun with `nibble_start(offset)`. times: of what was added, where words are summed."""
        if self.level.shorts:
            return self.each(lambda a, o: self.b.add(self._maddwd(a, self._splat_constant(self.i16, times)), o), acc, offset)
        return acc

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
            name = {32: "avx2.pmul.hr.sw", 64: "avx512.pmul.hr.sw.512"}[size]
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

    # ---- one instruction each ------------------------------------------------------------------------------------------
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
