"""What a run took, and the log lines that scripts parse. Field names, order and units of the lines are a contract."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class PrefillTiming:
    """Milliseconds of one prefill. gemm is the sum of the four kernels; lm_head is not in it."""

    n: int = 0
    total_ms: float = 0.0
    qkv_ms: float = 0.0
    o_ms: float = 0.0
    gateup_ms: float = 0.0
    down_ms: float = 0.0
    attn_ms: float = 0.0

    @property
    def gemm_ms(self) -> float:
        return self.qkv_ms + self.o_ms + self.gateup_ms + self.down_ms

    @property
    def other_ms(self) -> float:
        return max(0.0, self.total_ms - self.gemm_ms - self.attn_ms)

    def lines(self) -> list[str]:
        """The [PREFILL-TIMING] and [PREFILL-KERNELS] lines."""
        total, gemm = self.total_ms, self.gemm_ms
        parts = (("GEMM", gemm), ("ATTN", self.attn_ms), ("OTHER", self.other_ms))
        kernels = (("QKV", self.qkv_ms), ("O", self.o_ms), ("GATEUP", self.gateup_ms), ("DOWN", self.down_ms))
        return [
            f"[PREFILL-TIMING] n={self.n} total={total:.1f}ms | {_shares(parts, total)}",
            f"[PREFILL-KERNELS] {_shares(kernels, gemm)}",
        ]


DECODE_FIELDS = ("qkv", "attn", "o", "gu", "down", "lm", "nrm", "rope", "kv", "silu", "othloop", "other")


@dataclass(slots=True)
class TokenTiming:
    """Milliseconds of one decoded token, by the fields of [DEC-SINGLE]. seq = context length after the token."""

    seq: int
    ms: dict[str, float]
    total_ms: float

    def line(self) -> str:
        """The [DEC-SINGLE] line."""
        parts = " ".join(f"{name}={self.ms.get(name, 0.0):.2f}" for name in DECODE_FIELDS)
        return f"[DEC-SINGLE] seq={self.seq} {parts} total={self.total_ms:.2f}"


@dataclass(slots=True)
class DecodeTiming:
    """Milliseconds of all decode steps of one generation. gemm = qkv + o + gu + down + lm. sparse_n: steps of sparse attention; missed_sum,
    missed_worst: the share of attention that their choices of blocks left out, as estimated: summed over these steps (mean over layers
    and kv heads), and the largest of any layer and kv head."""

    n: int = 0
    total_ms: float = 0.0
    gemm_ms: float = 0.0
    attn_ms: float = 0.0
    sparse_n: int = 0
    missed_sum: float = 0.0
    missed_worst: float = 0.0

    @property
    def other_ms(self) -> float:
        return max(0.0, self.total_ms - self.gemm_ms - self.attn_ms)

    @property
    def missed_mean(self) -> float:
        return self.missed_sum / self.sparse_n if self.sparse_n else 0.0

    def add_missed(self, mean: float, worst: float) -> None:
        """Notes what the last step's choice left out."""
        self.sparse_n += 1
        self.missed_sum += mean
        self.missed_worst = max(self.missed_worst, worst)

    def add(self, token: TokenTiming) -> None:
        self.n += 1
        self.total_ms += token.total_ms
        self.gemm_ms += sum(token.ms.get(name, 0.0) for name in ("qkv", "o", "gu", "down", "lm"))
        self.attn_ms += token.ms.get("attn", 0.0)

    def lines(self) -> list[str]:
        """The [DECODE-TIMING] line."""
        each = self.total_ms / self.n if self.n else 0.0
        parts = (("GEMM", self.gemm_ms), ("ATTN", self.attn_ms), ("OTHER", self.other_ms))
        return [f"[DECODE-TIMING] n={self.n} total={self.total_ms:.1f}ms ({each:.2f} ms/tok) | {_shares(parts, self.total_ms)}"]


@dataclass(slots=True)
class Timings:
    """All of one generation. load_s: opening the model; compile_s: JIT before the first step (0 when cached)."""

    load_s: float = 0.0
    compile_s: float = 0.0
    prefill: PrefillTiming = field(default_factory=PrefillTiming)
    decode: DecodeTiming = field(default_factory=DecodeTiming)


def _shares(parts: tuple[tuple[str, float], ...], whole: float) -> str:
    return " ".join(f"{name}={ms:.1f}ms({100 * ms / whole if whole else 0.0:4.1f}%)" for name, ms in parts)
