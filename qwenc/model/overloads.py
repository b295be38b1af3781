"""Questions about weight records; those that a step asks are answered while it is compiled."""

from __future__ import annotations

from numba import types

from qwenc.kernels.jit import by_type
from qwenc.kernels.records import F32


def is_quantised(matrix) -> bool:
    """Whether a matrix is read with integer activations. In compiled code and in Python."""
    return not isinstance(matrix, F32)


@by_type(is_quantised)
def _is_quantised(matrix):
    answer = matrix.instance_class is not F32
    return lambda matrix: answer


def is_absent(matrix) -> bool:
    """For overloads: whether the model has no such matrix (the type of None)."""
    return isinstance(matrix, types.NoneType)
