"""The machine's CPUs as Linux describes them under /sys and /proc: how fast each is, and which are threads of one core.

Every function takes the folder that stands for /, so that a recorded machine can be read like a real one.
"""

from __future__ import annotations

import platform
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from qwenc.machine.parts import part_name, part_speed
from qwenc.settings import cpu_list

SPEED_FILES = ("cpu_capacity", "cpufreq/cpuinfo_max_freq")


@dataclass(frozen=True, slots=True)
class Topology:
    """speed: what is told of each CPU, in any unit (empty = nothing); told_by: where that stands; core: the core that each CPU is a
    thread of, named after its lowest CPU."""

    speed: dict[int, float]
    told_by: str | None
    core: dict[int, int]


def read_topology(usable: list[int], root: Path) -> Topology:
    """What is known of all CPUs of the machine, and at least of the `usable` ones."""
    processors = _processors(root)
    cpus = sorted({*usable, *processors, *_cpu_folders(root)})
    speed, told_by = _speeds(cpus, usable, processors, root)
    return Topology(speed, told_by, {cpu: _core_of(cpu, processors, root) for cpu in cpus})


def cpu_name(root: Path = Path("/")) -> str:
    """The CPU's own name: `model name` of x86, the cores of an Arm chip and its board, else what the platform says."""
    processors = _processors(root).values()
    for key in ("model name", "Hardware"):
        named = next((fields[key] for fields in processors if fields.get(key)), None)
        if named:
            return named
    cores = Counter(part_name(*part) for fields in processors if (part := _part(fields)))
    if not cores:
        return platform.processor() or platform.machine()
    names = ", ".join(f"{count} × {name}" for name, count in cores.items())
    board = (text_of(root / "proc/device-tree/model") or "").strip("\0 \n")
    return f"{names} ({board})" if board else names


def text_of(path: Path) -> str | None:
    """The text of a small file; None where it cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


# ---- inside ---------------------------------------------------------------------------------------------------------------
def _speeds(cpus: list[int], usable: list[int], processors: dict[int, dict[str, str]], root: Path) -> tuple[dict[int, float], str | None]:
    """From the first source that knows every usable CPU."""
    for name in SPEED_FILES:
        told = {cpu: _number(root / f"sys/devices/system/cpu/cpu{cpu}" / name) for cpu in cpus}
        known = {cpu: value for cpu, value in told.items() if value is not None and value > 0}
        if known.keys() >= set(usable):
            return known, name.rpartition("/")[2]
    parts = {cpu: _part(fields) for cpu, fields in processors.items()}
    known = {cpu: part_speed(*part) for cpu, part in parts.items() if part}
    return (known, "/proc/cpuinfo") if known.keys() >= set(usable) else ({}, None)


def _core_of(cpu: int, processors: dict[int, dict[str, str]], root: Path) -> int:
    """The lowest CPU that shares a core with `cpu`: sysfs, else the core ids of /proc/cpuinfo, else the CPU itself."""
    try:
        return min(cpu_list(text_of(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or ""))
    except ValueError:
        pass
    own = _core_id(processors.get(cpu, {}))
    return cpu if own is None else min(other for other, fields in processors.items() if _core_id(fields) == own)


def _core_id(fields: dict[str, str]) -> tuple[str, str] | None:
    return (fields.get("physical id", ""), fields["core id"]) if "core id" in fields else None


def _part(fields: dict[str, str]) -> tuple[int, int] | None:
    """(implementer, part) of an Arm core."""
    try:
        return int(fields["CPU implementer"], 16), int(fields["CPU part"], 16)
    except (KeyError, ValueError):
        return None


def _processors(root: Path) -> dict[int, dict[str, str]]:
    """The entries of /proc/cpuinfo by CPU number."""
    found: dict[int, dict[str, str]] = {}
    fields: dict[str, str] = {}
    for line in (text_of(root / "proc/cpuinfo") or "").splitlines():
        key, _, value = (part.strip() for part in line.partition(":"))
        if key == "processor" and value.isdecimal():
            fields = found.setdefault(int(value), {})
        fields[key] = value
    return found


def _cpu_folders(root: Path) -> set[int]:
    try:
        names = [folder.name for folder in (root / "sys/devices/system/cpu").iterdir()]
    except OSError:
        return set()
    return {int(name[3:]) for name in names if re.fullmatch(r"cpu[0-9]+", name)}


def _number(path: Path) -> float | None:
    try:
        return float(text_of(path) or "")
    except ValueError:
        return None
