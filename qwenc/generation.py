"""One completion in the making: the ids picked so far and the text that they came to. Whoever runs the model hands in the logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from qwenc.sampling import Sampler
from qwenc.text.stream import TextOutput
from qwenc.timing import Timings, TokenTiming


@dataclass(slots=True)
class Step:
    """One generated token. text: the characters that are complete now (stop strings cut away); logprob: natural logarithm of the
    token's probability before any sampling filter. The last record has finish_reason ("stop" or "length"), timings and usage; its id is
    None when no token came with it."""

    id: int | None
    text: str
    logprob: float | None = None
    finish_reason: str | None = None
    timings: Timings | None = None
    usage: tuple[int, int] | None = None
    token_timing: TokenTiming | None = None


class Generation:
    """Picks tokens until an id of `ends`, a stop string (which `output` finds) or `room` tokens. `ids`: the prompt."""

    def __init__(self, ids: Sequence[int], room: int, sampler: Sampler, output: TextOutput | None, ends: frozenset[int]) -> None:
        self.ids, self.room, self.output = list(ids), room, output
        self._sampler, self._ends = sampler, ends
        self._history = list(ids)

    @property
    def count(self) -> int:
        """Tokens generated so far."""
        return len(self._history) - len(self.ids)

    def take(self, logits: np.ndarray, timings: Timings, token_timing: TokenTiming | None = None) -> Step:
        """The next token after `logits`, float32 [vocab]. Nothing may follow a step that has a finish_reason. Raises QwencError for logits
        that are not finite."""
        if not self.room:
            return Step(None, "", None, "length", timings, (len(self.ids), 0))
        token = self._sampler.pick(logits, self._history)
        self._history.append(token)
        step = Step(token, "", log_probability(logits, token), token_timing=token_timing)
        output = self.output
        if token in self._ends:
            step.text, step.finish_reason = output.flush() if output else "", "stop"
        else:
            step.text, stopped = output.push(token) if output else ("", False)
            if stopped:
                step.finish_reason = "stop"
            elif self.count == self.room:
                step.text += output.flush() if output else ""
                step.finish_reason = "length"
        if step.finish_reason:
            step.timings, step.usage = timings, (len(self.ids), self.count)
        return step


def log_probability(logits: np.ndarray, token: int) -> float:
    """ln softmax(logits)[token]."""
    from qwenc.kernels.reduce import log_sum_exp

    return float(logits[token]) - float(log_sum_exp(logits))
