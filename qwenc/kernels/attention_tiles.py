"""The inner loops of attention, written as SIMD instructions: scores of 16 keys × R query rows, and 16 dimensions of V × R rows.

Keys and values lie in tiles of 16 tokens. A call is given a list of tiles, `at`: the number of each tile's first token in the cache
array, so the tiles may lie anywhere. A query is held as 15 bits in two signed bytes, q ≈ scale·(128·high + low), a probability as 14 bits
in two bytes below 128: two dot products each, with an error far below that of 8-bit keys and values. On AVX2 both lie in 16-bit words
instead, which `vpmaddwd` multiplies, except where 4-bit values are weighted: the same sums.

While a few rows read the cache (decode), memory is what they wait for, so each loop asks ahead for what is read next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from qwenc.kernels.emit import Emitter, two_pieces
from qwenc.kernels.level import LEVEL
from qwenc.kernels.vector import pointer_to
from qwenc.kernels.wide import I64, LANES, Accumulators, Value, Wide

SEGMENT = 16  # tiles whose scores are held at once: 256 keys
LINE = 64  # bytes of a cache line
PLANE_ROW = 8 * LANES  # bytes of a strip of a query for the 2-bit plane of 8 units
ROW_BYTES = 32  # a query strip, or the probabilities of a tile, of one row: two pieces of 16


Cells = Iterator[tuple[int, Wide]]  # the number of a cell of a strip (4 dimensions of 16 keys), and the cell


def _int8_cells(e: Emitter, codes: list[Value], strip: Value) -> Cells:
    """Those of int8 keys. Key tile: [head_dim/4][16 keys][4 dims]."""
    pointer = e.at(codes[0], e.b.mul(strip, I64(4 * LINE)))
    for cell in range(4):
        yield cell, e.load_words(pointer, LINE * cell) if e.level.words else e.prepare_signed(e.load(pointer, e.i8, LINE * cell))


def _plane_cells(e: Emitter, codes: list[Value], strip: Value) -> Cells:
    """The same of a 2-bit plane: [head_dim/16][16 keys][4 bytes], byte b of a key holds dimension b of each of the four cells."""
    plane = e.load(e.at(codes[0], e.b.mul(strip, I64(LINE))), e.i8)
    for cell in range(4):
        yield cell, e.two_bits(plane, cell, LIFTS["plane"][cell])


def _three_plane_cells(e: Emitter, codes: list[Value], strip: Value) -> Cells:
    """Codes of 5 bits from their three planes. Those of a cell are put together where LAST_AT has their last bits, and moved once."""
    upper, lower = (e.load(e.at(plane, e.b.mul(strip, I64(LINE))), e.i8) for plane in codes[:2])
    two_strips = e.load(e.at(codes[2], e.b.mul(e.b.lshr(strip, I64(1)), I64(LINE))), e.i8)
    last = e.moved_down(two_strips, e.b.mul(e.b.and_(strip, I64(1)), I64(4)))
    for cell, (lower_at, place) in enumerate(zip(LOWER_AT, LAST_AT, strict=True)):
        parts = ((e.moved(upper, place + 3 - 2 * cell), 3 << 3), (e.moved(lower, place + 1 - lower_at), 3 << 1), (last, 1))
        whole = [e.each(e.b.and_, part, e.constant(e.i8, mask << place)) for part, mask in parts]
        code = e.each(e.b.or_, e.each(e.b.or_, whole[0], whole[1]), whole[2])
        yield cell, e.moved(code, LIFTS["q5"][cell] - place)


# Where the planes of 5-bit codes have the bits of each cell (see attention/cache.py): so that most need not be moved to meet each other.
LOWER_AT = (6, 0, 2, 4)
LAST_AT = (2, 0, 1, 3)

# kind of key -> bytes of a strip of a tile in each array, pieces of a query, the cells of a strip
KEYS = {"int8": ((256,), 2, _int8_cells), "q5": ((64, 64, 32), 1, _three_plane_cells), "plane": ((64,), 1, _plane_cells)}
# Bits by which the codes of each cell stay above their value: moving a sum back once is cheaper than moving every code. Where unsigned
# bytes can be factors and there are registers enough for a sum of each.
LIFTS = {"int8": (0, 0, 0, 0), "q5": LAST_AT, "plane": (0, 2, 4, 6)} if LEVEL.vector_bytes == 64 else dict.fromkeys(KEYS, (0, 0, 0, 0))


def _chains(kind: str, sums: int) -> int:
    """Into how many chains `sums` sums are split, so that adding to one does not wait for itself."""
    if kind != "int8" and LEVEL.shorts:  # a strip's cells are summed apart, in 16 bits
        return 1
    return max(1, min(4, (8 if LEVEL.vector_bytes == 64 else 4) // sums))


def make_scores(kind: str, rows: int, ahead_lines: int = 0, tiles: int = 1) -> Any:
    """tile(codes, scales, at, at_i, strips, q, q_at, qs, qo, row_at, ahead, s, s_at, s_step): scores of `rows` queries against the
    16 keys of the tile at[at_i], or of `tiles` tiles that lie side by side from there on.

    strips = head_dim/16. q int8 [strip][rows][pieces][16], or for int8 keys words [strip][rows][16], or for a plane [strip][rows][8][16],
    from the unit's sixteen on; qs float32 scale per row. int8: scales float32 per key, qo int32 [row][2] is
    −bias·Σ of each piece. q5, plane: qo float32 [row], added to the result; scales is not looked at. codes: a
    tuple, the three planes of q5 or one array.
    ahead: the array that is read next of the same tile (values), of which a strip takes ahead_lines cache lines.
    Writes s[s_at + r·s_step + key] (float32).
    """
    strip_bytes, pieces, cells_of = KEYS[kind]
    # of a strip of a query, and how many of what is loaded at once lie in a piece of it; a plane's are made for 8 units together
    row_bytes, in_piece = (PLANE_ROW, PLANE_ROW // 4) if kind == "plane" else (LANES * pieces, LANES // 4)
    words = pieces == 2 and LEVEL.words
    if words:
        pieces = 1
    count = rows * pieces
    lifts = sorted(set(LIFTS[kind]))
    chains = _chains(kind, (2 if words else 1) * count * tiles) if lifts == [0] else len(lifts)
    chain_of = [cell % chains if lifts == [0] else lifts.index(lift) for cell, lift in enumerate(LIFTS[kind])]

    @intrinsic
    def tile(typingctx, codes, scales, at, at_i, strips, q, q_at, qs, qo, row_at, ahead, s, s_at, s_step):
        def codegen(context, builder, sig, values):
            codes_v, scales_v, at_v, at_i_v, strips_v, q_v, q_at_v, qs_v, qo_v, row_v, ahead_v, s_v, s_at_v, step_v = values
            e = Emitter(builder)
            key = _list_item(context, builder, sig.args[2], at_v, at_i_v)

            def tile_of(array_type: Any, array: Value, bytes_: int) -> Value:
                lines = strips_v if bytes_ >= LINE else builder.lshr(builder.add(strips_v, I64(1)), I64(1))
                size = max(bytes_, LINE)
                return pointer_to(context, builder, array_type, array, builder.mul(builder.mul(key, lines), I64(size // 16)))

            arrays = zip(sig.args[0], cgutils.unpack_tuple(builder, codes_v), strip_bytes, strict=True)
            planes = [[tile_of(*array) for array in arrays]]
            for _ in range(1, tiles):
                steps = [builder.mul(strips_v, I64(bytes_)) for bytes_ in strip_bytes]
                planes.append([e.at(pointer, step) for pointer, step in zip(planes[-1], steps, strict=True)])
            ahead_p = tile_of(sig.args[10], ahead_v, LINE * ahead_lines) if ahead_lines else None
            q_p = pointer_to(context, builder, sig.args[5], q_v, q_at_v)
            zero = e.constant(e.i32, 0)
            qo_p = pointer_to(context, builder, sig.args[8], qo_v, builder.mul(row_v, I64(2)) if kind == "int8" else row_v)
            start = lambda i: e.load_splat(qo_p, 4 * (i % count), e.i32) if kind == "int8" and i < tiles * count else zero  # noqa: E731
            sums = Accumulators(e, e.i32, chains * tiles * count, start=None if words else start, halves=2 if words else 1)
            dot = e.dot_words if words else e.dot_signed if kind == "int8" else e.dot_nibbles
            with cgutils.for_range(builder, strips_v) as loop:
                for line in range(ahead_lines):
                    e.prefetch(e.at(ahead_p, builder.add(builder.mul(loop.index, I64(LINE * ahead_lines)), I64(LINE * line))))
                strip = e.at(q_p, builder.mul(loop.index, I64(rows * row_bytes)))
                before = [sums.get(slot) for slot in range(chains * tiles * count)]
                after = before if kind == "int8" else [e.nibble_start(x) for x in before]
                for of_cell in zip(*(cells_of(e, of_tile, loop.index) for of_tile in planes), strict=True):
                    cell = of_cell[0][0]
                    for i in range(count):
                        place = in_piece * i + cell
                        x = e.load_quad(strip, place) if words else e.load_word(strip, place, LANES // 4 * count, e.i8)
                        for j in range(tiles):
                            slot = (chain_of[cell] * tiles + j) * count + i
                            after[slot] = dot(after[slot], of_cell[j][1], x)
                    if kind != "int8":
                        after = e.settle(after)
                for slot, x in enumerate(after):
                    sums.set(slot, x if kind == "int8" else e.nibble_sum(x, before[slot]))
            total = (lambda i: e.word_sums(sums.get(i))) if words else sums.get
            whole = [total(i) for i in range(tiles * count)]
            for i in range(tiles * count, chains * tiles * count):
                lift = 0 if lifts == [0] else lifts[i // (tiles * count)]
                part = e.each(builder.ashr, total(i), e.constant(e.i32, lift)) if lift else total(i)
                whole[i % (tiles * count)] = e.each(builder.add, whole[i % (tiles * count)], part)
            qs_p = pointer_to(context, builder, sig.args[7], qs_v, row_v)
            key_scale = pointer_to(context, builder, sig.args[1], scales_v, key) if kind == "int8" else None
            for j, r in ((j, r) for j in range(tiles) for r in range(rows)):
                of_row = whole[j * count + pieces * r :][:pieces]
                product = e.to_float(two_pieces(e, *of_row) if pieces == 2 else of_row[0])
                row_scale = e.load_splat(qs_p, 4 * r, e.f32)
                if key_scale is None:
                    score = e.fma(product, row_scale, e.load_splat(qo_p, 4 * r, e.f32))
                else:
                    score = e.each(builder.fmul, product, e.each(builder.fmul, e.load(key_scale, e.f32, 4 * LANES * j), row_scale))
                target = builder.add(builder.add(s_at_v, I64(LANES * j)), builder.mul(step_v, I64(r)))
                e.store(score, pointer_to(context, builder, sig.args[11], s_v, target))
            return context.get_dummy_value()

        n = types.intp
        return types.void(codes, scales, at, n, n, q, n, qs, qo, n, ahead, s, n, n), codegen

    return tile


def _int8_values(e: Emitter, pointer: Value, cell: int, strips: int) -> list[Wide]:
    """4 keys × 16 dimensions of each strip. Value tile: [head_dim/16][4 cells][16 dims][4 keys]."""
    places = [LINE * (4 * strip + cell) for strip in range(strips)]
    return [e.load_words(pointer, place) if e.level.words else e.load(pointer, e.i8, place) for place in places]


def _q4_values(e: Emitter, pointer: Value, cell: int, strips: int) -> list[Wide]:
    """The same of 4-bit codes: [head_dim/32][4 cells][16][4 keys], dimension d of a group in the low half, d + 16 in the high half."""
    codes = e.load(pointer, e.i8, LINE * cell)
    return [e.low_nibbles(codes), e.high_nibbles(codes)]


VALUES: dict[str, tuple[int, Callable[..., list[Wide]]]] = {"int8": (256, _int8_values), "q4": (128, _q4_values)}


def strips_at_once(rows: int) -> int:
    """Strips of 16 dimensions that `rows` rows sum at once, so that a probability is fetched once for all of them."""
    registers = 16 if LEVEL.vector_bytes == 64 else 4
    return max(1, min(4, registers // (rows * 2)))


def make_values(kind: str, rows: int, strips: int, ahead_strip: tuple[int, ...] = ()) -> Any:
    """tile(v, at, at_i, tiles, tile_bytes, strip, p, p_at, ps, decay, add, row_at, ahead, all_strips, o, o_at, o_step):
    o = decay·o + ps·Σ p·v over the keys of `tiles` tiles, for `strips` strips from `strip` on.

    tile_bytes: of v in one tile. p uint8 [tile][rows][2 pieces][16 keys], or for int8 values words [tile][rows][16 keys];
    ps, decay float32 per row; add: float32 per row, added to every
    dimension (q4), or None. ahead: a tuple of the arrays that are read next (keys), of the tiles at[at_i + 16 …]; a strip takes ahead_strip
    bytes of each.
    o float32: o[o_at + r·o_step + 16·strip' + dim].
    """
    strip_bytes, values_of = VALUES[kind]
    words = kind == "int8" and LEVEL.words
    narrow = kind == "q4" and LEVEL.shorts  # a tile is summed in 16 bits before its pieces are joined and widened
    count = rows if words else 2 * rows

    @intrinsic
    def tile(typingctx, v, at, at_i, tiles, tile_bytes, strip, p, p_at, ps, decay, add, row_at, ahead, all_strips, o, o_at, o_step):
        def codegen(context, builder, sig, values):
            v_v, at_v, at_i_v, tiles_v, bytes_v, strip_v, p_v, p_at_v, ps_v, decay_v, add_v, row_v = values[:12]
            ahead_v, all_strips_v, o_v, o_at_v, step_v = values[12:]
            aheads = list(zip(ahead_strip, sig.args[12], cgutils.unpack_tuple(builder, ahead_v), strict=False))
            p_p = pointer_to(context, builder, sig.args[6], p_v, p_at_v)
            first = builder.mul(strip_v, I64(strip_bytes))  # a strip of q4 is half a group
            for e in Emitter(builder).slices(strips * count):
                to_ask = aheads if e.places[0] == 0 else []  # once
                sums = Accumulators(e, e.i32, strips * (rows if narrow else count), halves=2 if words else 1)
                with cgutils.for_range(builder, tiles_v) as loop:
                    item = builder.add(at_i_v, loop.index)
                    tile_of = builder.sdiv(_list_item(context, builder, sig.args[1], at_v, item), I64(LANES))
                    v_p = pointer_to(context, builder, sig.args[0], v_v, builder.add(builder.mul(tile_of, bytes_v), first))
                    if to_ask:  # in the order in which the keys lie, whatever the order of the values
                        turn = builder.add(builder.mul(builder.sdiv(strip_v, I64(strips)), tiles_v), loop.index)
                        turns = builder.sdiv(builder.add(all_strips_v, I64(strips - 1)), I64(strips))  # per tile
                        entry = builder.add(builder.add(at_i_v, I64(SEGMENT)), builder.sdiv(turn, turns))
                        coming = builder.sdiv(_list_item(context, builder, sig.args[1], at_v, entry), I64(LANES))
                        strip_of = builder.add(builder.mul(coming, all_strips_v), builder.mul(builder.srem(turn, turns), I64(strips)))
                    for bytes_, array_type, array in to_ask:
                        ahead_p = pointer_to(context, builder, array_type, array, builder.mul(strip_of, I64(bytes_)))
                        for line in range(strips * bytes_ // LINE):
                            e.prefetch(e.at(ahead_p, LINE * line))
                    row_p = e.at(p_p, builder.mul(loop.index, I64(rows * ROW_BYTES)))
                    of_tile = [e.nibble_start(e.constant(e.i32, 0)) for _ in range(strips * count)] if narrow else []
                    for cell in range(4):
                        dims = values_of(e, v_p, cell, strips)
                        for i in range(count):
                            place = LANES // 4 * i + cell
                            x = e.load_quad(row_p, place) if words else e.load_word(row_p, place, LANES // 4 * count, e.i8)
                            for j in range(strips):
                                slot = j * count + i
                                if narrow:
                                    of_tile[slot] = e.dot_nibbles(of_tile[slot], dims[j], x)
                                elif words:
                                    sums.set(slot, e.dot_words(sums.get(slot), dims[j], x))
                                else:
                                    sums.set(slot, e.dot_small(sums.get(slot), x, dims[j]))
                        of_tile = e.settle(of_tile) if narrow else of_tile
                    for slot in range(0, len(of_tile), 2):
                        whole = e.nibble_sum(of_tile[slot + 1], sums.get(slot // 2))
                        sums.set(slot // 2, e.nibble_sum(of_tile[slot], whole, 128))
                ps_p = pointer_to(context, builder, sig.args[8], ps_v, row_v)
                decay_p = pointer_to(context, builder, sig.args[9], decay_v, row_v)
                for r in range(rows):
                    scale, fade = e.load_splat(ps_p, 4 * r, e.f32), e.load_splat(decay_p, 4 * r, e.f32)
                    for j in range(strips):
                        if words:
                            whole = e.word_sums(sums.get(j * rows + r))
                        elif narrow:
                            whole = sums.get(j * rows + r)
                        else:
                            whole = two_pieces(e, *(sums.get((j * rows + r) * 2 + piece) for piece in range(2)))
                        product = e.to_float(whole)
                        target = builder.add(builder.add(o_at_v, I64(16 * j)), builder.mul(step_v, I64(r)))
                        o_p = pointer_to(context, builder, sig.args[14], o_v, target)
                        old = e.each(builder.fmul, e.load(o_p, e.f32), fade)
                        if sig.args[10] is not types.none:
                            add_p = pointer_to(context, builder, sig.args[10], add_v, row_v)
                            old = e.each(builder.fadd, old, e.load_splat(add_p, 4 * r, e.f32))
                        e.store(e.fma(product, scale, old), o_p)
            return context.get_dummy_value()

        n = types.intp
        return types.void(v, at, n, n, n, n, p, n, ps, decay, add, n, ahead, n, o, n, n), codegen

    return tile


def _list_item(context: Any, builder: ir.IRBuilder, array_type: Any, array: Value, index: Value) -> Value:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.load(builder.gep(data, [index]))
