"""The settings of an engine, named as the command's flags, checked once where they enter."""

from __future__ import annotations

from dataclasses import dataclass, fields

from qwenc.errors import UsageError

WMODES = ("dual", "q4", "q8", "f32")
KV_TYPES = ("q8", "f32")


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run a model. Raises UsageError for a value out of range.

    wmode: weight format; `dual` reads q8 in prefill and q4 in decode. None = what a packed file holds, dual for a checkpoint.
    kv: KV cache type. threads: compute threads, None = the fast cores (at most 4). pin: pin each thread to a core.
    ctx_size: most tokens in the context, None = what the model was trained for. prefill_batch: tokens per prefill mini-batch.
    offline: never ask the Hub.
    """

    wmode: str | None = None
    kv: str = "q8"
    threads: int | None = None
    pin: bool = True
    ctx_size: int | None = None
    prefill_batch: int = 256
    offline: bool = False

    def __post_init__(self) -> None:
        if self.wmode is not None:
            _one_of("wmode", self.wmode, WMODES)
        _one_of("kv", self.kv, KV_TYPES)
        _at_least("threads", self.threads, 1)
        _at_least("ctx_size", self.ctx_size, 1)
        _at_least("prefill_batch", self.prefill_batch, 1)

    @classmethod
    def from_dict(cls, values: dict) -> Settings:
        """Settings from keyword arguments; an unknown name is a UsageError that lists the known ones."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise UsageError(f"unknown setting {name!r} (known: {', '.join(sorted(known))})")
        return cls(**values)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise UsageError(f"{name} must be a whole number of at least {least} and below 2^31, not {value!r}")
