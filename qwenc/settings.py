"""The settings of an engine, named as the command's flags, checked once where they enter."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from qwenc.errors import UsageError

WMODES = ("dual", "q4", "q8", "f32")
KV_TYPES = ("q8", "k8v4", "q4", "f32")
SPARSE_SCORES = ("scan", "summary", "probe", "oracle")
# what changes how fast an answer comes, and not one bit of it
NEUTRAL = frozenset({"threads", "pin", "mmap", "prefill_batch", "offline", "prompt_cache", "disk_kv", "disk_kv_gb"})


@dataclass(frozen=True, slots=True)
class Settings:
    """How to run a model. Raises UsageError for a value out of range.

    wmode: weight format; `dual` reads q8 in prefill and q4 in decode. None = what a packed file holds, dual for a checkpoint.
    kv: KV cache type; k8v4 has 8-bit keys and 4-bit values. threads: compute threads, None = the fast cores (at most 4). cpus:
    run on these, as in "4-7,9", None = the fast ones. pin: pin each thread to a core of its own.
    ctx_size: most tokens in the context, None = what the model was trained for. prefill_batch: tokens per prefill mini-batch.
    mmap: use the weights where the system keeps the file; False reads them into memory of the process, on large pages. offline: never ask
    the Hub.

    prompt_cache: a file that the state of the first prompt is saved in and restored from. disk_kv: a folder of such files, of at most
    disk_kv_gb gigabytes (10^9 bytes).

    sparse_attn: attend to the likeliest blocks of a long context only; sparse_… are without effect when it is off.
    sparse_block: tokens per block. sparse_k: blocks kept per kv head, the first and the current one among them; sparse_ratio: keep this
    share of the blocks where that is more than sparse_k. sparse_mass: keep on taking blocks, up to 4 · sparse_k, until they hold this share
    of the attention (0 = sparse_k alone decides). sparse_min_ctx: decode is exact below this many tokens; None = where a choice was
    measured to pay, twice the kept keys; 0 = as soon as the context has more than two blocks and more than are kept.
    sparse_score: what ranks the blocks. scan = every key at 2 bits, after a first look at each block's centre and width; summary = that
    first look alone; probe = sparse_probe sampled keys per block, for each query head alone; oracle = every key in full, for studies.
    sparse_pf_…: the same for prefill: k (None = sparse_k), the queries that share one choice (None = 64), and the least context.
    """

    wmode: str | None = None
    kv: str = "q8"
    threads: int | None = None
    cpus: str | None = None
    pin: bool = True
    ctx_size: int | None = None
    prefill_batch: int = 256
    mmap: bool = True
    offline: bool = False
    prompt_cache: str | None = None
    disk_kv: str | None = None
    disk_kv_gb: float = 8.0
    sparse_attn: bool = False
    sparse_k: int = 32
    sparse_block: int = 32
    sparse_probe: int = 8
    sparse_ratio: float = 0.0
    sparse_mass: float = 0.0
    sparse_min_ctx: int | None = None
    sparse_score: str = "scan"
    sparse_pf_min_ctx: int | None = None
    sparse_pf_k: int | None = None
    sparse_pf_group: int | None = None

    def __post_init__(self) -> None:
        if self.wmode is not None:
            _one_of("wmode", self.wmode, WMODES)
        _one_of("kv", self.kv, KV_TYPES)
        _at_least("threads", self.threads, 1)
        if self.cpus is not None:
            _cpu_list("cpus", self.cpus)
        _at_least("ctx_size", self.ctx_size, 1)
        _at_least("prefill_batch", self.prefill_batch, 1)
        for name in ("sparse_k", "sparse_block", "sparse_probe", "sparse_pf_k", "sparse_pf_group"):
            _at_least(name, getattr(self, name), 1)
        for name in ("sparse_min_ctx", "sparse_pf_min_ctx"):
            _at_least(name, getattr(self, name), 0)
        if isinstance(self.disk_kv_gb, bool) or not isinstance(self.disk_kv_gb, (int, float)) or not 0 <= self.disk_kv_gb < 1e9:
            raise UsageError(f"disk_kv_gb must be a number of gigabytes, not {self.disk_kv_gb!r}")
        for name in ("sparse_ratio", "sparse_mass"):
            _share(name, getattr(self, name))
        _one_of("sparse_score", self.sparse_score, SPARSE_SCORES)

    @classmethod
    def from_dict(cls, values: dict) -> Settings:
        """Settings from keyword arguments; an unknown name is a UsageError that lists the known ones."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise UsageError(f"unknown setting {name!r} (known: {', '.join(sorted(known))})")
        return cls(**values)

    def deciding(self) -> dict:
        """The settings that results depend on: those of sparse attention only while it is on, and then the mini-batches of prefill too,
        whose tokens choose their blocks together."""
        off = {name for name in NEUTRAL if name != "prefill_batch" or not self.sparse_attn}
        if not self.sparse_attn:
            off |= {field.name for field in fields(self) if field.name.startswith("sparse_")}
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name not in off}


def cpu_list(text: str) -> tuple[int, ...]:
    """The CPU numbers of a list like 4-7,9, in its order. Raises ValueError for anything else."""
    found: list[int] = []
    for part in text.split(","):
        numbers = re.fullmatch(r"\s*([0-9]{1,4})(?:-([0-9]{1,4}))?\s*", part)
        if numbers is None or int(numbers[2] or numbers[1]) < int(numbers[1]):
            raise ValueError(text)
        found.extend(range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1))
    if len(set(found)) < len(found):
        raise ValueError(text)
    return tuple(found)


def _cpu_list(name: str, value: str) -> None:
    try:
        cpu_list(value)
    except (ValueError, AttributeError):
        raise UsageError(f"{name} must name CPUs as in 4-7 or 0,2,4, not {value!r:.60}") from None


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(f"{name} must be one of {', '.join(allowed)}, not {value!r}")


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
        raise UsageError(f"{name} must be a whole number of at least {least} and below 2^31, not {value!r}")


def _share(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise UsageError(f"{name} must be between 0 and 1, not {value!r}")
