"""Matrix rows times the activations of a few tokens that decode together: tiles as narrow as they are few, weights asked for ahead.

In prefill a row tile is read once and used for many token tiles; here every use comes from memory, so the tile must not wait for it.
"""

from __future__ import annotations

from qwenc.kernels.jit import by_type
from qwenc.kernels.linear_tiles import AHEAD, make_linear
from qwenc.kernels.records import Q4, Q8, TILE

WIDTHS = tuple(width for width in (2, 4, 8) if width <= TILE)
TILES = {
    record: tuple(make_linear(fmt, width, AHEAD) for width in WIDTHS) for fmt, record in (("q4", Q4), ("q8", Q8))
}  # the formats that decode reads


def lane_width(tokens: int) -> int:
    """How many tokens a tile takes when `tokens` decode together: the fewest of WIDTHS that hold them, or the most."""
    return next((width for width in WIDTHS if width >= tokens), WIDTHS[-1])


def linear_lanes(w, width, stack, tile, acts, token_tile, out, out_at):
    """out[out_at + 16·t + row] for the `width` tokens of token tile number `token_tile`, prepared with tokens=width (one of WIDTHS)."""
    raise NotImplementedError("runs in compiled code only")


@by_type(linear_lanes)
def _linear_lanes(w, width, stack, tile, acts, token_tile, out, out_at):
    tiles = TILES[w.instance_class]
    two, four, eight = tiles[0], tiles[1], tiles[-1]  # where registers are few there is no tile of eight

    def run(w, width, stack, tile, acts, token_tile, out, out_at):
        groups = w.codes.shape[2]
        at = (stack * w.codes.shape[1] + tile) * groups
        codes_at, scales_at = at * w.codes.shape[3], at * 16
        if width == 2:
            two(w.codes, codes_at, w.scales, scales_at, acts.codes, acts.scales, acts.offsets, token_tile, groups, out, out_at)
        elif width == 4:
            four(w.codes, codes_at, w.scales, scales_at, acts.codes, acts.scales, acts.offsets, token_tile, groups, out, out_at)
        else:
            eight(w.codes, codes_at, w.scales, scales_at, acts.codes, acts.scales, acts.offsets, token_tile, groups, out, out_at)

    return run
