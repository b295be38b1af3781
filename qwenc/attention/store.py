"""Writing keys and values into the cache."""

from __future__ import annotations

import numpy as np
from numba import types

from qwenc.attention.cache import Q4K, Q4V, UNIT, UNITS, FloatKV, Int8K
from qwenc.attention.overloads import is_record
from qwenc.kernels import simd
from qwenc.kernels.jit import by_type, helper
from qwenc.kernels.pointwise import largest_of


def write_key(k, slot, stage, stage_slot, x, x_at, head_dim):
    """Store the key x[x_at …] (float32, head_dim values). Keys of 4 bits go into `stage` (Int8K) first, until `finish_unit`."""
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
    if not is_record(k, Q4K):
        return lambda k, stage, stage_slot, tail_slot, head_dim: None
    return lambda k, stage, stage_slot, tail_slot, head_dim: copy_unit(Int8K(k.tail, k.tail_scale), tail_slot, stage, stage_slot, head_dim)


@by_type(save_stage)
def _save_stage(k, stage, stage_slot, tail_slot, head_dim):
    if not is_record(k, Q4K):
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
    if is_record(k, Q4K):
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
    if is_record(k, Q4K):
        if isinstance(plane, types.NoneType):
            return lambda k, plane, slot, stage, stage_slot, head_dim, r: code_unit(
                stage, stage_slot, slot, head_dim, k.upper, k.lower, k.low, k.step, None, None, None, r
            )
        return lambda k, plane, slot, stage, stage_slot, head_dim, r: code_unit(
            stage, stage_slot, slot, head_dim, k.upper, k.lower, k.low, k.step, plane.centre, plane.step, plane.scale, r
        )
    if is_record(k, FloatKV) and not isinstance(plane, types.NoneType):
        return lambda k, plane, slot, stage, stage_slot, head_dim, r: code_float_unit(k.values, slot, plane, head_dim, r)
    if is_record(k, Int8K) and not isinstance(plane, types.NoneType):
        return lambda k, plane, slot, stage, stage_slot, head_dim, r: code_unit(
            k, slot, slot, head_dim, plane.codes, None, None, None, plane.centre, plane.step, plane.scale, r
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


# ---- 4 bits ----------------------------------------------------------------------------------------------------------------
@helper
def write_q4_value(v, slot, x, x_at, head_dim, r):
    """Codes of one token, in groups of 32 dimensions."""
    groups = (head_dim + 31) // 32
    codes = r.codes
    for group in range(groups):
        at = x_at + 32 * group
        whole = 32 * group + 16 < head_dim
        first = simd.load(x, at)
        second = simd.load(x, at + 16) if whole else first
        top = simd.lane_max(simd.maximum(first, second))
        bottom = -simd.lane_max(simd.maximum(simd.sub(simd.splat(np.float32(0.0)), first), simd.sub(simd.splat(np.float32(0.0)), second)))
        scale_at = (slot // 16) * 16 * groups + 16 * group + slot % 16
        low = store_one_half(v.low, scale_at, bottom, r.bits)
        step = store_one_half(v.step, scale_at, (top - low) * np.float32(1 / 15), r.bits)
        inverse = simd.splat(np.float32(1.0) / step if step > 0 else np.float32(0.0))
        offset = simd.splat(low)
        store_codes(codes, 0, simd.mul(simd.sub(first, offset), inverse))
        store_codes(codes, 16, simd.mul(simd.sub(second, offset), inverse))
        code_at = ((slot // 16) * groups + group) * 256 + (slot % 16) // 4 * 64 + slot % 4
        for d in range(16):
            simd.put(v.codes, code_at + 4 * d, np.uint8(codes[d] | codes[d + 16] << 4))


@helper
def store_codes(codes, at, x):
    """Nearest of 0 … 15."""
    zero, top = simd.splat(np.float32(0.0)), simd.splat(np.float32(15.0))
    simd.store_bytes(codes, at, simd.minimum(simd.maximum(x, zero), top))


@helper
def store_one_half(array, at, value, bits):
    """Write one number in half precision. Returns what was written."""
    simd.store_half(bits, 0, simd.splat(value))
    simd.put(array, at, bits[0])
    return simd.lane(simd.load_half(bits, 0), 0)


@helper
def code_float_unit(values, slot, plane, head_dim, r):
    """The plane of 32 float32 keys, by way of the int8 keys that they would be."""
    keys = Int8K(r.unit_codes, r.unit_scale)
    for t in range(UNIT):
        write_int8_key(keys, t, values, (slot + t) * head_dim, head_dim)
    code_unit(keys, 0, slot, head_dim, plane.codes, None, None, None, plane.centre, plane.step, plane.scale, r)


@helper
def code_unit(keys, key_slot, slot, head_dim, upper, lower, low, step, centre, width, scale, r):
    """4-bit codes per channel of the 32 keys from key_slot on (Int8K). upper, lower: planes, written at `slot`; low, step: the channels'
    ranges in half precision; centre, width, scale: the coarse ranges of a Plane. What is None is left out."""
    lows, steps = r.channel_low, r.channel_step
    measure_unit(keys, key_slot, head_dim, lows, steps, r.bits)
    unit = slot // UNIT
    if low is not None:
        for d in range(0, head_dim, 16):
            simd.store_half(low, unit * head_dim + d, simd.load(lows, d))
            simd.store_half(step, unit * head_dim + d, simd.load(steps, d))
    if centre is not None:
        summarise_unit(lows, steps, unit, head_dim, centre, width, scale)
    for d in range(head_dim):
        simd.put(steps, d, np.float32(1.0) / steps[d] if steps[d] > 0 else np.float32(0.0))
    codes = r.codes
    for t in range(UNIT):
        token = key_slot + t
        key_scale = simd.get(keys.scale, token)
        source = (token // 16) * 16 * head_dim + 4 * (token % 16)
        target = ((slot + t) // 16) * 4 * head_dim + 4 * (token % 16)
        for strip in range(head_dim // 16):
            for d in range(16):
                channel = 16 * strip + d
                x = np.float32(simd.get(keys.codes, source + (channel // 4) * 64 + d % 4)) * key_scale
                codes[d] = np.uint8(min(max(np.rint((x - lows[channel]) * steps[channel]), np.float32(0.0)), np.float32(15.0)))
            for b in range(4):
                byte = codes[b] >> 2 | codes[b + 4] >> 2 << 2 | codes[b + 8] >> 2 << 4 | codes[b + 12] >> 2 << 6
                simd.put(upper, target + strip * 64 + b, np.uint8(byte))
                if lower is not None:
                    byte = codes[b] & 3 | (codes[b + 4] & 3) << 2 | (codes[b + 8] & 3) << 4 | (codes[b + 12] & 3) << 6
                    simd.put(lower, target + strip * 64 + b, np.uint8(byte))


@helper
def measure_unit(keys, key_slot, head_dim, lows, steps, bits):
    """Smallest value and a fifteenth of the range of every channel, as half precision holds them. A NaN in a key is in all channels."""
    bad = np.float32(0.0)
    for t in range(UNIT):
        bad += simd.get(keys.scale, key_slot + t) * np.float32(0.0)
    for channel in range(head_dim):
        least, most = np.float32(np.inf), np.float32(-np.inf)
        for t in range(UNIT):
            token = key_slot + t
            at = (token // 16) * 16 * head_dim + (channel // 4) * 64 + 4 * (token % 16) + channel % 4
            x = np.float32(simd.get(keys.codes, at)) * simd.get(keys.scale, token)
            least, most = min(least, x), max(most, x)
        lows[channel], steps[channel] = least + bad, most
    fifteenth = simd.splat(np.float32(1 / 15))
    for d in range(0, head_dim, 16):
        simd.store_half(bits, 0, simd.load(lows, d))
        least = simd.load_half(bits, 0)
        simd.store_half(bits, 0, simd.mul(simd.sub(simd.load(steps, d), least), fifteenth))
        simd.store(lows, d, least)
        simd.store(steps, d, simd.load_half(bits, 0))


@helper
def summarise_unit(lows, steps, unit, head_dim, centre, width, scale):
    """Centres in 8 bits and steps in 4, each to the largest of the unit."""
    most_centre, most_step = np.float32(0.0), np.float32(0.0)
    for d in range(head_dim):
        most_centre = max(most_centre, abs(lows[d] + np.float32(7.5) * steps[d]))
        most_step = max(most_step, steps[d])
    page, place = unit // UNITS, unit % UNITS
    simd.put(scale, page * 2 * UNITS + place, most_centre * np.float32(1 / 127))
    simd.put(scale, page * 2 * UNITS + UNITS + place, most_step * np.float32(1 / 15.5))
    to_centre = np.float32(127.0) / most_centre if most_centre > 0 else np.float32(0.0)
    to_step = np.float32(15.5) / most_step if most_step > 0 else np.float32(0.0)
    for d in range(head_dim):
        x = (lows[d] + np.float32(7.5) * steps[d]) * to_centre
        simd.put(centre, (page * (head_dim // 8) + d // 8) * 64 + place * 8 + d % 8, np.int8(np.rint(x)))
    for strip in range(head_dim // 16):
        for d in range(8):
            lower = step_code(steps[16 * strip + d] * to_step)
            upper = step_code(steps[16 * strip + 8 + d] * to_step)
            simd.put(width, (page * (head_dim // 16) + strip) * 64 + place * 8 + d, np.uint8(lower | upper << 4))


@helper
def step_code(x):
    """Nearest code of a step x = code + ½, 0 … 15."""
    return int(min(max(np.rint(x - np.float32(0.5)), np.float32(0.0)), np.float32(15.0)))
