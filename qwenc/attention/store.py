"""Writing keys and values into the cache."""

from __future__ import annotations

import numpy as np
from numba import types

from qwenc.attention.cache import Q4V, Q5K, UNIT, UNITS, FloatKV, Int8K, scales_at
from qwenc.attention.overloads import is_record
from qwenc.kernels import simd
from qwenc.kernels.attention_tiles import LAST_AT, LOWER_AT
from qwenc.kernels.jit import by_type, helper
from qwenc.kernels.pointwise import largest_of


def write_key(k, slot, stage, stage_slot, x, x_at, head_dim):
    """Store the key x[x_at …] (float32, head_dim values). Keys of 5 bits go into `stage` (Int8K) first, until `finish_unit`."""
    raise NotImplementedError("runs in compiled code only")


def write_value(v, slot, x, x_at, head_dim, r):
    """Store the value x[x_at …] (float32, head_dim values). r: Rows, for its room."""
    raise NotImplementedError("runs in compiled code only")


def finish_unit(k, plane, slot, stage, stage_slot, head_dim, r):
    """Give the keys of a full unit, which begins at `slot`, their codes per channel, where the cache has such."""
    raise NotImplementedError("runs in compiled code only")


def load_stage(k, stage, stage_slot, tail_slot, head_dim):
    """Fetch the keys of a unit that is not full to where a mini-batch adds to them, if they wait for their codes."""
    raise NotImplementedError("runs in compiled code only")


def save_stage(k, stage, stage_slot, tail_slot, head_dim):
    """Keep the keys of a unit that is not full for the next call."""
    raise NotImplementedError("runs in compiled code only")


@by_type(load_stage)
def _load_stage(k, stage, stage_slot, tail_slot, head_dim):
    if not is_record(k, Q5K):
        return lambda k, stage, stage_slot, tail_slot, head_dim: None
    return lambda k, stage, stage_slot, tail_slot, head_dim: copy_unit(Int8K(k.tail, k.tail_scale), tail_slot, stage, stage_slot, head_dim)


@by_type(save_stage)
def _save_stage(k, stage, stage_slot, tail_slot, head_dim):
    if not is_record(k, Q5K):
        return lambda k, stage, stage_slot, tail_slot, head_dim: None
    return lambda k, stage, stage_slot, tail_slot, head_dim: copy_unit(stage, stage_slot, Int8K(k.tail, k.tail_scale), tail_slot, head_dim)


@helper
def copy_unit(source, source_slot, target, target_slot, head_dim):
    for i in range(UNIT * head_dim):
        simd.put(target.codes, target_slot * head_dim + i, simd.get(source.codes, source_slot * head_dim + i))
    for i in range(UNIT):
        simd.put(target.scale, target_slot + i, simd.get(source.scale, source_slot + i))


@by_type(write_key)
def _write_key(k, slot, stage, stage_slot, x, x_at, head_dim):
    if is_record(k, FloatKV):
        return lambda k, slot, stage, stage_slot, x, x_at, head_dim: write_floats(k.values, slot, x, x_at, head_dim)
    if is_record(k, Q5K):
        return lambda k, slot, stage, stage_slot, x, x_at, head_dim: write_int8_key(stage, stage_slot, x, x_at, head_dim)
    return lambda k, slot, stage, stage_slot, x, x_at, head_dim: write_int8_key(k, slot, x, x_at, head_dim)


@by_type(write_value)
def _write_value(v, slot, x, x_at, head_dim, r):
    if is_record(v, FloatKV):
        return lambda v, slot, x, x_at, head_dim, r: write_floats(v.values, slot, x, x_at, head_dim)
    if is_record(v, Q4V):
        return lambda v, slot, x, x_at, head_dim, r: write_q4_value(v, slot, x, x_at, head_dim, r)
    return lambda v, slot, x, x_at, head_dim, r: write_int8_value(v, slot, x, x_at, head_dim)


