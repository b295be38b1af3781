"""Rotary position embedding: inverse frequencies by type (default, linear, YaRN, llama3), and the tables of cosines and sines.

The arithmetic follows transformers (modeling_rope_utils), in float32 where it uses float32, so that angles agree at long positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from qwenc.config.keys import Keys
from qwenc.errors import QwencError

ROPE_TYPES = ("default", "linear", "yarn", "llama3")
# What a frequency can be computed with in float32; real models stay far inside.
MAX_THETA = 1e15
LEAST, MOST = 1e-6, 1e6  # of factors and of numbers of rotations


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """rope_type and its parameters; those that a type does not use keep their defaults.

    theta: base of the frequencies. factor: context extension. original_max_position_embeddings: context before it.
    attention_factor, mscale, mscale_all_dim, beta_fast, beta_slow, truncate: YaRN. low_freq_factor, high_freq_factor: llama3.
    """

    rope_type: str
    theta: float
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def parse_rope(text: Keys, outer: Keys, default_theta: float | None, max_positions: int) -> RopeConfig:
    """The RoPE of a config: rope_scaling (transformers 4) or rope_parameters (5), in text_config or outside; theta there or beside.

    default_theta None means that a config without rope_theta is refused: a wrong base reads fine on short prompts and breaks long ones.
    """
    names = ("rope_scaling", "rope_parameters")  # transformers 5 lets the older key win too
    tables = [Keys(keys.table(name), f"{keys.source}: {name}") for keys in (text, outer) for name in names if keys.has(name)]
    scaling = next((table for table in tables if table.values), Keys({}, text.source))
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise QwencError(f"{scaling.source}: a RoPE per layer type is not supported")
    if any(keys.number("partial_rotary_factor", 1.0) != 1.0 for keys in (scaling, text)):
        raise QwencError(f"{text.source}: partial_rotary_factor other than 1 is not supported")

    rope_type = scaling.string("rope_type", scaling.string("type", "default"))
    if rope_type == "mrope":
        rope_type = "default"  # three position axes that coincide for text
    if rope_type not in ROPE_TYPES:
        raise QwencError(f"{scaling.source}: RoPE type {rope_type!r} is not supported (supported: {', '.join(ROPE_TYPES)})")
    theta = next((keys.number("rope_theta", most=MAX_THETA) for keys in (*tables, text, outer) if keys.has("rope_theta")), default_theta)
    if theta is None:
        raise QwencError(f"{text.source}: rope_theta is missing")
    if theta <= 1:
        raise QwencError(f"{text.source}: rope_theta must be more than 1, not {theta:g}")
    if rope_type == "default":
        return RopeConfig(rope_type, theta)
    return _parse_scaled(scaling, text, rope_type, theta, max_positions)


def _parse_scaled(scaling: Keys, text: Keys, rope_type: str, theta: float, max_positions: int) -> RopeConfig:
    original = text.size("original_max_position_embeddings", scaling.size("original_max_position_embeddings", max_positions))
    # YaRN may state only the two lengths. A stated factor wins over their ratio (transformers 4 let the ratio win, 5 does not).
    factor = scaling.number("factor", max_positions / original, most=MOST) if rope_type == "yarn" else scaling.number("factor", most=MOST)
    if factor <= 0:
        raise QwencError(f"{scaling.source}: factor must be more than 0, not {factor:g}")
    if not LEAST <= factor <= MOST:
        raise QwencError(f"{scaling.source}: factor must be from {LEAST:g} to {MOST:g}, not {factor:g}")
    if rope_type == "linear":
        return RopeConfig(rope_type, theta, factor)
    if rope_type == "llama3":
        low, high = (scaling.number(name, most=MOST) for name in ("low_freq_factor", "high_freq_factor"))
        if not 0 < low < high:
            raise QwencError(f"{scaling.source}: low_freq_factor {low:g} must be above 0 and below high_freq_factor {high:g}")
        if low < LEAST or high - low < LEAST:
            raise QwencError(f"{scaling.source}: low_freq_factor {low:g} and high_freq_factor {high:g} are too close to 0 or to each other")
        return RopeConfig(rope_type, theta, factor, original, low_freq_factor=low, high_freq_factor=high)
    return RopeConfig(
        rope_type,
        theta,
        factor,
        original,
        attention_factor=scaling.optional_number("attention_factor", most=MOST),
        mscale=scaling.optional_number("mscale", most=MOST),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", most=MOST),
        beta_fast=_rotations(scaling, "beta_fast", 32.0),
        beta_slow=_rotations(scaling, "beta_slow", 1.0),
        truncate=scaling.flag("truncate", True),
    )


def _rotations(scaling: Keys, name: str, default: float) -> float:
    """0 counts as missing, as it does in transformers."""
    if not scaling.optional_number(name, most=MOST):
        return default
    return scaling.number(name, least=LEAST, most=MOST)


def rope_inv_freq(rope: RopeConfig, head_dim: int) -> tuple[np.ndarray, float]:
    """Inverse frequencies, float32 [head_dim/2] in radians per position, and the factor that multiplies every cosine and sine."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    wavelengths = np.power(rope.theta, exponents.astype(np.float64)).astype(np.float32)  # theta^(2i/d), over 2 pi
    inv_freq = np.float32(1.0) / wavelengths
    if rope.rope_type == "linear":
        return inv_freq / np.float32(rope.factor), 1.0
    if rope.rope_type == "yarn":
        return _yarn_inv_freq(rope, head_dim, wavelengths), _yarn_attention_factor(rope)
    if rope.rope_type == "llama3":
        return _llama3_inv_freq(rope, inv_freq), 1.0
    return inv_freq, 1.0


def rope_tables(inv_freq: np.ndarray, scaling: float, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float32 [n, head_dim/2], at integer `positions` [n]. The angle is a float32 product, as in transformers."""
    angles = np.asarray(positions).astype(np.float32)[:, None] * inv_freq.astype(np.float32)[None, :]
    factor = np.float32(scaling)
    return np.cos(angles) * factor, np.sin(angles) * factor


def _yarn_inv_freq(rope: RopeConfig, head_dim: int, wavelengths: np.ndarray) -> np.ndarray:
    """YaRN (arXiv 2309.00071): fast dimensions keep their frequency, slow ones are interpolated by `factor`, a ramp lies between."""

    def dimension_of(rotations: float) -> float:  # the dimension that turns `rotations` times within the original context
        return head_dim * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low), 0, 1)
    keep = np.float32(1) - ramp
    extrapolated = np.float32(1) / wavelengths
    interpolated = np.float32(1) / (np.float32(rope.factor) * wavelengths)
    return interpolated * (np.float32(1) - keep) + extrapolated * keep


def _yarn_attention_factor(rope: RopeConfig) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _llama3_inv_freq(rope: RopeConfig, inv_freq: np.ndarray) -> np.ndarray:
    """Llama 3.1: wavelengths beyond the original context are stretched by `factor`, short ones kept, a smooth blend between."""
    length = rope.original_max_position_embeddings
    low, high = rope.low_freq_factor, rope.high_freq_factor
    wavelength = np.float32(2 * math.pi) / inv_freq
    blend = (np.float32(length) / wavelength - np.float32(low)) / np.float32(high - low)
    stretched = inv_freq / np.float32(rope.factor)
    blended = (np.float32(1) - blend) * stretched + blend * inv_freq
    return np.where(wavelength < length / high, inv_freq, np.where(wavelength > length / low, stretched, blended))
