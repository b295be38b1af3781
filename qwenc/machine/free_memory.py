"""How much memory this process may still take."""

from __future__ import annotations

from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> int | None:
    """What the system has to give without swapping, and no more than what the control group leaves; None where neither tells."""
    found = [_available(meminfo), _left(cgroup / "memory.max", cgroup / "memory.current")]
    told = [size for size in found if size is not None]
    return max(0, min(told)) if told else None


def _available(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _left(limit: Path, used: Path) -> int | None:
    try:
        return int(limit.read_text()) - int(used.read_text())
    except (OSError, ValueError):  # "max" is no number: no limit
        return None
