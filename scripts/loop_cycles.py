"""Loops of compiled assembly, and what llvm-mca says one turn of them takes.

llvm-mca plays a straight run of instructions on LLVM's model of a core, with all data in the first cache and no branch mispredicted.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field

TURNS = 100
_LABEL = re.compile(r"^(\.?L\w+):")
_BRANCH = re.compile(r"^\s+(?:b|b\.\w+|cbn?z|tbn?z|j\w+)\s+(?:.*,\s*)?(\.?L\w+)\s*$")


@dataclass
class Loop:
    """lines: instructions from the label to the jump back; own: those outside the inner loops. Places are line numbers."""

    first: int
    last: int
    lines: list[str]
    inner: list[Loop] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    def count(self, pattern: str) -> int:
        """Instructions whose mnemonic matches, in the loop and those inside."""
        return sum(bool(re.fullmatch(pattern, line.replace("{vex}", "").split()[0])) for line in self.lines)


def loops_of(assembly: str) -> list[Loop]:
    """Every loop of a text of assembly, an outer one before its inner ones. A loop is what lies between a label and a jump back to it."""
    text = assembly.splitlines()
    labels = {found[1]: place for place, line in enumerate(text) if (found := _LABEL.match(line))}
    ends: dict[int, int] = {}
    for place, line in enumerate(text):
        found = _BRANCH.match(line)
        first = labels.get(found[1]) if found else None
        if first is not None and first <= place:
            ends[first] = max(place, ends.get(first, 0))
    loops = []
    for first, last in sorted(ends.items(), key=lambda ends: (ends[0], -ends[1])):
        body = text[first : last + 1]
        loops.append(Loop(first, last, [line for line in body if _is_instruction(line)]))
    for place, loop in enumerate(loops):
        loop.inner = [other for other in loops[place + 1 :] if other.first <= loop.last]
        inside = {line for other in loop.inner for line in range(other.first, other.last + 1)}
        loop.own = [text[line] for line in range(loop.first, loop.last + 1) if line not in inside and _is_instruction(text[line])]
    return loops


def _is_instruction(line: str) -> bool:
    return line.startswith("\t") and not line.lstrip().startswith((".", "#", "//"))


def cycles(lines: Sequence[str], cpu: str) -> float:
    """Of one turn, after many: what comes before and after a loop is not in it. Raises RuntimeError if llvm-mca cannot read the lines."""
    architecture = "x86_64" if any("%" in line for line in lines) else "aarch64"
    command = [find_mca(), f"-mtriple={architecture}", f"-mcpu={cpu}", f"-iterations={TURNS}"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    found = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"llvm-mca: {done.stderr.strip()[:500]}")
    return int(found[1]) / TURNS


def find_mca() -> str:
    """llvm-mca of LLVM 19, else another. Raises SystemExit without one."""
    for name in ("llvm-mca-19", "llvm-mca"):
        if shutil.which(name):
            return name
    raise SystemExit("needs llvm-mca (Debian and Ubuntu: apt-get install llvm-19)")
