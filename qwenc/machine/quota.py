"""How many CPUs the cgroup grants this process (containers, systemd units)."""

from __future__ import annotations

from pathlib import Path

from qwenc.machine.topology import text_of


def cgroup_quota(root: Path) -> float | None:
    """CPUs that the cgroup and its ancestors grant: v2 `cpu.max`, v1 `cpu.cfs_quota_us`; the least of all. None without a limit.
    `root` stands for /."""
    own, mounted = own_cgroups(root), root / "sys/fs/cgroup"
    quotas = []
    for folder in and_parents(mounted, own.get("", "")):
        quota, _, period = (text_of(folder / "cpu.max") or "max").partition(" ")
        quotas.append(_ratio(quota, period or "100000"))
    for name in ("cpu", "cpu,cpuacct"):
        for folder in and_parents(mounted / name, own.get("cpu", "")):
            quotas.append(_ratio(text_of(folder / "cpu.cfs_quota_us") or "-1", text_of(folder / "cpu.cfs_period_us") or "100000"))
    return min((quota for quota in quotas if quota is not None), default=None)


def and_parents(root: Path, path: str) -> list[Path]:
    """root/path and every folder above it, down from root (inside a container the path may not exist below root)."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def own_cgroups(root: Path) -> dict[str, str]:
    """Controller name → path of this process, "" for v2."""
    found = {}
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
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
