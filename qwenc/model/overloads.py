"""Questions that a step asks of its weight records, answered while it is compiled."""

from __future__ import annotations

from numba import types
from numba.extending import overload

from qwenc.kernels.records import F32


def quantised(matrix):
    """Whether activations must be int8 for this matrix."""
    raise NotImplementedError("runs in compiled code only")


@overload(quantised)
def _quantised(matrix):
    answer = matrix.instance_class is not F32
    return lambda matrix: answer


def is_absent(matrix) -> bool:
    """For overloads: whether the model has no such matrix (the type of None)."""
    return isinstance(matrix, types.NoneType)
