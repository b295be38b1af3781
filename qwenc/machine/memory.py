"""How much memory this process holds, and how much it can still get."""

from __future__ import annotations

import sys
from pathlib import Path

from qwenc.machine.quota import and_parents, own_cgroups


def available_memory(meminfo: Path = Path("/proc/meminfo"), cgroups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that can be had without swapping (pages of files count as free), or the limit of a cgroup above us if that is less. None
    where the system does not tell."""
    found = [kilobytes * 1024 for kilobytes in _numbers(meminfo, "MemAvailable:")]
    if not found:
        return None
    own = own_cgroups(Path("/"))
    folders = and_parents(cgroups, own.get("", "")) + and_parents(cgroups / "memory", own.get("memory", ""))
    for folder in folders:
        for name in ("memory.max", "memory.limit_in_bytes"):
            found += _numbers(folder / name, "")
    return min(found)


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the system has to give without swapping, and no more than what the control group leaves beside what it uses, pages of files
    among that; None where neither tells."""
    found = [kilobytes * 1024 for kilobytes in _numbers(meminfo, "MemAvailable:")]
    limit, used = (_numbers(cgroup / name, "") for name in ("memory.max", "memory.current"))  # "max" is no number: no limit
    if limit and used:
        found.append(limit[0] - used[0])
    return max(0, min(found)) if found else None


def _numbers(path: Path, label: str) -> list[int]:
    """The number behind `label` on each line that begins with it."""
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError):
        return []
    words = [line.removeprefix(label).split() for line in lines if line.startswith(label)]
    return [int(word[0]) for word in words if word and word[0].isdecimal()]


def peak_rss_bytes() -> int | None:
    """The most memory this process ever held (or since `reset_peak`), in bytes; None where the system does not tell."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> bool:
    """Count the peak from now on. False where the system cannot (anything but Linux): the peak stays that of the whole process."""
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")
    except OSError:
        return False
    return True