@by_type(finish_unit)
def _finish_unit(k, plane, slot, stage, stage_slot, head_dim, r):
    if is_record(k, Q5K):
        return lambda k, plane, slot, stage, stage_slot, head_dim, r: code_keys(k, plane, slot, stage, stage_slot, head_dim, r)
    if is_record(k, FloatKV) and not isinstance(plane, types.NoneType):
        return lambda k, plane, slot, stage, stage_slot, head_dim, r: code_float_unit(k.values, slot, plane, head_dim, r)
    if is_record(k, Int8K) and not isinstance(plane, types.NoneType):
        return lambda k, plane, slot, stage, stage_slot, head_dim, r: code_unit(
            k, slot, slot, head_dim, plane.codes, None, None, plane.centre, plane.step, plane.scale, r
        )
    return lambda k, plane, slot, stage, stage_slot, head_dim, r: None


# ---- float32 and int8 ------------------------------------------------------------------------------------------------------
@helper
def write_floats(values, slot, x, x_at, head_dim):
    for d in range(head_dim):
        simd.put(values, slot * head_dim + d, simd.get(x, x_at + d))


@helper
def write_int8_key(k, slot, x, x_at, head_dim):
    scale, inverse = scale_of(x, x_at, head_dim)
    simd.put(k.scale, slot, scale)
    first = (slot // 16) * 16 * head_dim + 4 * (slot % 16)
    for d in range(head_dim):
        simd.put(k.codes, first + (d // 4) * 64 + d % 4, np.int8(np.rint(simd.get(x, x_at + d) * inverse)))


@helper
def write_int8_value(v, slot, x, x_at, head_dim):
    scale, inverse = scale_of(x, x_at, head_dim)
    simd.put(v.scale, slot, scale)
    first = (slot // 16) * 16 * head_dim + (slot % 16) // 4 * 64 + slot % 4
    for d in range(head_dim):
        simd.put(v.codes, first + (d // 16) * 256 + 4 * (d % 16), np.int8(np.rint(simd.get(x, x_at + d) * inverse)))


@helper
def scale_of(x, x_at, count):
    """(max|x|/127, 127/max|x|) of `count` values, a multiple of 16; a NaN makes the scale NaN."""
    top = largest_of(x, x_at, count)
    return top * np.float32(1 / 127), np.float32(127.0) / top if top > 0 else np.float32(0.0)


# ---- values of 4 bits ------------------------------------------------------------------------------------------------------
@helper
def write_q4_value(v, slot, x, x_at, head_dim, r):
    """Codes of one token, in groups of 32 dimensions."""
    groups = (head_dim + 31) // 32
    codes = r.codes
    for group in range(groups):
        at = x_at + 32 * group
        first = simd.load(x, at)
        second = simd.load(x, at + 16) if 32 * group + 16 < head_dim else first
        top = simd.lane_max(simd.maximum(first, second))
        bottom = -simd.lane_max(simd.maximum(simd.sub(simd.splat(np.float32(0.0)), first), simd.sub(simd.splat(np.float32(0.0)), second)))
        middle = np.float32(0.5) * (bottom + top)
        range_at = (slot // 16) * 16 * groups + 16 * group + slot % 16
        step = store_step(v.step, range_at, max((top - bottom) * np.float32(1 / 15), abs(middle) * np.float32(2 / 127)))
        inverse = np.float32(1.0) / step
        halves = min(max(np.rint(np.float32(2.0) * middle * inverse), np.float32(-127.0)), np.float32(127.0))
        if top == bottom == 0:  # which code 7 then is
            halves = np.float32(1.0)
        simd.put(v.centre, range_at, np.int8(halves))
        low, factor = simd.splat((np.float32(0.5) * halves - np.float32(7.5)) * step), simd.splat(inverse)
        store_codes(codes, 0, simd.mul(simd.sub(first, low), factor))
        store_codes(codes, 16, simd.mul(simd.sub(second, low), factor))
        code_at = ((slot // 16) * groups + group) * 256 + (slot % 16) // 4 * 64 + slot % 4
        for d in range(16):
            simd.put(v.codes, code_at + 4 * d, np.uint8(codes[d] | codes[d + 16] << 4))


@helper
def store_codes(codes, at, x):
    """Nearest of 0 … 15."""
    zero, top = simd.splat(np.float32(0.0)), simd.splat(np.float32(15.0))
    simd.store_bytes(codes, at, simd.minimum(simd.maximum(x, zero), top))


@helper
def store_step(steps, at, step):
    """Write the step of a group as the nearest float of a byte. Returns what was written."""
    code = simd.byte_code(step)
    simd.put(steps, at, np.uint8(code))
    return simd.byte_float(code)


# ---- keys of 5 bits, and the plane -----------------------------------------------------------------------------------------
@helper
def code_keys(k, plane, slot, stage, stage_slot, head_dim, r):
    """Codes of the 32 keys in `stage`, and what the plane has of its own."""
    code_unit(stage, stage_slot, slot, head_dim, k.upper, k.lower, k.last, k.centre, k.step, k.scale, r)
    at = scales_at(slot // UNIT)
    copy_scales(k.scale, plane, at)
    bad = defect_of(stage, stage_slot)
    for i in (at, at + UNITS):
        simd.put(k.scale, i, simd.get(k.scale, i) + bad)


def copy_scales(scale, plane, at):
    """Give the plane, if there is one, the two scales of a unit."""
    raise NotImplementedError("runs in compiled code only")


@by_type(copy_scales)
def _copy_scales(scale, plane, at):
    if isinstance(plane, types.NoneType):
        return lambda scale, plane, at: None

    def run(scale, plane, at):
        for i in (at, at + UNITS):
            simd.put(plane.scale, i, simd.get(scale, i))

    return run


@helper
def code_float_unit(values, slot, plane, head_dim, r):
    """The plane of 32 float32 keys, by way of the int8 keys that they would be."""
    keys = Int8K(r.unit_codes, r.unit_scale)
    for t in range(UNIT):
        write_int8_key(keys, t, values, (slot + t) * head_dim, head_dim)
    code_unit(keys, 0, slot, head_dim, plane.codes, None, None, plane.centre, plane.step, plane.scale, r)


@helper
def code_unit(keys, key_slot, slot, head_dim, upper, lower, last, centre, step, scale, r):
    """Codes per channel of the 32 keys from key_slot on (Int8K). upper, lower, last: planes, written at `slot` (lower, last: None where
    there are none); centre, step, scale: the channels' ranges, as in Plane. Ranges are no narrower than the keys need: the largest keys
    are those that are attended to."""
    lows, steps = r.channel_low, r.channel_step
    measure_unit(keys, key_slot, head_dim, lows, steps)
    write_ranges(lows, steps, slot // UNIT, head_dim, centre, step, scale)
    codes = r.codes
    for t in range(UNIT):
        token = key_slot + t
        key_scale = simd.get(keys.scale, token)
        source = (token // 16) * 16 * head_dim + 4 * (token % 16)
        tile, in_tile = (slot + t) // 16, 4 * (token % 16)
        for strip in range(head_dim // 16):
            for d in range(16):
                channel = 16 * strip + d
                x = np.float32(simd.get(keys.codes, source + (channel // 4) * 64 + d % 4)) * key_scale
                codes[d] = np.uint8(min(max(np.rint((x - lows[channel]) * steps[channel]), np.float32(0.0)), np.float32(31.0)))
            target = tile * 4 * head_dim + strip * 64 + in_tile
            for b in range(4):
                byte = codes[b] >> 3 | codes[b + 4] >> 3 << 2 | codes[b + 8] >> 3 << 4 | codes[b + 12] >> 3 << 6
                simd.put(upper, target + b, np.uint8(byte))
            if lower is not None:
                for b in range(4):
                    middle = ones = 0
                    for cell in range(4):
                        code = int(codes[b + 4 * cell])
                        middle |= (code >> 1 & 3) << LOWER_AT[cell]
                        ones |= (code & 1) << LAST_AT[cell]
                    simd.put(lower, target + b, np.uint8(middle))
                    at = (tile * ((head_dim + 31) // 32) + strip // 2) * 64 + in_tile + b
                    simd.put(last, at, np.uint8(ones if strip % 2 == 0 else simd.get(last, at) | ones << 4))


@helper
def defect_of(keys, key_slot):
    """0, or NaN if one of the 32 keys from key_slot on (Int8K) is not finite."""
    bad = np.float32(0.0)
    for t in range(UNIT):
        bad += simd.get(keys.scale, key_slot + t) * np.float32(0.0)
    return bad


@helper
def measure_unit(keys, key_slot, head_dim, lows, mosts):
    """Smallest and largest value of every channel; 0 where a key is not finite."""
    bad = defect_of(keys, key_slot)
    for channel in range(head_dim):
        least, most = np.float32(np.inf), np.float32(-np.inf)
        for t in range(UNIT):
            token = key_slot + t
            at = (token // 16) * 16 * head_dim + (channel // 4) * 64 + 4 * (token % 16) + channel % 4
            x = np.float32(simd.get(keys.codes, at)) * simd.get(keys.scale, token)
            least, most = min(least, x), max(most, x)
        lows[channel] = least if bad == 0 else np.float32(0.0)
        mosts[channel] = most if bad == 0 else np.float32(0.0)


@helper
def write_ranges(lows, mosts, unit, head_dim, centre, step, scale):
    """Centres in 8 bits and fifteenths of the widths in 4, each to the largest of the unit, the latter rounded up. lows, mosts become what
    code 0 means and how many codes there are to 1."""
    most_centre, most_step = np.float32(0.0), np.float32(0.0)
    for d in range(head_dim):
        middle, width = np.float32(0.5) * (lows[d] + mosts[d]), mosts[d] - lows[d]
        lows[d], mosts[d] = middle, width * np.float32(1 / 15)
        most_centre, most_step = max(most_centre, abs(middle)), max(most_step, mosts[d])
    page, place = unit // UNITS, unit % UNITS
    of_centre, of_step = most_centre * np.float32(1 / 127), most_step * np.float32(1 / 15.5)
    simd.put(scale, scales_at(unit), of_centre)
    simd.put(scale, scales_at(unit) + UNITS, of_step)
    to_centre = np.float32(127.0) / most_centre if most_centre > 0 else np.float32(0.0)
    to_step = np.float32(15.5) / most_step if most_step > 0 else np.float32(0.0)
    for strip in range(head_dim // 16):
        for d in range(16):
            channel = 16 * strip + d
            code = np.rint(lows[channel] * to_centre)
            simd.put(centre, (page * (head_dim // 8) + channel // 8) * 64 + place * 8 + d % 8, np.int8(code))
            steps = step_code(mosts[channel] * to_step)
            at = (page * (head_dim // 16) + strip) * 64 + place * 8 + d % 8
            simd.put(step, at, np.uint8(steps if d < 8 else simd.get(step, at) | steps << 4))
            size = (np.float32(steps) + np.float32(0.5)) * of_step * np.float32(15 / 31)
            lows[channel] = code * of_centre - np.float32(15.5) * size
            mosts[channel] = np.float32(1.0) / size if size > 0 else np.float32(0.0)


@helper
def step_code(x):
    """Least code of 0 … 15 whose step, code + ½, is no less than x; rounding may make x a hair more than 15.5."""
    return int(min(max(np.ceil(x - np.float32(0.5)), np.float32(0.0)), np.float32(15.0)))
