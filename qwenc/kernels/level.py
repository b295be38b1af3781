"""Which SIMD level the kernels are built for: chosen from what the CPU reports, forced by QWENC_SIMD for tests.

Every level gives the same integers and, since every float operation is written out as it is meant (fma included), the same floats.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass

import llvmlite.binding as llvm

from qwenc.errors import UsageError


@dataclass(frozen=True, slots=True)
class Level:
    """name; bytes of one native vector; tokens of a GEMM tile and query rows of an attention tile, by registers; CPU features it needs."""

    name: str
    vector_bytes: int
    tile_tokens: int
    tile_rows: int
    needs: tuple[str, ...]
    machines: tuple[str, ...]

    @property
    def vnni(self) -> bool:
        """Whether the dot product takes one unsigned side and 32-bit sums (vpdpbusd)."""
        return self.name in ("amx", "avx512", "avxvnni")

    @property
    def x86(self) -> bool:
        """Whether there are the instructions of AVX2 and more."""
        return self.name in ("amx", "avx512", "avxvnni", "avx2")

    @property
    def tiles(self) -> bool:
        """Whether prefill multiplies whole tiles of 16 tokens by 16 rows (AMX); all else is as on AVX-512."""
        return self.name == "amx"

    @property
    def few_registers(self) -> bool:
        """Whether there are 16 registers only, and instructions that name them x."""
        return self.name in ("avx2", "avxvnni")

    @property
    def words(self) -> bool:
        """Whether numbers of 14 or 15 bits lie in 16-bit words (vpmaddwd) and not in two bytes each."""
        return self.name == "avx2"

    @property
    def shorts(self) -> bool:
        """Whether products of bytes are summed in 16 bits (vpmaddubsw) before they are widened, there being no vpdpbusd."""
        return self.name == "avx2"

    @property
    def signed_bias(self) -> int:
        """What a signed dot product adds per unit of Σx, because weights go in as code + 128: its sum must start at −bias·Σx."""
        return 128 if self.vnni else 0


X86 = ("x86_64", "amd64")
ARM = ("aarch64", "arm64")

AVX512 = ("avx512f", "avx512bw", "avx512vl", "avx512vnni")

LEVELS = (
    Level("amx", 64, 16, 8, (*AVX512, "amx-tile", "amx-int8"), X86),
    Level("avx512", 64, 8, 8, AVX512, X86),
    Level("avxvnni", 32, 4, 2, ("avxvnni", "avx2", "fma"), X86),
    Level("avx2", 32, 4, 2, ("avx2", "fma"), X86),
    Level("neon", 16, 4, 2, ("dotprod",), ARM),
    Level("plain", 16, 4, 2, (), X86 + ARM + ("*",)),
)


# Arm features that LLVM does not report of its host though it knows them: bits of AT_HWCAP, where the kernel tells what all cores have.
AT_HWCAP = 16
HWCAP_BITS = {"fullfp16": 10, "dotprod": 20}


# The system call that asks for AMX, of x86-64 (Linux, Documentation/arch/x86/xstate.rst).
ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18


def host_features() -> frozenset[str]:
    """CPU feature names as LLVM spells them. NUMBA_CPU_FEATURES replaces them, and NUMBA_CPU_NAME alone leaves none, as in Numba."""
    named = named_features()
    if named is not None:
        return frozenset(f[1:] for f in named.split(",") if f.startswith("+"))
    return frozenset(name for name, present in llvm.get_host_cpu_features().items() if present) | arm_features()


def named_features() -> str | None:
    """The features that the user names for Numba; None leaves them to be found out."""
    named = os.environ.get("NUMBA_CPU_FEATURES")
    return "" if named is None and os.environ.get("NUMBA_CPU_NAME") else named


def named_cpu() -> str:
    """The CPU as LLVM calls it, or as the user names it for Numba."""
    return os.environ.get("NUMBA_CPU_NAME") or llvm.get_host_cpu_name()


def arm_features() -> frozenset[str]:
    """What an Arm system tells of HWCAP_BITS. Numba has to be told of them: see kernels/jit.py."""
    if platform.machine().lower() not in ARM:
        return frozenset()
    if platform.system() == "Darwin":
        return frozenset(HWCAP_BITS)  # every Apple silicon
    try:
        capabilities = ctypes.CDLL(None).getauxval
    except (OSError, AttributeError):
        return frozenset()
    capabilities.argtypes, capabilities.restype = [ctypes.c_ulong], ctypes.c_ulong
    present = capabilities(AT_HWCAP)
    return frozenset(name for name, bit in HWCAP_BITS.items() if present >> bit & 1)


def available_levels() -> list[Level]:
    """The levels that this machine can run, fastest first. `plain` is always there."""
    machine, features = platform.machine().lower(), host_features()
    found = [level for level in LEVELS if (machine in level.machines or "*" in level.machines) and features.issuperset(level.needs)]
    return [level for level in found if not level.tiles or may_use_tiles()]


def may_use_tiles() -> bool:
    """Ask the system for the tile registers, which it hands out per process since their state is large. For all threads, once."""
    if platform.system() != "Linux":
        return False
    try:
        return ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0
    except (OSError, AttributeError):  # a C library that is no Linux one's
        return False


def choose_level() -> Level:
    """The fastest level, or the one that QWENC_SIMD names. Raises UsageError for one that this machine lacks."""
    levels = available_levels()
    named = os.environ.get("QWENC_SIMD")
    if not named:
        return levels[0]
    for level in levels:
        if level.name == named:
            return level
    raise UsageError(f"QWENC_SIMD={named}: this machine has {', '.join(level.name for level in levels)}")


LEVEL = choose_level()
