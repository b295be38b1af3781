"""`qwenc env`: what a bug report needs to say about the machine and the installation."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import Any

import click

from qwenc.commands.params import Command, json_option
from qwenc.commands.screen import write_out
from qwenc.plain_json import to_json

PACKAGES = ("numba", "llvmlite", "numpy", "safetensors", "tokenizers", "jinja2", "huggingface_hub", "click", "rich")


@click.command(cls=Command, short_help="Show the CPU, the SIMD level, cores, versions and cache folders.")
@json_option("Print one JSON object.")
def env(as_json: bool) -> None:
    """Show the CPU, the SIMD level in use, the cores and how they were chosen, versions and cache folders."""
    record = describe()
    write_out(to_json(record, indent=2) if as_json else table(record))


def describe() -> dict[str, Any]:
    import llvmlite.binding as llvm

    from qwenc.kernels import jit
    from qwenc.kernels.level import LEVEL, available_levels
    from qwenc.machine.cpus import choose_cpus
    from qwenc.machine.folders import cache_root
    from qwenc.machine.topology import cpu_name
    from qwenc.version import __version__

    choice = choose_cpus(None)
    cpu = {"cpu": cpu_name(), "llvm_cpu": llvm.get_host_cpu_name()}
    simd = {"simd": LEVEL.name, "simd_available": [level.name for level in available_levels()]}
    cores = {
        "threads": choice.threads,
        "cores": list(choice.cores),
        "fast_cores": list(choice.fast),
        "fast_cores_told_by": choice.told_by,
        "usable_cores": list(choice.usable),
        "cpu_quota": choice.quota,
    }
    versions = {package: _version(package) for package in PACKAGES}
    caches = {"model_cache": str(cache_root()), "kernel_cache": None if jit.CACHE_DIR is None else str(jit.CACHE_DIR)}
    return {"qwenc": __version__, "python": platform.python_version(), **cpu, **simd, **cores, **versions, **caches}


def table(record: dict[str, Any]) -> str:
    """`name: value` lines, values in one column."""
    width = max(map(len, record), default=0) + 2
    return "".join(f"{name.replace('_', ' ') + ':':<{width}}{_show(value)}\n" for name, value in record.items())


def _show(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_show(item)}" for name, item in value.items())
    if isinstance(value, (list, tuple, set, frozenset)):
        return ", ".join(map(_show, value)) or "none"
    return str(value)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
