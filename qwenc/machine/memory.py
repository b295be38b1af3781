"""How much memory this process holds."""

from __future__ import annotations

import sys


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
