"""Which CPUs this process may use, which of them are fast, and how many threads that makes.

Fast: sysfs capacity at least half of the largest. Limits: the affinity mask and the cgroup CPU quota, whichever is smaller; both are
respected and never widened.
"""

from __future__ import annotations

import math
import os
import platform
from dataclasses import dataclass
from pathlib import Path

DEFAULT_THREADS = 4


@dataclass(frozen=True, slots=True)
class CpuChoice:
    """threads to run; cores: the CPU of each thread, in order; usable: CPUs in the mask; fast: those of them that are fast; quota: CPUs
    that the cgroup
    grants, None = no limit; note: one line if less was given than asked for."""

    threads: int
    cores: tuple[int, ...]
    usable: tuple[int, ...]
    fast: tuple[int, ...]
    quota: float | None
    note: str | None = None


def choose_cpus(wanted: int | None, sysfs: Path = Path("/sys"), mask: set[int] | None = None) -> CpuChoice:
    """`wanted` threads, or the default: up to 4 fast cores. Never more than the mask and the quota give."""
    usable = sorted(affinity_mask() if mask is None else mask)
    fast = fast_cores(usable, sysfs)
    quota = cgroup_quota(sysfs / "fs/cgroup")
    most = len(usable) if quota is None else min(len(usable), max(1, math.ceil(quota)))
    note = None
    if wanted is None:
        threads = min(DEFAULT_THREADS, len(fast), most)
    else:
        threads = min(wanted, most)
        if threads < wanted:
            note = f"{wanted} threads asked for, {threads} usable here (affinity mask and CPU quota): running {threads}"
    order = [*fast, *(cpu for cpu in usable if cpu not in fast)]
    return CpuChoice(threads, tuple(order[:threads]), tuple(usable), tuple(fast), quota, note)


def affinity_mask() -> set[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def fast_cores(usable: list[int], sysfs: Path) -> list[int]:
    """The usable CPUs whose capacity (or else top frequency) is at least half of the largest of all CPUs; all where nothing is told."""
    for name in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):
        told = {cpu: _number(sysfs / f"devices/system/cpu/cpu{cpu}" / name) for cpu in usable}
        known = {cpu: value for cpu, value in told.items() if value is not None}
        if len(known) == len(usable):
            largest = max(known.values())
            return [cpu for cpu in usable if 2 * known[cpu] >= largest]
    return list(usable)


def cgroup_quota(root: Path) -> float | None:
    """CPUs that the cgroup and its ancestors grant: v2 `cpu.max`, v1 `cpu.cfs_quota_us`; the least of all. None without a limit."""
    own = own_cgroups()
    quotas = []
    for folder in and_parents(root, own.get("", "")):
        quota, _, period = (_text(folder / "cpu.max") or "max").partition(" ")
        quotas.append(_ratio(quota, period or "100000"))
    for name in ("cpu", "cpu,cpuacct"):
        for folder in and_parents(root / name, own.get("cpu", "")):
            quotas.append(_ratio(_text(folder / "cpu.cfs_quota_us") or "-1", _text(folder / "cpu.cfs_period_us") or "100000"))
    return min((quota for quota in quotas if quota is not None), default=None)


def and_parents(root: Path, path: str) -> list[Path]:
    """root/path and every folder above it, down from root (inside a container the path may not exist below root)."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def own_cgroups() -> dict[str, str]:
    """Controller name → path of this process, "" for v2."""
    found = {}
    for line in (_text(Path("/proc/self/cgroup")) or "").splitlines():
        parts = line.split(":", 2)
        if len(parts) == 3:
            for controller in parts[1].split(","):
                found[controller] = parts[2]
    return found


def _ratio(quota: str, period: str) -> float | None:
    try:
        value = float(quota) / float(period)
    except (ValueError, ZeroDivisionError):
        return None  # "max"
    return value if value > 0 else None


def _number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None


def cpu_name() -> str:
    """The CPU's own name, as /proc/cpuinfo or the platform tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith(("model name", "hardware")):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
