"""Groups of arrays that kernels take. NamedTuples, so that Numba specialises a step on what it is given."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qwenc.kernels.jit import allocating
from qwenc.kernels.level import LEVEL

TILE = LEVEL.tile_tokens  # tokens of a prefill GEMM tile


class Q4(NamedTuple):
    """4-bit matrices, packed: codes uint8 [stack, NB, KG, 256], scales float16 as uint16 [stack, NB, KG, 16]."""

    codes: np.ndarray
    scales: np.ndarray


class Q8(NamedTuple):
    """8-bit matrices, packed: codes int8 [stack, NB, KG, 512], scales float16 as uint16 [stack, NB, KG, 16]. Activations have 15 bits:
    with 8 they would cost twice the quality that the weights do."""

    codes: np.ndarray
    scales: np.ndarray


class Q8Fast(NamedTuple):
    """The same arrays, read with 8-bit activations: half the products. What `dual` takes in prefill."""

    codes: np.ndarray
    scales: np.ndarray


class F32(NamedTuple):
    """float32 matrices, packed: values [stack, NB, K, 16]."""

    values: np.ndarray


class Acts(NamedTuple):
    """Activations as the tiles of `tokens` tokens read them (the inputs of a matrix; unused fields are empty).

    codes int8 [tile][group][8 cells][tokens][pieces][4], or, for tile registers (kernels/amx.py), [tile][group][pieces][tokens][32];
    scales float32 [tile][group][tokens], offsets int32 (−8·Σ codes) [tile][group][tokens][pieces]; pieces is 2 for Q8, else 1; values
    float32 [tile][K][tokens].
    """

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray
    values: np.ndarray


def acts_of(quantised: bool, inputs: int, tokens: int) -> Acts:
    """Room for `tokens` activation rows of `inputs` values (a multiple of 32), zeroed: padding tokens stay zero."""
    q = inputs * tokens if quantised else 0
    f = 0 if quantised else inputs * tokens
    return Acts(np.zeros(2 * q, np.int8), np.zeros(q // 32, np.float32), np.zeros(q // 16, np.int32), np.zeros(f, np.float32))


new_acts = allocating(acts_of)  # for kernels; a call of it from plain Python would compile it once more in every process
