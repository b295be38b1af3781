"""Several contexts that take a step together: the Python side of decode_many.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from qwenc.errors import QwencError
from qwenc.kernels.linear_lanes import lane_width
from qwenc.model.decode_many import decode_many_phases, decode_many_step
from qwenc.model.forward import Model
from qwenc.model.forward import Sequence as Context
from qwenc.model.overloads import is_quantised
from qwenc.model.records import new_buffers
from qwenc.model.steps import Steps, check_finite, compile_steps
from qwenc.report import Reporter


def can_share_steps(model: Model) -> bool:
    """Whether a token has the same bits beside others: not with float32 weights, whose sums for one token are made in another order."""
    return is_quantised(model.decode_weights.qkv)


class Together:
    """Buffers for steps of up to `most` contexts of a model for which `can_share_steps`."""

    def __init__(self, model: Model, most: int) -> None:
        shape, weights = model.shape, model.decode_weights
        self.model = model
        self.steps = Steps(model.team, decode_many_phases(shape.layers, most))
        one = new_buffers(shape, weights, 1)
        parts = {name: getattr(one, name) for name in ("part_o", "part_m", "part_l")}
        self._buffers = new_buffers(shape, weights, max(2, most), all_logits=True)._replace(**parts)

    def step(self, contexts: Sequence[Context], tokens: Sequence[int]) -> list[np.ndarray | QwencError]:
        """Decode one token for each context. Returns float32 logits [vocab] of each (valid until the next step), or why there are none."""
        for context in contexts:
            context.check_room(1)
        arguments = self._arguments(contexts, tokens)
        self.steps.run(lambda team: decode_many_step(team, *arguments))
        vocab = self.model.config.vocab_size
        results: list[np.ndarray | QwencError] = []
        for i, context in enumerate(contexts):
            context.length += 1
            try:
                results.append(check_finite(self._buffers.logits[i, :vocab]))
            except QwencError as error:
                results.append(error)
        return results

    def compile(self, like: Context, reporter: Reporter) -> None:
        """Compile the step for contexts like this one, or load it from the cache."""
        compile_steps([(decode_many_step, (self.steps.team(0), *self._arguments([like], [0])))], reporter)

    def _arguments(self, contexts: Sequence[Context], tokens: Sequence[int]) -> tuple[Any, ...]:
        positions = np.array([context.length for context in contexts], np.int64)
        cos, sin = self.model.angles_at(positions)
        arrays = np.array([[(array.ctypes.data, array.shape[0]) for array in arrays_of(context.cache)] for context in contexts], np.int64)
        like = contexts[0].cache
        return (
            *(
                self.model.decode_weights,
                self.model.shape,
                like,
                arrays,
                contexts[0].sparse_decode,
                self._buffers,
                lane_width(len(contexts)),
            ),
            *(np.array(tokens, np.int64), positions, cos, sin),
        )


def arrays_of(record: Any) -> Iterator[np.ndarray]:
    """Every array of a cache, in the order of its fields, those of records inside it too."""
    if isinstance(record, np.ndarray):
        yield record
    elif isinstance(record, tuple):
        for part in record:
            yield from arrays_of(part)
