"""Arms: the settings that a study compares, as a cross product of lists."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from qwenc.settings import Settings

FIELDS = tuple(field.name for field in fields(Settings))
SPARSE = tuple(name for name in FIELDS if name.startswith("sparse_"))  # mean nothing while sparse_attn is off
PER_ENGINE = ("wmode", "threads", "pin", "mmap", "ctx_size", "offline")  # another value needs another engine
DEFAULT = Settings()


@dataclass(frozen=True, slots=True)
class Arm:
    """One column of a study. label: "exact" or "sparse" and whatever else differs between the arms."""

    settings: Settings
    label: str

    @property
    def sparse(self) -> bool:
        return is_sparse(self.settings)

    @property
    def engine_key(self) -> tuple:
        return tuple(getattr(self.settings, name) for name in PER_ENGINE)

    def key(self) -> dict[str, Any]:
        """The settings by name, as a journal holds them."""
        return asdict(self.settings)


def prefill_key(settings: Settings, tokens: int) -> tuple:
    """Settings with the same key compute the same prefill of `tokens` tokens, into the same kind of cache."""
    from qwenc.model.sparse_plan import make_sparse, why_exact

    same = tuple(getattr(settings, name) for name in (*PER_ENGINE, "kv", "prefill_batch", "sparse_attn"))
    sparse = make_sparse(settings, prefill=True) if is_sparse(settings) else None
    return same if sparse is None or why_exact(sparse, tokens) else (*same, sparse)


def always_exact(settings: Settings, tokens: int) -> bool:
    """Whether decode up to a context of that many tokens is exact though sparse attention is on."""
    from qwenc.model.sparse_plan import make_sparse, why_exact

    return is_sparse(settings) and bool(why_exact(make_sparse(settings, prefill=False), tokens))


def is_sparse(settings: Settings) -> bool:
    return settings.sparse_attn


def exact(settings: Settings) -> Settings:
    """The same with exact attention."""
    return replace(settings, **{name: getattr(DEFAULT, name) for name in SPARSE})


def cross(base: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> list[Arm]:
    """An arm for every combination of the values in `lists` (settings by name), over the settings `base`; exact ones first, each
    once. Raises UsageError for a value out of range."""
    names = list(lists)
    found: dict[Settings, None] = {}
    for values in itertools.product(*(lists[name] for name in names)):
        settings = Settings.from_dict({**base, **dict(zip(names, values, strict=True))})
        found[settings if is_sparse(settings) else exact(settings)] = None
    ordered = sorted(found, key=is_sparse)
    varied = [name for name in FIELDS if name != "sparse_attn" and _differs(name, ordered)]
    return [Arm(settings, _label(settings, varied)) for settings in ordered]


def baseline(arm: Arm, arms: Sequence[Arm]) -> Arm | None:
    """What `arm` is compared with: the first exact arm with the same weights, threads and mini-batch, None if there is none."""
    same = ("wmode", "threads", "prefill_batch")
    for other in arms:
        if not other.sparse and all(getattr(other.settings, name) == getattr(arm.settings, name) for name in same):
            return other
    return None


def _differs(name: str, settings: Sequence[Settings]) -> bool:
    """Whether `name` tells any two of the arms apart; for a sparse setting, any two sparse arms."""
    ours = [each for each in settings if name not in SPARSE or is_sparse(each)]
    return len({getattr(each, name) for each in ours}) > 1


def _label(settings: Settings, varied: Sequence[str]) -> str:
    parts = ["sparse" if is_sparse(settings) else "exact"]
    for name in varied:
        if name in SPARSE and not is_sparse(settings):
            continue
        value = getattr(settings, name)
        parts.append(f"{name.removeprefix('sparse_').replace('_', '-')}={'default' if value is None else value}")
    return " ".join(parts)
