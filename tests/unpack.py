"""The packed layouts read back in plain NumPy: docs/architecture.md written a second time, to test the first."""

import numpy as np


def unpack_f32(values):
    """[..., NB, K, 16] -> rows [..., 16·NB, K]."""
    *stack, tiles, inputs, _ = values.shape
    return np.swapaxes(values, -1, -2).reshape(*stack, tiles * 16, inputs)


def unpack_scales(bits):
    """float16 bits [..., NB, KG, 16] -> float32 [..., 16·NB, KG]."""
    *stack, tiles, groups, _ = bits.shape
    return np.swapaxes(bits.view(np.float16).astype(np.float32), -1, -2).reshape(*stack, tiles * 16, groups)


def q8_codes(codes):
    """int8 [..., NB, KG, 512] -> int32 [..., 16·NB, K]. Byte (j·16 + r)·4 + b: row r, k = 4j + b."""
    *stack, tiles, groups, _ = codes.shape
    out = np.zeros((*stack, tiles, 16, groups, 32), np.int32)
    for j in range(8):
        for r in range(16):
            for b in range(4):
                out[..., r, :, 4 * j + b] = codes[..., (j * 16 + r) * 4 + b]
    return out.reshape(*stack, tiles * 16, groups * 32)


def q4_codes(codes):
    """uint8 [..., NB, KG, 256] -> int32 −8…7 [..., 16·NB, K]. Byte (j·16 + r)·4 + b: low nibble k = 4j + b, high nibble k = 16 + 4j + b."""
    *stack, tiles, groups, _ = codes.shape
    out = np.zeros((*stack, tiles, 16, groups, 32), np.int32)
    for j in range(4):
        for r in range(16):
            for b in range(4):
                byte = codes[..., (j * 16 + r) * 4 + b].astype(np.int32)
                out[..., r, :, 4 * j + b] = (byte & 15) - 8
                out[..., r, :, 16 + 4 * j + b] = (byte >> 4) - 8
    return out.reshape(*stack, tiles * 16, groups * 32)


def unpack_q8(codes, scales):
    return q8_codes(codes) * np.repeat(unpack_scales(scales), 32, axis=-1)


def unpack_q4(codes, scales):
    return q4_codes(codes) * np.repeat(unpack_scales(scales), 32, axis=-1)


def matrix(packed, name, fmt):
    """A matrix (or stack) of a packed file as rows [*stack, 16·NB, K], padding included."""
    tensors = packed.tensors
    if fmt == "f32":
        return unpack_f32(tensors[f"{name}.f32.values"])
    unpack = unpack_q4 if fmt == "q4" else unpack_q8
    return unpack(tensors[f"{name}.{fmt}.codes"], tensors[f"{name}.{fmt}.scales"])
