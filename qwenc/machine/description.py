"""What `qwenc env` tells about this machine."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Any

from qwenc.machine.cpus import choose_cpus


def describe(threads: int | None = None) -> dict[str, Any]:
    """CPU name, SIMD level in use and available, cores and how they were chosen. Imports llvmlite."""
    import llvmlite.binding as llvm

    from qwenc.kernels.level import LEVEL, available_levels

    choice = choose_cpus(threads)
    return {
        "cpu": cpu_name(),
        "llvm_cpu": llvm.get_host_cpu_name(),
        "simd": LEVEL.name,
        "simd_available": [level.name for level in available_levels()],
        "threads": choice.threads,
        "cores": list(choice.cores),
        "fast_cores": list(choice.fast),
        "usable_cores": list(choice.usable),
        "cpu_quota": choice.quota,
    }


def cpu_name() -> str:
    """The CPU's own name, as /proc/cpuinfo or the platform tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
