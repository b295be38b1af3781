"""Which CPUs this process may use, which of them are fast, and how many threads that makes.

A CPU is fast if it has at least half the speed of the machine's fastest; of CPUs that are threads of one core, one counts. Limits: the
affinity mask and the cgroup CPU quota, whichever is smaller; both are respected and never widened.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from qwenc.errors import UsageError
from qwenc.machine.quota import cgroup_quota
from qwenc.machine.topology import Topology, read_topology
from qwenc.settings import cpu_list

DEFAULT_THREADS = 4
SPEED_CLASSES = 8  # CPUs within an eighth of the fastest are equals: the better half of one cluster is not worth a mixed team


@dataclass(frozen=True, slots=True)
class CpuChoice:
    """threads to run; cores: the CPU of each thread, in order; usable: CPUs in the mask; fast: those of them that are fast, one per core;
    quota: CPUs that the cgroup grants, None = no limit; told_by: what the speeds were read from; note: one line if less was given than
    asked for."""

    threads: int
    cores: tuple[int, ...]
    usable: tuple[int, ...]
    fast: tuple[int, ...]
    quota: float | None
    told_by: str | None = None
    note: str | None = None

    def describe(self) -> str:
        """4 threads, cores 4-7 (usable 0-7, fast 4-7 by cpu_capacity)"""
        known = f" by {self.told_by}" if self.told_by else ""
        limit = "" if self.quota is None else f", CPU quota {self.quota:g}"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return f"{threads}, cores {show_cores(self.cores)} (usable {show_cores(self.usable)}, fast {show_cores(self.fast)}{known}{limit})"


def choose_cpus(wanted: int | None, named: str | None = None, root: Path = Path("/"), mask: set[int] | None = None) -> CpuChoice:
    """`wanted` threads on the CPUs `named` ("4-7"); by default one on each of those, or on up to 4 fast cores. Never more than the mask
    and the quota give. `root` stands for /. Raises UsageError for a named CPU outside the mask."""
    usable = sorted(affinity_mask() if mask is None else mask)
    topology = read_topology(usable, root)
    fast = _fast(usable, topology)
    quota = cgroup_quota(root)
    if named is None:
        order = [*fast, *sorted(set(usable) - set(fast), key=lambda cpu: _rank(cpu, topology))]
        default = min(DEFAULT_THREADS, len(fast))
    else:
        order = _named(named, usable)
        default = len(order)
    most = len(order) if quota is None else min(len(order), max(1, math.ceil(quota)))
    threads = min(default if wanted is None else wanted, most)
    note = None
    asked = wanted or (len(order) if named else 0)
    if threads < asked:
        limits = "CPUs named and CPU quota" if named else "affinity mask and CPU quota"
        note = f"{asked} threads asked for, {threads} usable here ({limits}): running {threads}"
    return CpuChoice(threads, tuple(order[:threads]), tuple(usable), tuple(sorted(fast)), quota, topology.told_by, note)


def affinity_mask() -> set[int]:
    """CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def show_cores(cores: Sequence[int]) -> str:
    """CPU numbers as ranges: 0-3,8."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _fast(usable: list[int], topology: Topology) -> list[int]:
    """One usable CPU of every fast core, the fastest first; of every core where none of the usable ones is fast or nothing is told."""
    firsts: dict[int, int] = {}
    for cpu in usable:
        firsts.setdefault(topology.core[cpu], cpu)
    cores = sorted(firsts.values(), key=lambda cpu: _rank(cpu, topology))
    largest = max(topology.speed.values(), default=0.0)
    return [cpu for cpu in cores if 2 * topology.speed.get(cpu, largest) >= largest] or cores


def _rank(cpu: int, topology: Topology) -> tuple[int, int]:
    """Sorts the fastest first, equals by number."""
    largest = max(topology.speed.values(), default=1.0)
    return -math.ceil(SPEED_CLASSES * topology.speed.get(cpu, largest) / largest), cpu


def _named(named: str, usable: list[int]) -> list[int]:
    """The CPUs of a list like 4-7. Raises UsageError for one outside the mask."""
    cpus = cpu_list(named)
    missing = sorted(set(cpus) - set(usable))
    if missing:
        raise UsageError(f"cpus {named}: this process may use {show_cores(usable)}, not {show_cores(missing)}")
    return list(cpus)
